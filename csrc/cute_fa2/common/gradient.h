// A gradient on its way from accumulators to global memory.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/fragment.h"
#include "common/platform.h"
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

// Word i of lane j of a quad becomes word j of lane i.
template <class Words>
CUTE_DEVICE void transpose_of_quad(Words& words, int lane) {
  CUTE_UNROLL
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool is_upper = (lane & distance) != 0;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      const uint32_t given = is_upper ? words(i) : words(i + distance);
      const uint32_t got = platform::shuffle_xor(given, distance);
      words(i) = is_upper ? got : words(i);
      words(i + distance) = is_upper ? words(i + distance) : got;
    }
  }
}

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

// The same of a warpgroup's accumulator of wgmma, for elements of 16 bits, in chunks of 16 bytes. A
// quad of lanes has two columns each of 8 that lie together; of four times 8 each lane gets one.
template <class Element, class Accumulator>
CUTE_DEVICE void store_gradient_of_quads(const GradientPlace& place, int row0, float factor,
                                         Accumulator& accumulator, int thread) {
  using namespace cute;
  const auto gradient = as_matrix(accumulator);  // (2 rows, (2 columns, chunks))
  const TensorView<void*>& view = place.view;
  const int lane = thread % 4;  // of the quad
  const int first_row = row0 + thread / 32 * 16 + thread % 32 / 4;
  Element* const first = static_cast<Element*>(view.data) + place.batch * view.stride_batch +
                         place.head * view.stride_head + place.first * view.stride_row;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(gradient); c += 8) {
      auto eight = make_tensor<float>(_8{});
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) eight(i) = factor * gradient(r, c + i);
      auto words = make_tensor<uint32_t>(_4{});  // of four chunks; then of one
      convert_to_words<Element>(eight, words);
      transpose_of_quad(words, lane);
      const int column = (c / 2 + lane) * 8;
      if (row >= place.rows || column >= place.columns) continue;
      copy(Copy_Atom<UniversalCopy<uint128_t>, uint32_t>{}, words,
           make_tensor(make_gmem_ptr(reinterpret_cast<uint32_t*>(first + row * view.stride_row +
                                                                 column)),
                       Shape<_4>{}));
    }
  }
}

}  // namespace flash_cute
