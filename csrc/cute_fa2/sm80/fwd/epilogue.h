// Writes a finished tile to global memory: O, through shared memory for 16-byte stores, and the
// log-sum-exp.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm80/fragment.h"
#include "sm80/fwd/arguments.h"

namespace flash_cute::sm80 {

template <class Traits>
struct FwdEpilogue {
  using ElementOut = typename Traits::ElementOut;
  using TiledMma = typename Traits::TiledMma;
  using ShapeO = typename Traits::ShapeO;

  // tOrO  (4, MMA_M, kHeadDimV / 8), normalised
  template <class Out, class Softmax>
  static CUTE_DEVICE void run(const Arguments& arguments, TileCoord tile, const Sequence& sequence,
                              typename Traits::SharedMemory& smem, const Out& tOrO,
                              const Softmax& softmax) {
    using namespace cute;
    const FwdParams& params = arguments.params;
    const PackGqa& pack_gqa = arguments.pack_gqa;
    const int row0 = tile.m_block * Traits::kBlockM;
    const int thread = platform::thread_index();
    using SmemLayoutO = typename Traits::SmemLayoutO;
    auto sO = make_tensor(make_smem_ptr(smem.o), SmemLayoutO{});  // (kBlockM, kHeadDimV)

    auto rO = convert<ElementOut>(tOrO);  // (4, MMA_M, kHeadDimV / 8)
    typename Traits::StoreO store_o;
    auto thread_store_o = store_o.get_slice(thread);
    // Into the space of Q (or K, with Q in registers), which no warp reads any more. Both are
    // (2, 2 MMA_M, kHeadDimV / 8).
    copy(store_o, thread_store_o.retile_S(rO), thread_store_o.partition_D(sO));

    auto tOcO = as_matrix(  // (rows, columns) -> (row, column)
        TiledMma{}.get_slice(thread).partition_C(make_identity_tensor(ShapeO{})));
    visit_rows<Softmax>(pack_gqa, row0, sequence, tOcO, [&](int row, int mine) {
      *pack_gqa.find<float>(params.lse, tile, row, sequence) =
          softmax.template lse<std::is_same_v<typename Traits::Element, float>>(
              mine, pack_gqa.head(tile.head, row));
    });

    platform::sync_cta();  // O is in shared memory, from all warps
    typename Traits::GmemCopyO gmem_copy;
    auto thread_copy = gmem_copy.get_slice(thread);
    auto from = thread_copy.partition_S(sO);  // (chunk, rows, columns)
    // (chunk, rows, columns) -> (row, column)
    auto at = thread_copy.partition_S(make_identity_tensor(ShapeO{}));
    constexpr int kRows = decltype(size<1>(from))::value;
    pack_gqa.for_each_row<ElementOut, kRows, Traits::kBlockM / kRows>(
        params.out, tile, row0 + static_cast<int>(get<0>(at(0, 0, 0))), sequence,
        [&](int r, ElementOut* out, bool exists) {
          CUTE_UNROLL
          for (int c = 0; c < size<2>(from); ++c) {
            const int column = get<1>(at(0, r, c));
            if (exists && column < params.head_dim_v) {
              copy(gmem_copy, from(_, r, c),
                   make_tensor(make_gmem_ptr(out + column), make_layout(size<0>(from))));
            }
          }
        });
  }

  // Gives the sink its share of O.
  template <class Out, class Softmax>
  static CUTE_DEVICE void join_sink(const Arguments& arguments, TileCoord tile, Out& tOrO,
                                    const Softmax& softmax) {
    using namespace cute;
    auto out = as_matrix(tOrO);  // (rows, columns)
    auto tOcO = as_matrix(       // (rows, columns) -> (row, column)
        TiledMma{}.get_slice(platform::thread_index()).partition_C(make_identity_tensor(ShapeO{})));
    softmax.join_sink(out, [&](int r) {
      const int row = tile.m_block * Traits::kBlockM + static_cast<int>(get<0>(tOcO(r, 0)));
      return arguments.pack_gqa.query_of(tile.head, row).head;
    });
  }

  // The result of a split: O in fp32, from registers, and the rows' statistics.
  template <class Out, class Softmax>
  static CUTE_DEVICE void run_split(const Arguments& arguments, TileCoord tile,
                                    const Sequence& sequence, Out& tOrO, const Softmax& softmax) {
    using namespace cute;
    const FwdParams& params = arguments.params;
    const PackGqa& pack_gqa = arguments.pack_gqa;
    const int row0 = tile.m_block * Traits::kBlockM;
    tile.batch = tile.split * params.entries() + (params.sequences.cu_seqlens_q ? 0 : tile.batch);
    auto tOcO = as_matrix(  // (rows, columns) -> (row, column)
        TiledMma{}.get_slice(platform::thread_index()).partition_C(make_identity_tensor(ShapeO{})));
    visit_rows<Softmax>(pack_gqa, row0, sequence, tOcO, [&](int row, int mine) {
      *pack_gqa.find<RowStats>(params.splits.stats, tile, row, sequence) = softmax.stats(mine);
    });
    auto out = as_matrix(tOrO);  // (rows, columns)
    CUTE_UNROLL
    for (int r = 0; r < size<0>(out); ++r) {
      const int row = row0 + static_cast<int>(get<0>(tOcO(r, 0)));
      const bool exists = pack_gqa.exists(row, sequence);
      float* to = pack_gqa.find<float>(params.splits.out, tile, row, sequence);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(out); c += 2) {
        const int column = get<1>(tOcO(r, c));
        auto pair = make_tensor<float>(_2{});  // of columns that lie together
        pair(0) = out(r, c);
        pair(1) = out(r, c + 1);
        if (exists && column < params.head_dim_v) {
          copy(Copy_Atom<UniversalCopy<uint64_t>, float>{}, pair,
               make_tensor(make_gmem_ptr(to + column), Shape<_2>{}));
        }
      }
    }
  }

 private:
  // Calls visit(row, index among the thread's rows) for the one row that this thread reports. A
  // quad has two or four rows, one for each of as many lanes: those that hold the first columns.
  template <class Softmax, class Coords, class Visit>
  static CUTE_DEVICE void visit_rows(const PackGqa& pack_gqa, int row0, const Sequence& sequence,
                                     const Coords& tOcO, const Visit& visit) {
    using namespace cute;
    static_assert(Softmax::kRows <= 4);
    const int mine = static_cast<int>(get<1>(tOcO(0, 0))) / 2;
    if (mine >= Softmax::kRows) return;
    const int row = row0 + static_cast<int>(get<0>(tOcO(mine, 0)));
    if (pack_gqa.exists(row, sequence)) visit(row, mine);  // fault: lse-row
  }
};

}  // namespace flash_cute::sm80
