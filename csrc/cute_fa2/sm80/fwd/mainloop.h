// The walk over the keys: S = Q K^T, online softmax, O += P V, one block of keys at a time.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/copy.h"
#include "common/fragment.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/platform.h"
#include "common/tile.h"
#include "sm80/fwd/arguments.h"
#include "sm80/gemm.h"
#include "sm80/row_allreduce.h"

namespace flash_cute::sm80 {

// Of one thread and one tile. `KVSource` hands out the tiles of K and V.
template <class Traits, MaskKind kMask, class KVSource>
class FwdMainloop {
  using Element = typename Traits::Element;
  using TiledMma = typename Traits::TiledMma;
  using SharedMemory = typename Traits::SharedMemory;
  using LoadQ = typename Traits::LoadQ;
  using LoadK = typename Traits::LoadK;
  using LoadVt = typename Traits::LoadVt;
  using LoadP = typename Traits::LoadP;
  using StoreP = typename Traits::StoreP;
  using ShapeS = typename Traits::ShapeS;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  // Rows of the tile that the warps' MMAs cover at a time: the first MMA of each, then the second.
  static constexpr int kMmaRows = cute::tile_size<0>(TiledMma{});
  // The rows of S and O that this thread holds elements of.
  static constexpr int kRows = 2 * kBlockM / kMmaRows;
  static constexpr bool kPipelinedQk = Traits::kPipelinedQk;
  static constexpr bool kSharesRows = Traits::kSharesRows;
  // What a step works with. The first half of the tile's rows alone, where it has no more, as in
  // decoding; under masks at head dim 128 that would spill. The second alone in blocks of which the
  // first sees no key: under a causal mask the last of a tile of 128 x 64 is one.
  using AllRows = MmaRange<0, kBlockM / kMmaRows>;
  using FirstHalf = MmaRange<0, 1>;
  using SecondHalf = MmaRange<1, 1>;
  static constexpr bool kHasHalves = !kSharesRows && kBlockM == 2 * kMmaRows;
  static constexpr bool kWalksFirstHalf =
      kHasHalves && (kMask == MaskKind::kFull || Traits::kHeadDim < 128);
  static constexpr bool kSkipsRows = kHasHalves && kMask == MaskKind::kBanded &&
                                     (kPipelinedQk ? kBlockN == kMmaRows : kBlockN <= kMmaRows);

  // What the walk keeps in registers. As members of this class they made ptxas spill.
  struct Fragments {
    template <class Shape>
    using FragmentA =
        decltype(cute::make_tensor<Element>(cute::partition_shape_A(TiledMma{}, Shape{})));
    template <class Shape>
    using FragmentB =
        decltype(cute::make_tensor<Element>(cute::partition_shape_B(TiledMma{}, Shape{})));
    // N = kBlockN, D = kHeadDim, Dv = kHeadDimV. Where warps share rows, the columns of S and O,
    // which are B's, are a part of these.
    FragmentA<typename Traits::ShapeQ> tSrQ;    // (8, MMA_M, D / 16)
    FragmentB<typename Traits::ShapeK> tSrK;    // (4, N / 8, D / 16)
    FragmentB<typename Traits::ShapeVt> tOrVt;  // (4, Dv / 8, N / 16)
    // With scores ahead: S of all rows and of the block that is next to be worked on.
    decltype(cute::partition_fragment_C(TiledMma{}, ShapeS{})) tSrS_all;  // (4, MMA_M, N / 8)
    // Whether a row may rise by the block's scores, of which scores ahead asks before the mask. By
    // the first block all do. (A bool, which is a byte, ptxas spills at head dim 64.)
    int may_rise = 1;

    // As LoadQ writes it: (ldmatrix, MMA_M, D / 16).
    CUTE_DEVICE auto tXrQ() { return LoadQ{}.get_slice(0).retile_D(tSrQ); }
  };

 public:
  using Softmax = OnlineSoftmax<kRows>;

  CUTE_DEVICE FwdMainloop(const Arguments& arguments, TileCoord tile, KVSource& kv_source,
                          const Mask<kMask>& mask, int len_q, SharedMemory& smem, Softmax& softmax)
      : arguments_(arguments),
        tile_(tile),
        kv_source_(kv_source),
        mask_(mask),
        len_q_(len_q),
        smem_(smem),
        softmax_(softmax),
        thread_(platform::thread_index()),
        row0_(tile.m_block * kBlockM) {}

