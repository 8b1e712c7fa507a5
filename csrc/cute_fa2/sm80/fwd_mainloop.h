// The walk over the keys: S = Q K^T, online softmax, O += P V, one block of keys at a time.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/copy.h"
#include "common/layout.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/platform.h"
#include "common/tile.h"
#include "sm80/arguments.h"
#include "sm80/row_holders.h"

namespace flash_cute::sm80 {

template <class Traits, MaskKind kMask>
struct FwdMainloop {
  using Element = typename Traits::Element;
  using TiledMma = typename Traits::TiledMma;
  using SharedMemory = typename Traits::SharedMemory;
  using SmemLayoutQ = typename Traits::SmemLayoutQ;
  using SmemLayoutK = typename Traits::SmemLayoutK;
  using SmemLayoutV = typename Traits::SmemLayoutV;
  using SmemLayoutVt = typename Traits::SmemLayoutVt;
  using LoadQ = typename Traits::LoadQ;
  using LoadK = typename Traits::LoadK;
  using LoadVt = typename Traits::LoadVt;
  using LoadP = typename Traits::LoadP;
  using StoreP = typename Traits::StoreP;
  using ShapeQ = typename Traits::ShapeQ;
  using ShapeK = typename Traits::ShapeK;
  using ShapeVt = typename Traits::ShapeVt;
  using ShapeS = typename Traits::ShapeS;

  // Rows of the tile that the warps' MMAs cover at a time: the first MMA of each, then the second.
  static constexpr int kMmaRows = cute::tile_size<0>(TiledMma{});
  // The rows of S and O that this thread holds elements of.
  static constexpr int kRows = 2 * Traits::kBlockM / kMmaRows;
  using Softmax = OnlineSoftmax<kRows>;
  static constexpr bool kScoresAhead = Traits::kScoresAhead;
  // Whether blocks of which the rows of the first MMAs see no key are left to the second: under a
  // causal mask the last of a tile of 128 x 64 is one.
  static constexpr bool kSkipsRows =
      kMask == MaskKind::kBanded && !Traits::kSharesRows && Traits::kBlockM == 2 * kMmaRows &&
      (kScoresAhead ? Traits::kBlockN == kMmaRows : Traits::kBlockN <= kMmaRows);

