// The walk over the keys: S = Q K^T, online softmax, O += P V, one block of keys at a time.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/copy.h"
#include "common/layout.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/platform.h"

namespace flash_cute::sm80 {

template <class Traits, MaskKind kMask>
struct FwdMainloop {
  using Element = typename Traits::Element;
  using TiledMma = typename Traits::TiledMma;
  using SharedMemory = typename Traits::SharedMemory;
  using TileShapeQ = cute::Shape<cute::Int<Traits::kBlockM>, cute::Int<Traits::kHeadDim>>;
  using LoaderQ = TileLoader<typename Traits::GmemCopy, TileShapeQ>;

  // Every score row of this thread; rows of S and O are the same.
  static constexpr int kRows = 2 * Traits::kBlockM / cute::tile_size<0>(TiledMma{});
  using Softmax = OnlineSoftmax<kRows>;

  // Leaves the weighted sum of V in `tOrO` (cleared here) and its statistics in `softmax`.
  //   gQ      (kBlockM, kHeadDim) in global memory, of which `rows_q` rows exist
  //   source  hands out the tiles of K and V
  //   row0    the tile's first query row
  template <class GQ, class Source, class Out>
  static CUTE_DEVICE void run(const FwdParams& params, const GQ& gQ, const Source& source, const Mask<kMask>& mask, int row0,
                              int rows_q, SharedMemory& smem, Softmax& softmax, Out& tOrO) {
    using namespace cute;
    const int thread = platform::thread_index();

    clear(tOrO);
    const BlockRange blocks = mask.visible_blocks(row0, row0 + rows_q, Traits::kBlockN);
    if (blocks.end <= blocks.begin) return;
    const BlockRange unmasked = mask.fully_visible_blocks(row0, row0 + rows_q, Traits::kBlockN);

    auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});  // (kBlockM, kHeadDim)
    auto stage_of = [](int n_block) { return n_block % Traits::kStages; };
    auto keys = [&](int n_block) {  // (kBlockN, kHeadDim)
      return make_tensor(make_smem_ptr(smem.k[stage_of(n_block)]), typename Traits::SmemLayoutK{});
    };
    auto values = [&](int n_block) {  // (kBlockN, kHeadDimV)
      return make_tensor(make_smem_ptr(smem.v[stage_of(n_block)]), typename Traits::SmemLayoutV{});
    };
    auto values_transposed = [&](int n_block) {  // (kHeadDimV, kBlockN)
      return make_tensor(make_smem_ptr(smem.v[stage_of(n_block)]), typename Traits::SmemLayoutVt{});
    };

    const LoaderQ loader_q(thread, params.head_dim);
    loader_q.load(gQ, sQ, rows_q);
    source.load_keys(blocks.end - 1, keys(blocks.end - 1));
    if constexpr (Traits::kStages == 2) source.load_values(blocks.end - 1, values(blocks.end - 1));
    platform::commit_copies();
    if (params.q_factor != 1.f) {
      platform::wait_copies<0>();  // makes this thread's own copies visible to it; it multiplies no others
      loader_q.multiply(sQ, params.q_factor);
    }

    TiledMma mma;
    auto tSrQ = make_tensor<Element>(partition_shape_A(mma, TileShapeQ{}));             // (8, MMA_M, kHeadDim / 16)
    auto tSrK = make_tensor<Element>(partition_shape_B(mma, Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>{}));  // (4, kBlockN / 8, kHeadDim / 16)
    auto tOrVt = make_tensor<Element>(partition_shape_B(mma, Shape<Int<Traits::kHeadDimV>, Int<Traits::kBlockN>>{}));  // (4, kHeadDimV / 8, kBlockN / 16)
    typename Traits::LoadQ load_q;
    auto tXrQ = load_q.get_slice(thread).retile_D(tSrQ);  // (ldmatrix, MMA_M, k16 steps)