  // Leaves the weighted sum of V in `tOrO` (4, MMA_M, kHeadDimV / 8), which it clears, and its
  // stats in the softmax. On return no warp reads Q's space any more.
  template <class Out>
  CUTE_DEVICE void run(Out& tOrO) {
    using namespace cute;
    clear(tOrO);
    const int row_end = min(row0_ + kBlockM, arguments_.pack_gqa.count(len_q_));
    const BlockRange visible = mask_.visible_blocks(row0_, row_end, kBlockN);
    if (visible.end <= visible.begin) return;
    const int n_block = visible.end - 1;  // the walk is from the last key to the first
    load_first(n_block);
    Fragments fragments;
    if constexpr (kPipelinedQk) {
      platform::sync_cta();  // Q and K of the first block are there, for all threads
      const unsigned thread_here = platform::rematerialize(thread_, n_block);
      copy(LoadQ{}, LoadQ{}.get_slice(thread_here).partition_S(sQ()), fragments.tXrQ());
      clear(fragments.tSrS_all);
    }
    if (!kWalksFirstHalf || row_end - row0_ > kMmaRows) {
      walk<AllRows>(n_block, fragments, tOrO);
    } else if constexpr (kWalksFirstHalf) {
      walk<FirstHalf>(n_block, fragments, tOrO);
    }
  }

 private:
  // -- the walk ----------------------------------------------------------------------------------

  template <class Rows, class Out>
  CUTE_DEVICE void walk(int n_block, Fragments& fragments, Out& tOrO) {
    constexpr bool kMaySkip = kSkipsRows && std::is_same_v<Rows, AllRows>;
    if constexpr (kPipelinedQk) {
      const unsigned thread_here = platform::rematerialize(thread_, n_block);
      // By no more than one block, as it has as many keys as MMAs have rows.
      if (kMaySkip && skips_rows(n_block)) {
        if constexpr (kMaySkip) {
          first_scores<SecondHalf>(thread_here, n_block, fragments);
          step<SecondHalf, true>(n_block--, fragments, tOrO);
        }
      } else {
        first_scores<Rows>(thread_here, n_block, fragments);
      }
      for (; has_next(n_block); --n_block) step<Rows, true>(n_block, fragments, tOrO);
      step<Rows, false>(n_block, fragments, tOrO);
    } else {
      if constexpr (kMaySkip) {
        // More than once where a block has fewer keys than MMAs have rows.
        while (skips_rows(n_block)) step<SecondHalf, false>(n_block--, fragments, tOrO);
      }
      do {
        step<Rows, false>(n_block, fragments, tOrO);
      } while (has_next(n_block--));
    }
  }

  // Whether a block is visited after this one: n_block > visible.begin, without a register for the
  // latter. The first row's first key lies before the block.
  CUTE_DEVICE bool has_next(int n_block) const {
    return mask_.begin(platform::rematerialize(row0_, n_block)) < n_block * kBlockN;
  }

  // Likewise, whether one was visited before.
  CUTE_DEVICE bool has_previous(int n_block) const {
    const int end = cute::min(platform::rematerialize(row0_, n_block) + kBlockM,
                              arguments_.pack_gqa.count(len_q_));
    return mask_.end(end - 1) > (n_block + 1) * kBlockN;
  }

  // Whether the first MMAs' rows see nothing of the block, and it is not the last.
  CUTE_DEVICE bool skips_rows(int n_block) const {
    return mask_.end(row0_ + kMmaRows - 1) <= n_block * kBlockN && has_next(n_block);
  }

  // -- shared memory -----------------------------------------------------------------------------

  CUTE_DEVICE auto sQ() const {  // (kBlockM, kHeadDim)
    return make_tensor(cute::make_smem_ptr(smem_.q), typename Traits::SmemLayoutQ{});
  }
  // Block n_block of the keys lives in stage n_block % kStages. (Not negative: so the remainder
  // takes one instruction.)
  static CUTE_DEVICE unsigned stage(int n_block) {
    return static_cast<unsigned>(n_block) % Traits::kStages;
  }
  CUTE_DEVICE auto sK(int n_block) const {  // (kBlockN, kHeadDim)
    return make_tensor(cute::make_smem_ptr(smem_.k[stage(n_block)]),
                       typename Traits::SmemLayoutK{});
  }
  CUTE_DEVICE auto sV(int n_block) const {  // (kBlockN, kHeadDimV)
    return make_tensor(cute::make_smem_ptr(smem_.v[stage(n_block)]),
                       typename Traits::SmemLayoutV{});
  }
  CUTE_DEVICE auto sVt(int n_block) const {  // (kHeadDimV, kBlockN), the same elements
    return make_tensor(cute::make_smem_ptr(smem_.v[stage(n_block)]),
                       typename Traits::SmemLayoutVt{});
  }