  // Leaves the weighted sum of V in `tOrO` and its statistics in `softmax`. On return no warp reads
  // Q's space any more.
  //   keys_values   hands out the tiles of K and V
  //   tOrO          (4, MMA_M, kHeadDimV / 8), cleared here
  template <class KeysValues, class Out>
  static CUTE_DEVICE void run(const Arguments& arguments, TileCoord tile,
                              const KeysValues& keys_values, const Mask<kMask>& mask, int len_q,
                              SharedMemory& smem, Softmax& softmax, Out& tOrO) {
    using namespace cute;
    const FwdParams& params = arguments.params;
    const QueryRows& query_rows = arguments.query_rows;
    constexpr int kBlockN = Traits::kBlockN;
    const unsigned thread = platform::thread_index();
    const int row0 = tile.m_block * Traits::kBlockM;

    clear(tOrO);
    const int row_end = min(row0 + Traits::kBlockM, query_rows.count(len_q));
    const BlockRange visible = mask.visible_blocks(row0, row_end, kBlockN);
    if (visible.end <= visible.begin) return;
    // The walk is from the last key to the first.
    const int last_block = visible.end - 1;
    // n_block > visible.begin, without a register for the latter: the first row's first key lies
    // before the block.
    auto has_next = [&](int n_block) {
      return mask.begin(platform::computed_here(row0, n_block)) < n_block * kBlockN;
    };
    // Likewise, whether it is not the first that is visited.
    auto has_previous = [&](int n_block) {
      const int end =
          min(platform::computed_here(row0, n_block) + Traits::kBlockM, query_rows.count(len_q));
      return mask.end(end - 1) > (n_block + 1) * kBlockN;
    };

    // Shared memory. Block n_block of the keys lives in stage n_block % kStages.
    auto sQ = make_tensor(make_smem_ptr(smem.q), SmemLayoutQ{});  // (kBlockM, kHeadDim)
    auto sK = [&](int n_block) {                                  // (kBlockN, kHeadDim)
      return make_tensor(make_smem_ptr(smem.k[n_block % Traits::kStages]), SmemLayoutK{});
    };
    auto sV = [&](int n_block) {  // (kBlockN, kHeadDimV)
      return make_tensor(make_smem_ptr(smem.v[n_block % Traits::kStages]), SmemLayoutV{});
    };
    auto sVt = [&](int n_block) {  // (kHeadDimV, kBlockN), the same elements
      return make_tensor(make_smem_ptr(smem.v[n_block % Traits::kStages]), SmemLayoutVt{});
    };

    // Registers; N = kBlockN, D = kHeadDim, Dv = kHeadDimV. Where warps share rows, the columns of
    // S and O, which are B's, are a part of these.
    TiledMma mma;
    auto tSrQ = make_tensor<Element>(partition_shape_A(mma, ShapeQ{}));    // (8, MMA_M, D / 16)
    auto tSrK = make_tensor<Element>(partition_shape_B(mma, ShapeK{}));    // (4, N / 8, D / 16)
    auto tOrVt = make_tensor<Element>(partition_shape_B(mma, ShapeVt{}));  // (4, Dv / 8, N / 16)
    LoadQ load_q;
    auto tXrQ = load_q.get_slice(thread).retile_D(tSrQ);  // (ldmatrix, MMA_M, D / 16)

    // Every block but the last is whole.
    auto load_keys = [&](int n_block, auto is_whole) {
      keys_values.template load_keys<decltype(is_whole)::value>(n_block, sK(n_block));
    };
    auto load_values = [&](int n_block, auto is_whole) {
      keys_values.template load_values<decltype(is_whole)::value>(n_block, sV(n_block));
    };

    // With scores ahead: S of all rows and of the block that is next to be worked on, and whether
    // by it a row may rise, asked before the mask.
    auto tSrS_all = partition_fragment_C(mma, ShapeS{});  // (4, MMA_M, N / 8)
    bool may_rise = true;                                 // in the first block all do

    // One block of keys, with the tile's rows but those of the first kSkipped MMAs. With scores
    // ahead, and a next block to compute those of: `computes_next`.
    auto step = [&](int index, auto skipped, auto computes_next) {
      constexpr int kSkipped = decltype(skipped)::value;
      constexpr bool kComputesNext = decltype(computes_next)::value;
      static_assert(kScoresAhead || !kComputesNext);
      constexpr int kStepM = Traits::kBlockM - kSkipped * kMmaRows;
      using ShapeStep = Shape<Int<kStepM>, Int<kBlockN>>;
      const int step_row0 = row0 + kSkipped * kMmaRows;
      const int n_block = platform::computed_here(index);
      // What was copied is there, for all threads: K of this block (and Q, in the first step), or
      // with scores ahead V of this block and K of the next. All warps are done with what the step
      // before has read; it may be overwritten.
      platform::wait_copies<0>();
      platform::sync_block();
      if constexpr (!kScoresAhead) {
        load_values(n_block, false_type{});
      } else if constexpr (kComputesNext) {
        load_values(n_block - 1, true_type{});
        if (has_next(n_block - 1)) load_keys(n_block - 2, true_type{});
      }
      platform::commit_copies();

      const unsigned thread_here = platform::computed_here(thread, n_block);
      auto tSrS = [&] {  // (4, MMA_M, N / 8)
        if constexpr (kScoresAhead) {
          return skip_rows<kSkipped>(tSrS_all);
        } else {
          return partition_fragment_C(mma, ShapeStep{});
        }
      }();
      // V of this block is there after a barrier, for all threads, and all warps are done with K:
      // the next may come. Of shared rows `raise` begins with that barrier.
      auto load_next_keys = [&] {
        if (has_next(n_block)) load_keys(n_block - 1, true_type{});
        platform::commit_copies();
      };
      if constexpr (!kScoresAhead) {
        auto tXsQ = load_q.get_slice(thread_here).partition_S(sQ);  // as tXrQ
        auto fetch_q = [&](int k) {
          CUTE_UNROLL
          for (int m = kSkipped; m < size<1>(tXsQ); ++m) {
            copy(load_q, tXsQ(_, m, k), tXrQ(_, m, k));
          }
        };
        clear(tSrS);
        multiply<LoadK>(thread_here, skip_rows<kSkipped>(tSrQ), fetch_q, tSrK, sK(n_block), tSrS);
        platform::wait_copies<0>();
        if constexpr (!Traits::kSharesRows) {
          platform::sync_block();
          load_next_keys();
        }
      }

      auto scores = as_matrix(tSrS);               // (rows, columns)
      auto tOrO_step = skip_rows<kSkipped>(tOrO);  // (4, MMA_M, Dv / 8)
      auto out = as_matrix(tOrO_step);             // (rows, columns)
      apply_mask<kStepM>(mask, thread, step_row0, n_block * kBlockN, scores);
      const bool is_first = !has_previous(n_block);
      if constexpr (!kScoresAhead) may_rise = softmax.template may_rise<2 * kSkipped>(scores);
      const bool rises = softmax.template raise<2 * kSkipped>(
          scores, may_rise, is_first, row_holders<Traits>(smem, platform::computed_here(thread)));
      // Before the first block O is 0.
      if (rises && !is_first) softmax.template rescale<2 * kSkipped>(out);
      if constexpr (Traits::kSharesRows) load_next_keys();

      if constexpr (kScoresAhead) {
        const int next_block = kComputesNext ? n_block - 1 : n_block;  // in the last, not read
        weigh_and_multiply<kSkipped, kComputesNext>(thread_here, n_block, softmax, tSrS_all, tSrQ,
                                                    tSrK, sK(next_block), tOrVt, sVt(n_block),
                                                    tOrO_step);
        if constexpr (kComputesNext) may_rise = softmax.may_rise(as_matrix(tSrS_all));
      } else {
        // From here on there is no branch, so that the exponentials of later columns run under the
        // products with the earlier ones; but of shared rows all of P comes before any product.
        softmax.template weigh<2 * kSkipped>(scores);
        auto tSrP = convert<Element>(tSrS);  // (4, MMA_M, N / 8)
        if constexpr (Traits::kSharesRows) {
          exchange_and_multiply(thread_here, tSrP, smem, tOrVt, sVt(n_block), tOrO);
        } else {
          auto tOrP = as_a_operand(tSrP);  // (8, MMA_M, N / 16)
          multiply<LoadVt>(thread_here, tOrP, [](int) {}, tOrVt, sVt(n_block), tOrO_step);
        }
      }
    };

    const TileLoader<typename Traits::GmemCopy, ShapeQ> loader_q(thread, params.head_dim);
    loader_q.load_rows(params.q, query_rows, tile, row0, len_q, sQ);
    load_keys(last_block, false_type{});
    platform::commit_copies();
    if constexpr (kScoresAhead) {
      load_values(last_block, false_type{});
      if (has_next(last_block)) load_keys(last_block - 1, true_type{});
      platform::commit_copies();
    }
    if (kScoresAhead || params.q_factor != 1.f) platform::wait_copies<kScoresAhead ? 1 : 0>();
    // A wait makes a thread's own copies visible to it, and this touches no others.
    if (params.q_factor != 1.f) loader_q.multiply(sQ, params.q_factor);
    int n_block = last_block;
    // Whether the first MMAs' rows see nothing of block `n_block`, and it is not the last.
    auto skips_rows = [&] {
      return mask.end(row0 + kMmaRows - 1) <= n_block * kBlockN && has_next(n_block);
    };
    if constexpr (kScoresAhead) {
      platform::sync_block();  // Q and K of the first block are there, for all threads
      const unsigned thread_here = platform::computed_here(thread, n_block);
      copy(load_q, load_q.get_slice(thread_here).partition_S(sQ), tXrQ);
      clear(tSrS_all);
      auto first_scores = [&](auto skipped) {
        auto tSrS = skip_rows<decltype(skipped)::value>(tSrS_all);
        multiply<LoadK>(
            thread_here, skip_rows<decltype(skipped)::value>(tSrQ), [](int) {}, tSrK, sK(n_block),
            tSrS);
      };
      // By no more than one block, as it has as many keys as MMAs have rows.
      if (kSkipsRows && skips_rows()) {
        if constexpr (kSkipsRows) {
          first_scores(_1{});
          step(n_block--, _1{}, true_type{});
        }
      } else {
        first_scores(_0{});
      }
      for (; has_next(n_block); --n_block) step(n_block, _0{}, true_type{});
      step(n_block, _0{}, false_type{});
    } else {
      if constexpr (kSkipsRows) {
        // More than once where a block has fewer keys than MMAs have rows.
        while (skips_rows()) step(n_block--, _1{}, false_type{});
      }
      do {
        step(n_block, _0{}, false_type{});
      } while (has_next(n_block--));
    }
  }

