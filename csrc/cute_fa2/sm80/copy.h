// Tiles from global to shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"

namespace flash_cute::sm80 {

// This thread's share of the copy of a tile. What lies outside the sequence or the head dim becomes
// zeros.
template <class GmemCopy, class TileShape>
class TileLoader {
 public:
  CUTE_DEVICE TileLoader(unsigned thread, int columns) : thread_(thread), columns_(columns) {}

  // The address of this thread's share of tile `index` along the rows of the matrix (rows, columns)
  // at `data`.
  template <class Element>
  CUTE_DEVICE const Element* find(const Element* data, int64_t stride_row, int index) const {
    using namespace cute;
    // Enough rows for any tile. `load` has the bounds.
    const auto matrix =
        make_tensor(make_gmem_ptr(data), make_shape(kMaxLength, size<1>(TileShape{})),
                    make_stride(stride_row, _1{}));
    const auto tile = local_tile(matrix, TileShape{}, make_coord(index, _0{}));
    // (chunk, rows, columns)
    return &GmemCopy{}.get_slice(thread_).partition_S(tile)(0, 0, 0);
  }

  // Issues the asynchronous copy of a tile to `target`. `rows` rows of it exist, all if kIsWhole.
  // `source` is where this thread's share begins; it moves to where the share ends.
  template <bool kIsWhole, class Element, class Target>
  CUTE_DEVICE void load(const Element*& source, int64_t stride_row, Target&& target,
                        int rows) const {
    using namespace cute;
    auto to = GmemCopy{}.get_slice(thread_).partition_D(target);  // (chunk, rows, columns)
    constexpr int kStep = decltype(size<0>(TileShape{}))::value / decltype(size<1>(to))::value;
    // (chunk, rows, columns) -> (row, column). Those of thread 0 are constants. All others of a
    // thread differ from them by one offset. So constants are compared with what is left.
    auto at = GmemCopy{}.get_slice(thread_).partition_S(make_identity_tensor(TileShape{}));
    auto beside = GmemCopy{}.get_slice(0).partition_S(make_identity_tensor(TileShape{}));
    const int rows_left = rows - static_cast<int>(get<0>(at(0, 0, 0)));
    const int columns_left = columns_ - static_cast<int>(get<1>(at(0, 0, 0)));
    CUTE_UNROLL
    for (int r = 0; r < size<1>(to); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<2>(to); ++c) {
        const bool row_exists = kIsWhole || get<0>(beside(0, r, c)) < rows_left;
        const int column = get<1>(beside(0, r, c));
        copy(GmemCopy{}.with(row_exists && column < columns_left),
             make_tensor(make_gmem_ptr(source + column), make_layout(size<0>(to))), to(_, r, c));
      }
      // One running pointer, not an address for each row: registers are short here.
      source += kStep * stride_row;
    }
  }

  // The same of the query rows of `view` that begin with `row0`.
  template <class View, class Target>
  CUTE_DEVICE void load_rows(const View& view, const PackGqa& pack_gqa, TileCoord tile, int row0,
                             const Sequence& sequence, Target&& target) const {
    using namespace cute;
    using Element = typename std::remove_reference_t<Target>::value_type;
    const auto thread_copy = GmemCopy{}.get_slice(thread_);
    auto to = thread_copy.partition_D(target);  // (chunk, rows, columns)
    // (chunk, rows, columns) -> (row, column)
    auto at = thread_copy.partition_S(make_identity_tensor(TileShape{}));
    constexpr int kRows = decltype(size<1>(to))::value;
    constexpr int kStep = decltype(size<0>(TileShape{}))::value / kRows;
    pack_gqa.for_each_row<const Element, kRows, kStep>(
        view, tile, row0 + static_cast<int>(get<0>(at(0, 0, 0))), sequence,
        [&](int r, const Element* source, bool exists) {
          CUTE_UNROLL
          for (int c = 0; c < size<2>(to); ++c) {
            const int column = get<1>(at(0, r, c));
            copy(GmemCopy{}.with(exists && column < columns_),
                 make_tensor(make_gmem_ptr(source + column), make_layout(size<0>(to))),
                 to(_, r, c));
          }
        });
  }

  // Multiplies this thread's share of a tile in shared memory by `factor`. The thread has copied it
  // itself and waited for it, so no barrier is needed before.
  template <class Target>
  CUTE_DEVICE void multiply(Target&& target, float factor) const {
    using namespace cute;
    using Element = typename std::remove_reference_t<Target>::value_type;
    const auto thread_copy = GmemCopy{}.get_slice(platform::rematerialize(thread_));
    auto mine = thread_copy.partition_D(target);  // (chunk, rows, columns)
    CUTE_UNROLL
    for (int i = 0; i < size(mine); ++i) mine(i) = Element(float(mine(i)) * factor);
  }

 private:
  unsigned thread_;
  int columns_;
};

}  // namespace flash_cute::sm80