  // Every block but the last is whole.
  template <bool kIsWhole = true>
  CUTE_DEVICE void load_k(int n_block) const {
    kv_source_.template load_k<kIsWhole>(n_block, sK(n_block));
  }
  template <bool kIsWhole = true>
  CUTE_DEVICE void load_v(int n_block) const {
    kv_source_.template load_v<kIsWhole>(n_block, sV(n_block));
  }

  // Starts the copies of Q and K of the first block that is visited and, with scores ahead, of its
  // V and K of the next. Then this thread's part of the former is there on return.
  CUTE_DEVICE void load_first(int n_block) const {
    const FwdParams& params = arguments_.params;
    const TileLoader<typename Traits::GmemCopy, typename Traits::ShapeQ> loader_q(thread_,
                                                                                  params.head_dim);
    loader_q.load_rows(params.q, arguments_.pack_gqa, tile_, row0_, len_q_, sQ());
    kv_source_.start(n_block);
    load_k<false>(n_block);
    platform::commit_copies();
    if constexpr (kPipelinedQk) {
      load_v<false>(n_block);
      if (has_next(n_block)) load_k(n_block - 1);
      platform::commit_copies();
    }
    // Where it is needed next: this thread's part of Q and K is there.
    if (kPipelinedQk || params.q_factor != 1.f) platform::wait_copies<kPipelinedQk ? 1 : 0>();
    // A wait makes a thread's own copies visible to it, and this touches no others.
    if (params.q_factor != 1.f) loader_q.multiply(sQ(), params.q_factor);
  }

  // -- a step ------------------------------------------------------------------------------------

  // One block of keys. With scores ahead, and a next block to compute those of: kComputesNext.
  template <class Rows, bool kComputesNext, class Out>
  CUTE_DEVICE void step(int index, Fragments& fragments, Out& tOrO) {
    using namespace cute;
    static_assert(kPipelinedQk || !kComputesNext);
    constexpr int kStepM = Rows::kCount * kMmaRows;
    const int n_block = platform::rematerialize(index);
    // What was copied is there, for all threads: K of this block (and Q, in the first step), or
    // with scores ahead V of this block and K of the next. All warps are done with what the step
    // before has read; it may be overwritten.
    platform::wait_copies<0>();
    platform::sync_cta();
    if constexpr (!kPipelinedQk) {
      load_v<false>(n_block);
    } else if constexpr (kComputesNext) {
      load_v(n_block - 1);
      if (has_next(n_block - 1)) load_k(n_block - 2);
    }
    platform::commit_copies();

    const unsigned thread_here = platform::rematerialize(thread_, n_block);
    auto tSrS = [&] {  // (4, MMA_M, N / 8)
      if constexpr (kPipelinedQk) {
        return select_rows<Rows>(fragments.tSrS_all);
      } else {
        return partition_fragment_C(TiledMma{}, Shape<Int<kStepM>, Int<kBlockN>>{});
      }
    }();
    if constexpr (!kPipelinedQk) {
      gemm_qk<Rows>(thread_here, n_block, fragments, tSrS);
      // V of this block is there after a barrier, for all threads, and all warps are done with K:
      // the next may come. Of shared rows `raise` begins with that barrier.
      platform::wait_copies<0>();
      if constexpr (!kSharesRows) {
        platform::sync_cta();
        load_next_keys(n_block);
      }
    }

    auto scores = as_matrix(tSrS);             // (rows, columns)
    auto tOrO_step = select_rows<Rows>(tOrO);  // (4, MMA_M, Dv / 8)
    auto out = as_matrix(tOrO_step);           // (rows, columns)
    apply_mask<kStepM>(row0_ + Rows::kFirst * kMmaRows, n_block * kBlockN, scores);
    const bool is_first = !has_previous(n_block);
    if constexpr (!kPipelinedQk) {
      fragments.may_rise = softmax_.template may_rise<Rows::kFirstRow>(scores);
    }
    const bool rises = softmax_.template raise<Rows::kFirstRow>(
        scores, fragments.may_rise != 0, is_first,
        row_allreduce<Traits>(smem_, platform::rematerialize(thread_)));
    // Before the first block O is 0.
    if (rises && !is_first) softmax_.template rescale<Rows::kFirstRow>(out);
    if constexpr (kSharesRows) load_next_keys(n_block);

    if constexpr (kPipelinedQk) {
      softmax_and_gemms<Rows, kComputesNext>(thread_here, n_block, fragments, tOrO_step);
      if constexpr (kComputesNext) {
        auto tSrS_next = select_rows<NextRows<Rows>>(fragments.tSrS_all);  // (4, MMA_M, N / 8)
        fragments.may_rise = softmax_.may_rise(as_matrix(tSrS_next));
      }
    } else {
      // From here on there is no branch, so that the exponentials of later columns run under the
      // products with the earlier ones; but of shared rows all of P comes before any product.
      softmax_.template weigh<Rows::kFirstRow>(scores);
      auto tSrP = convert<Element>(tSrS);  // (4, MMA_M, N / 8)
      if constexpr (kSharesRows) {
        gemm_pv_of_shared_p(thread_here, n_block, fragments, tSrP, tOrO);
      } else {
        auto tOrP = as_a_operand(tSrP);  // (8, MMA_M, N / 16)
        multiply<LoadVt>(
            TiledMma{}, thread_here, tOrP, [](int) {}, fragments.tOrVt, sVt(n_block), tOrO_step);
      }
    }
  }