 private:
  // `scores`: kStepM rows from `row0` on, kBlockN keys from `key0` on.
  template <int kStepM, class Scores>
  static CUTE_DEVICE void apply_mask(const Mask<kMask>& mask, unsigned thread, int row0, int key0,
                                     Scores& scores) {
    using namespace cute;
    if (!mask.cuts(row0, kStepM, key0, Traits::kBlockN)) return;
    auto coords = [](unsigned of_thread) {  // (rows, columns) -> (row, key)
      auto slice = TiledMma{}.get_slice(of_thread);
      return as_matrix(
          slice.partition_C(make_identity_tensor(Shape<Int<kStepM>, Int<Traits::kBlockN>>{})));
    };
    mask.apply(scores, coords(platform::computed_here(thread)), coords(0u), row0, kStepM, key0,
               Traits::kBlockN);
  }

  // C += A B^T. B's fragments come from shared memory one ldmatrix (16 columns of C) ahead of the
  // products that use them and no more, as registers are short. `fetch_a(k)` brings A's fragments
  // of step k and is called ahead of that step's products.
  template <class LoadB, class A, class FetchA, class B, class SmemB, class C>
  static CUTE_DEVICE void multiply(unsigned thread, const A& rA, const FetchA& fetch_a, B& rB,
                                   const SmemB& sB, C& rC) {
    using namespace cute;
    constexpr int kPairs = decltype(size<1>(rB))::value / 2;
    constexpr int kSteps = decltype(size<2>(rB))::value;
    auto fetch_b = fetcher<LoadB>(thread, rB, sB);
    fetch_a(0);
    fetch_b(0, 0);
    CUTE_UNROLL
    for (int i = 0; i < kPairs * kSteps; ++i) {
      const int k = i / kPairs, pair = i % kPairs;
      if (pair == 0 && k + 1 < kSteps) fetch_a(k + 1);
      if (i + 1 < kPairs * kSteps) fetch_b((i + 1) % kPairs, (i + 1) / kPairs);
      multiply_pair(rA(_, _, k), rB(_, _, k), pair, rC);
    }
  }

