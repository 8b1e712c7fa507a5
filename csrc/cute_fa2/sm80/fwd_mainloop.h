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

    auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});    // (kBlockM, kHeadDim)
    auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutK{});    // (kBlockN, kHeadDim)
    auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutV{});    // (kBlockN, kHeadDimV)
    auto sVt = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutVt{});  // (kHeadDimV, kBlockN)

    const LoaderQ loader_q(thread, params.head_dim);
    loader_q.load(gQ, sQ, rows_q);
    source.load_keys(blocks.end - 1, sK);
    platform::commit_copies();
    if (params.q_factor != 1.f) {
      platform::wait_copies<0>();  // makes this thread's own copies visible to it; it multiplies no others
      loader_q.multiply(sQ, params.q_factor);
    }

    TiledMma mma;
    auto thread_mma = mma.get_slice(thread);
    auto tSrQ = make_tensor<Element>(partition_shape_A(mma, TileShapeQ{}));             // (8, MMA_M, kHeadDim / 16)
    auto tSrK = make_tensor<Element>(partition_shape_B(mma, shape(sK)));                // (4, kBlockN / 8, kHeadDim / 16)
    auto tOrVt = make_tensor<Element>(partition_shape_B(mma, shape(sVt)));              // (4, kHeadDimV / 8, kBlockN / 16)
    auto tScS = as_matrix(thread_mma.partition_C(make_identity_tensor(                  // (rows, columns) -> (row, key)
        Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{})));

    auto step = [&](int n_block) {
      // K of this block has landed, for all threads (and Q, the first time); and all warps are done with V of the last block,
      // so that its space may be filled again.
      platform::wait_copies<0>();
      platform::sync_block();
      source.load_values(n_block, sV);
      platform::commit_copies();

      if (Traits::kQInRegisters && n_block == blocks.end - 1) load_a(sQ, tSrQ);
      auto tSrS = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{});  // (4, MMA_M, kBlockN / 8)
      clear(tSrS);
      if constexpr (Traits::kQInRegisters) {
        multiply<typename Traits::LoadK>(tSrQ, tSrK, sK, tSrS);
      } else {
        multiply_from_smem(tSrQ, sQ, tSrK, sK, tSrS);
      }

      // V of this block has landed, for all threads; and all warps are done with K, so that the next may come.
      platform::wait_copies<0>();
      platform::sync_block();
      if (n_block > blocks.begin) {
        source.load_keys(n_block - 1, sK);
        platform::commit_copies();
      }

      auto scores = as_matrix(tSrS);  // (rows, columns)
      auto out = as_matrix(tOrO);     // (rows, columns)
      if (!mask.all_visible(row0, row0 + rows_q, n_block, Traits::kBlockN)) {
        mask.apply(scores, tScS, row0, n_block * Traits::kBlockN);
      }
      softmax.step(scores, out);

      auto tSrP = convert<Element>(tSrS);  // (4, MMA_M, kBlockN / 8)
      auto tOrP = as_a_operand(tSrP);      // (8, MMA_M, kBlockN / 16)
      multiply<typename Traits::LoadVt>(tOrP, tOrVt, sVt, tOrO);
    };

    for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) step(n_block);
  }

 private:
  // All fragments of an A operand, from shared memory.
  template <class Smem, class Fragment>
  static CUTE_DEVICE void load_a(const Smem& sA, Fragment& rA) {
    using namespace cute;
    typename Traits::LoadQ load;
    auto thread_load = load.get_slice(platform::thread_index());
    copy(load, thread_load.partition_S(sA), thread_load.retile_D(rA));
  }

  // C += A B^T, A in registers, B's fragments fetched from shared memory one k16 ahead of the products that use them.
  template <class LoadB, class A, class B, class SmemB, class C>
  static CUTE_DEVICE void multiply(const A& rA, B& rB, const SmemB& sB, C& rC) {
    using namespace cute;
    LoadB load_b;
    auto thread_load_b = load_b.get_slice(platform::thread_index());
    auto from_b = thread_load_b.partition_S(sB);  // (ldmatrix, MMA_N / 2, k16 steps)
    auto to_b = thread_load_b.retile_D(rB);       // as from_b
    copy(load_b, from_b(_, _, _0{}), to_b(_, _, _0{}));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(rA); ++k) {
      if (k + 1 < size<2>(rA)) copy(load_b, from_b(_, _, k + 1), to_b(_, _, k + 1));
      gemm(TiledMma{}, rA(_, _, k), rB(_, _, k), rC);
    }
  }

  // The same with A in shared memory too.
  template <class A, class SmemA, class B, class SmemB, class C>
  static CUTE_DEVICE void multiply_from_smem(A& rA, const SmemA& sA, B& rB, const SmemB& sB, C& rC) {
    using namespace cute;
    typename Traits::LoadQ load_a;
    typename Traits::LoadK load_b;
    auto thread_load_a = load_a.get_slice(platform::thread_index());
    auto thread_load_b = load_b.get_slice(platform::thread_index());
    auto from_a = thread_load_a.partition_S(sA);  // (ldmatrix, MMA_M, k16 steps)
    auto to_a = thread_load_a.retile_D(rA);       // as from_a
    auto from_b = thread_load_b.partition_S(sB);  // (ldmatrix, MMA_N / 2, k16 steps)
    auto to_b = thread_load_b.retile_D(rB);       // as from_b
    copy(load_a, from_a(_, _, _0{}), to_a(_, _, _0{}));
    copy(load_b, from_b(_, _, _0{}), to_b(_, _, _0{}));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(rA); ++k) {
      if (k + 1 < size<2>(rA)) {
        copy(load_a, from_a(_, _, k + 1), to_a(_, _, k + 1));
        copy(load_b, from_b(_, _, k + 1), to_b(_, _, k + 1));
      }
      gemm(TiledMma{}, rA(_, _, k), rB(_, _, k), rC);
    }
  }
};

}  // namespace flash_cute::sm80