  // All warps are done with K of this block.
  CUTE_DEVICE void load_next_keys(int n_block) const {
    if (has_next(n_block)) load_k(n_block - 1);
    platform::commit_copies();
  }

  // `scores`: kStepM rows from `row0` on, kBlockN keys from `key0` on.
  template <int kStepM, class Scores>
  CUTE_DEVICE void apply_mask(int row0, int key0, Scores& scores) const {
    using namespace cute;
    if (!mask_.cuts(row0, kStepM, key0, kBlockN)) return;
    auto coords = [](unsigned thread) {  // (rows, columns) -> (row, key)
      auto slice = TiledMma{}.get_slice(thread);
      return as_matrix(slice.partition_C(make_identity_tensor(Shape<Int<kStepM>, Int<kBlockN>>{})));
    };
    mask_.apply(scores, coords(platform::rematerialize(thread_)), coords(0u), row0, kStepM, key0,
                kBlockN);
  }

  // S = Q K^T, Q from shared memory as well.
  template <class Rows, class S>
  CUTE_DEVICE void gemm_qk(unsigned thread, int n_block, Fragments& fragments, S& tSrS) {
    using namespace cute;
    auto tXsQ = LoadQ{}.get_slice(thread).partition_S(sQ());  // as tXrQ
    auto fetch_q = [&](int k) {
      CUTE_UNROLL
      for (int m = Rows::kFirst; m < Rows::kFirst + Rows::kCount; ++m) {
        copy(LoadQ{}, tXsQ(_, m, k), fragments.tXrQ()(_, m, k));
      }
    };
    clear(tSrS);
    auto tSrQ = select_rows<Rows>(fragments.tSrQ);  // (8, MMA_M, D / 16)
    multiply<LoadK>(TiledMma{}, thread, tSrQ, fetch_q, fragments.tSrK, sK(n_block), tSrS);
  }

  // Of shared rows: O += P V, where P's columns come from all warps, through shared memory.
  template <class P, class Out>
  CUTE_DEVICE void gemm_pv_of_shared_p(unsigned thread, int n_block, Fragments& fragments,
                                       const P& tSrP, Out& tOrO) {
    using namespace cute;
    auto sP = make_tensor(make_smem_ptr(smem_.exchange.p),  // (kBlockM, kBlockN)
                          typename Traits::Exchange::SmemLayoutP{});
    auto store_p = StoreP{}.get_slice(thread);
    copy(StoreP{}, store_p.retile_S(tSrP), store_p.partition_D(sP));
    platform::sync_cta();  // P is there, of all columns
    auto tOrP =
        make_tensor<Element>(partition_shape_A(TiledMma{}, ShapeS{}));  // (8, MMA_M, N / 16)
    auto load_p = LoadP{}.get_slice(thread);
    auto tXsP = load_p.partition_S(sP);  // (ldmatrix, MMA_M, N / 16)
    auto tXrP = load_p.retile_D(tOrP);   // as tXsP
    auto fetch_p = [&](int k) { copy(LoadP{}, tXsP(_, _, k), tXrP(_, _, k)); };
    multiply<LoadVt>(TiledMma{}, thread, tOrP, fetch_p, fragments.tOrVt, sVt(n_block), tOrO);
  }