  // fetch(pair, k): B's fragments of 16 columns of C (2 MMAs) and one k16 step, by one ldmatrix.
  template <class LoadB, class B, class SmemB>
  static CUTE_DEVICE auto fetcher(unsigned thread, B& rB, const SmemB& sB) {
    auto thread_load_b = LoadB{}.get_slice(thread);
    auto from_b = thread_load_b.partition_S(sB);  // (ldmatrix, columns / 16, k16 steps)
    auto to_b = thread_load_b.retile_D(rB);       // as from_b
    return [from_b, to_b](int pair, int k) mutable {
      cute::copy(LoadB{}, from_b(cute::_, pair, k), to_b(cute::_, pair, k));
    };
  }

  // The products of one such fetch: to columns 16 pair .. 16 pair + 15 of C (4, MMA_M, columns / 8)
  // come those of A (8, MMA_M) and B (4, columns / 8), of one k16 step.
  template <class A, class B, class C>
  static CUTE_DEVICE void multiply_pair(const A& rA, const B& rB, int pair, C& rC) {
    using namespace cute;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(rA); ++m) {
      CUTE_UNROLL
      for (int n = 2 * pair; n < 2 * pair + 2; ++n) {
        gemm(TiledMma{}, rC(_, m, n), rA(_, m), rB(_, n), rC(_, m, n));
      }
    }
  }