    auto step = [&](int n_block) {
      // K of this block has landed, for all threads (and Q, the first time); and all warps are done with V of the last block,
      // so that its space may be filled again.
      platform::wait_copies<0>();
      platform::sync_block();
      if constexpr (Traits::kStages == 1) {
        source.load_values(n_block, values(n_block));
        platform::commit_copies();
      } else if (n_block > blocks.begin) {
        source.load_keys(n_block - 1, keys(n_block - 1));
        source.load_values(n_block - 1, values(n_block - 1));
        platform::commit_copies();
      }

      auto tXsQ = load_q.get_slice(platform::computed_here(thread)).partition_S(sQ);  // as tXrQ
      if (Traits::kQInRegisters && n_block == blocks.end - 1) copy(load_q, tXsQ, tXrQ);
      auto fetch_q = [&](int k) {
        if constexpr (!Traits::kQInRegisters) copy(load_q, tXsQ(_, _, k), tXrQ(_, _, k));
      };
      auto tSrS = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{});  // (4, MMA_M, kBlockN / 8)
      clear(tSrS);
      multiply<typename Traits::LoadK>(fetch_q, tSrQ, tSrK, keys(n_block), tSrS);

      if constexpr (Traits::kStages == 1) {
      // V of this block has landed, for all threads; and all warps are done with K, so that the next may come.
      platform::wait_copies<0>();
      platform::sync_block();
      if (n_block > blocks.begin) {
        source.load_keys(n_block - 1, keys(n_block - 1));
        platform::commit_copies();
      }
      }

      auto scores = as_matrix(tSrS);  // (rows, columns)
      auto out = as_matrix(tOrO);     // (rows, columns)
      if (!unmasked.contains(n_block)) {
        auto tScS = as_matrix(mma.get_slice(platform::computed_here(thread))  // (rows, columns) -> (row, key)
                                  .partition_C(make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{})));
        mask.apply(scores, tScS, row0, n_block * Traits::kBlockN);
      }
      softmax.step(scores, out);

      auto tSrP = convert<Element>(tSrS);  // (4, MMA_M, kBlockN / 8)
      auto tOrP = as_a_operand(tSrP);      // (8, MMA_M, kBlockN / 16)
      multiply<typename Traits::LoadVt>([](int) {}, tOrP, tOrVt, values_transposed(n_block), tOrO);
    };

    for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) step(n_block);
  }

 private:
  // C += A B^T. B's fragments come from shared memory one ldmatrix (16 columns of C) ahead of the products that use them, few
  // at a time, as registers are short. `fetch_a(k)` is called ahead of the products of step k.
  template <class LoadB, class FetchA, class A, class B, class SmemB, class C>
  static CUTE_DEVICE void multiply(const FetchA& fetch_a, const A& rA, B& rB, const SmemB& sB, C& rC) {
    using namespace cute;
    TiledMma mma;
    LoadB load_b;
    auto thread_load_b = load_b.get_slice(platform::computed_here(platform::thread_index()));
    auto from_b = thread_load_b.partition_S(sB);  // (ldmatrix, MMA_N / 2, k16 steps)
    auto to_b = thread_load_b.retile_D(rB);       // as from_b
    constexpr int kPairs = decltype(size<1>(from_b))::value;
    constexpr int kSteps = decltype(size<2>(from_b))::value;
    fetch_a(0);
    copy(load_b, from_b(_, _0{}, _0{}), to_b(_, _0{}, _0{}));
    CUTE_UNROLL
    for (int i = 0; i < kPairs * kSteps; ++i) {
      const int k = i / kPairs, pair = i % kPairs;
      if (pair == 0 && k + 1 < kSteps) fetch_a(k + 1);
      if (i + 1 < kPairs * kSteps) {
        const int next_k = (i + 1) / kPairs, next_pair = (i + 1) % kPairs;
        copy(load_b, from_b(_, next_pair, next_k), to_b(_, next_pair, next_k));
      }
      CUTE_UNROLL
      for (int m = 0; m < size<1>(rA); ++m) {
        CUTE_UNROLL
        for (int n = 2 * pair; n < 2 * pair + 2; ++n) gemm(mma, rC(_, m, n), rA(_, m, k), rB(_, n, k), rC(_, m, n));
      }
    }
  }
};

}  // namespace flash_cute::sm80