  // -- scores ahead ------------------------------------------------------------------------------

  // Of the next block the second half of the rows is never alone.
  template <class Rows>
  using NextRows = std::conditional_t<std::is_same_v<Rows, SecondHalf>, AllRows, Rows>;

  // S of the first block, Q being in registers.
  template <class Rows>
  CUTE_DEVICE void first_scores(unsigned thread, int n_block, Fragments& fragments) {
    auto tSrS = select_rows<Rows>(fragments.tSrS_all);  // (4, MMA_M, N / 8)
    auto tSrQ = select_rows<Rows>(fragments.tSrQ);      // (8, MMA_M, D / 16)
    multiply<LoadK>(TiledMma{}, thread, tSrQ, [](int) {}, fragments.tSrK, sK(n_block), tSrS);
  }

  // Scores to weights, O += P V of this block, and, with kComputesNext, S = Q K^T of the next in
  // place of the scores. In pieces of 16 keys: while one has its products, the next has its
  // exponentials. Without a branch between the pieces ptxas would take all exponentials first, and
  // all of S last.
  template <class Rows, bool kComputesNext, class Out>
  CUTE_DEVICE void softmax_and_gemms(unsigned thread, int n_block, Fragments& fragments,
                                     Out& tOrO_step) {
    using namespace cute;
    constexpr int kPieces = kBlockN / 16;
    constexpr int kStepsOfS = Traits::kHeadDim / 16, kPairsOfO = Traits::kHeadDimV / 16;
    // The first of K's ldmatrix and so many of V's are issued before a piece's branch, so that
    // products can begin behind it.
    constexpr int kValuesFirst = kPairsOfO < 3 ? kPairsOfO : 3;
    const int next_block = kComputesNext ? n_block - 1 : n_block;  // in the last, not read
    auto fetch_keys = copy_b_fragments<LoadK>(thread, fragments.tSrK, sK(next_block));
    auto fetch_values = copy_b_fragments<LoadVt>(thread, fragments.tOrVt, sVt(n_block));
    auto tSrS_step = select_rows<Rows>(fragments.tSrS_all);            // (4, MMA_M, N / 8)
    auto tSrS_next = select_rows<NextRows<Rows>>(fragments.tSrS_all);  // likewise, of the next step
    auto tSrQ_next = select_rows<NextRows<Rows>>(fragments.tSrQ);      // (8, MMA_M, D / 16)
    // P, two elements a word.
    auto words = make_tensor<uint32_t>(
        make_shape(_4{}, size<1>(tSrS_step), Int<kPieces>{}));  // (4, MMA_M, N / 16)
    auto tOrP = recast<Element>(words);                         // (8, MMA_M, N / 16)
    const auto bounds = softmax_.bounds();  // once: the compiler would not share them
    auto weigh = [&](int piece) {
      auto accumulators = pair_of_columns(tSrS_step, piece);  // (4, MMA_M, 2)
      auto scores = as_matrix(accumulators);
      softmax_.template weigh<Rows::kFirstRow>(scores, bounds);
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
      if (piece > 0) platform::schedule_fence(n_block);
      if (piece + 1 < kPieces) weigh(piece + 1);
      if constexpr (kComputesNext) {
        clear(pair_of_columns(tSrS_next, piece));
        CUTE_UNROLL
        for (int k = 0; k < kStepsOfS; ++k) {
          if (piece == 0 || k > 0) fetch_keys(piece, k);
          gemm_pair(TiledMma{}, tSrQ_next(_, _, k), fragments.tSrK(_, _, k), piece, tSrS_next);
        }
      }
      CUTE_UNROLL
      for (int pair = 0; pair < kPairsOfO; ++pair) {
        if (piece == 0 || pair >= kValuesFirst) fetch_values(pair, piece);
        gemm_pair(TiledMma{}, tOrP(_, _, piece), fragments.tOrVt(_, _, piece), pair, tOrO_step);
      }
      if (piece + 1 < kPieces) fetch_first(piece + 1);
    }
  }

  const Arguments& arguments_;
  TileCoord tile_;
  KVSource& kv_source_;
  const Mask<kMask>& mask_;
  int len_q_;
  SharedMemory& smem_;
  Softmax& softmax_;
  unsigned thread_;
  int row0_;
};

}  // namespace flash_cute::sm80