  // Of shared rows: O += P V, where P's columns come from all warps, through shared memory.
  template <class P, class V, class SmemVt, class Out>
  static CUTE_DEVICE void exchange_and_multiply(unsigned thread, const P& tSrP, SharedMemory& smem,
                                                V& tOrVt, const SmemVt& sVt, Out& tOrO) {
    using namespace cute;
    auto sP = make_tensor(make_smem_ptr(smem.exchange.p),  // (kBlockM, kBlockN)
                          typename Traits::Exchange::SmemLayoutP{});
    auto store_p = StoreP{}.get_slice(thread);
    copy(StoreP{}, store_p.retile_S(tSrP), store_p.partition_D(sP));
    platform::sync_block();  // P is there, of all columns
    auto tOrP =
        make_tensor<Element>(partition_shape_A(TiledMma{}, ShapeS{}));  // (8, MMA_M, N / 16)
    auto load_p = LoadP{}.get_slice(thread);
    auto tXsP = load_p.partition_S(sP);  // (ldmatrix, MMA_M, N / 16)
    auto tXrP = load_p.retile_D(tOrP);   // as tXsP
    auto fetch_p = [&](int k) { copy(LoadP{}, tXsP(_, _, k), tXrP(_, _, k)); };
    multiply<LoadVt>(thread, tOrP, fetch_p, tOrVt, sVt, tOrO);
  }

  // With scores ahead: scores to weights, O += P V of this block, and, with kComputesNext, S = Q
  // K^T of the next in place of the scores. In pieces of 16 keys: while one has its products, the
  // next has its exponentials. Without a branch between the pieces ptxas would take all
  // exponentials first, and all of S last.
  template <int kSkipped, bool kComputesNext, class S, class Q, class K, class SmemK, class V,
            class SmemVt, class Out>
  static CUTE_DEVICE void weigh_and_multiply(unsigned thread, int n_block, Softmax& softmax,
                                             S& tSrS_all, const Q& tSrQ, K& tSrK, const SmemK& sK,
                                             V& tOrVt, const SmemVt& sVt, Out& tOrO_step) {
    using namespace cute;
    constexpr int kPieces = Traits::kBlockN / 16;
    constexpr int kStepsOfS = Traits::kHeadDim / 16, kPairsOfO = Traits::kHeadDimV / 16;
    // The first of K's ldmatrix and so many of V's are issued before a piece's branch, so that
    // products can begin behind it.
    constexpr int kValuesFirst = kPairsOfO < 3 ? kPairsOfO : 3;
    auto fetch_keys = fetcher<LoadK>(thread, tSrK, sK);
    auto fetch_values = fetcher<LoadVt>(thread, tOrVt, sVt);
    auto tSrS_step = skip_rows<kSkipped>(tSrS_all);
    // P, two elements a word.
    auto words = make_tensor<uint32_t>(
        make_shape(_4{}, size<1>(tSrS_step), Int<kPieces>{}));  // (4, MMA_M, N / 16)
    auto tOrP = recast<Element>(words);                         // (8, MMA_M, N / 16)
    const auto subtrahends = softmax.subtrahends();  // once: the compiler would not share them
    auto weigh = [&](int piece) {
      auto accumulators = pair_of_columns(tSrS_step, piece);  // (4, MMA_M, 2)
      auto scores = as_matrix(accumulators);
      softmax.template weigh<2 * kSkipped>(scores, subtrahends);
      auto words_of_piece = words(_, _, piece);
      convert_to_words<Element>(as_a_operand(accumulators), words_of_piece);
    };
    auto fetch_first = [&](int piece) {
      if constexpr (kComputesNext) fetch_keys(piece, 0);
      CUTE_UNROLL
      for (int pair = 0; pair < kValuesFirst; ++pair) fetch_values(pair, piece);
    };
    weigh(0);
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece > 0) platform::keep_order(n_block);
      if (piece + 1 < kPieces) weigh(piece + 1);
      if constexpr (kComputesNext) {
        auto next = pair_of_columns(tSrS_all, piece);
        clear(next);
        CUTE_UNROLL
        for (int k = 0; k < kStepsOfS; ++k) {
          if (piece == 0 || k > 0) fetch_keys(piece, k);
          multiply_pair(tSrQ(_, _, k), tSrK(_, _, k), piece, tSrS_all);
        }
      }
      CUTE_UNROLL
      for (int pair = 0; pair < kPairsOfO; ++pair) {
        if (piece == 0 || pair >= kValuesFirst) fetch_values(pair, piece);
        multiply_pair(tOrP(_, _, piece), tOrVt(_, _, piece), pair, tOrO_step);
      }
      if (piece + 1 < kPieces) fetch_first(piece + 1);
    }
  }
};

}  // namespace flash_cute::sm80
