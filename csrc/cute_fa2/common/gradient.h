// A gradient on its way from accumulators to global memory.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/fragment.h"
#include "host/params.h"

namespace flash_cute {

// Where a gradient goes: one head of `view`, from row `first` on, where there are `rows` rows and
// `columns` columns.
struct GradientPlace {
  const TensorView<void*>& view;
  int batch;
  int head;
  int64_t first;
  int rows;
  int columns;
};

// Writes factor x accumulator to the rows from `row0` on. `thread` is that of the tiled MMA.
template <class Element, class TiledMma, class Shape, class Accumulator>
CUTE_DEVICE void store_gradient(const GradientPlace& place, int row0, float factor,
                                Accumulator& accumulator, unsigned thread) {
  using namespace cute;
  const auto gradient = as_matrix(accumulator);  // (rows, columns)
  const auto at = as_matrix(TiledMma{}           // (rows, columns) -> (row, column)
                                .get_slice(thread)
                                .partition_C(make_identity_tensor(Shape{})));
  const TensorView<void*>& view = place.view;
  Element* const first = static_cast<Element*>(view.data) + place.batch * view.stride_batch +
                         place.head * view.stride_head + place.first * view.stride_row;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(gradient); ++r) {
    const int row = row0 + static_cast<int>(get<0>(at(r, 0)));
    if (row >= place.rows) continue;
    Element* const to = first + row * view.stride_row;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(gradient); c += 2) {
      const int column = get<1>(at(r, c));
      if (column >= place.columns) continue;
      auto pair = make_tensor<float>(_2{});  // of columns that lie together
      pair(0) = factor * gradient(r, c);     // fault: bwd-scale
      pair(1) = factor * gradient(r, c + 1);
      if constexpr (std::is_same_v<Element, float>) {
        copy(Copy_Atom<UniversalCopy<uint64_t>, float>{}, pair,
             make_tensor(make_gmem_ptr(to + column), cute::Shape<_2>{}));
      } else {
        auto word = make_tensor<uint32_t>(_1{});
        convert_to_words<Element>(pair, word);
        *reinterpret_cast<uint32_t*>(to + column) = word(0);
      }
    }
  }
}

}  // namespace flash_cute
