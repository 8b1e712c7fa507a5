// What a finished tile leaves in global memory: O, through shared memory for 16-byte stores, and
// the log-sum-exp.
#pragma once

#include <cute/tensor.hpp>

#include "common/layout.h"
#include "common/platform.h"
#include "common/tile.h"
#include "sm80/arguments.h"

namespace flash_cute::sm80 {

template <class Traits>
struct FwdEpilogue {
  using ElementOut = typename Traits::ElementOut;
  using TiledMma = typename Traits::TiledMma;
  using ShapeO = typename Traits::ShapeO;

  // tOrO  (4, MMA_M, kHeadDimV / 8), normalised
  template <class Out, class Softmax>
  static CUTE_DEVICE void run(const Arguments& arguments, TileCoord tile, int len_q,
                              typename Traits::SharedMemory& smem, const Out& tOrO,
                              const Softmax& softmax) {
    using namespace cute;
    const FwdParams& params = arguments.params;
    const QueryRows& query_rows = arguments.query_rows;
    const int row0 = tile.m_block * Traits::kBlockM;
    const int thread = platform::thread_index();
    using SmemLayoutO = typename Traits::SmemLayoutO;
    auto sO = make_tensor(make_smem_ptr(smem.o), SmemLayoutO{});  // (kBlockM, kHeadDimV)

    auto rO = convert<ElementOut>(tOrO);
    typename Traits::StoreO store_o;
    auto thread_store_o = store_o.get_slice(thread);
    // In the space of Q, which no warp reads any more.
    copy(store_o, thread_store_o.retile_S(rO), thread_store_o.partition_D(sO));

    auto tOcO = as_matrix(  // (rows, columns) -> (row, column)
        TiledMma{}.get_slice(thread).partition_C(make_identity_tensor(ShapeO{})));
    // Of the four who hold the first columns, each has one of their two or four rows.
    static_assert(Softmax::kRows <= 4);
    const int mine = static_cast<int>(get<1>(tOcO(0, 0))) / 2;
    if (mine < Softmax::kRows) {
      const int row = row0 + static_cast<int>(get<0>(tOcO(mine, 0)));
      if (query_rows.exists(row, len_q)) {
        *query_rows.find<float>(params.lse, tile, row) = softmax.lse(mine);
      }
    }

    platform::sync_block();  // O is in shared memory, from all warps
    typename Traits::GmemCopyO gmem_copy;
    auto thread_copy = gmem_copy.get_slice(thread);
    auto from = thread_copy.partition_S(sO);  // (8, rows, columns)
    // (8, rows, columns) -> (row, column)
    auto at = thread_copy.partition_S(make_identity_tensor(ShapeO{}));
    constexpr int kRows = decltype(size<1>(from))::value;
    query_rows.walk<ElementOut, kRows, Traits::kBlockM / kRows>(
        params.out, tile, row0 + static_cast<int>(get<0>(at(0, 0, 0))), len_q,
        [&](int r, ElementOut* out, bool exists) {
          CUTE_UNROLL
          for (int c = 0; c < size<2>(from); ++c) {
            const int column = get<1>(at(0, r, c));
            if (exists && column < params.head_dim) {
              copy(gmem_copy, from(_, r, c), make_tensor(make_gmem_ptr(out + column), Shape<_8>{}));
            }
          }
        });
  }
};

}  // namespace flash_cute::sm80
