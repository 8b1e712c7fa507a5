// A gradient out of a warpgroup's accumulators, without shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/gradient.h"
#include "common/platform.h"

namespace flash_cute::sm90 {

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

// As store_gradient, of a warpgroup's 64 rows, in chunks of 8 columns, which are 16 bytes. A quad
// of lanes has a row's chunks, each lane two columns of each. They exchange words, so that of four
// chunks each lane has one.
template <class Element, class Accumulator>
CUTE_DEVICE void store_gradient_of_quads(const GradientPlace& place, int row0, float factor,
                                         Accumulator& accumulator, int thread) {
  using namespace cute;
  const auto gradient = as_matrix(accumulator);  // (2 rows, (2 columns, chunks))
  static_assert(decltype(size<1>(gradient))::value % 8 == 0);
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
           make_tensor(
               make_gmem_ptr(reinterpret_cast<uint32_t*>(first + row * view.stride_row + column)),
               Shape<_4>{}));
    }
  }
}

}  // namespace flash_cute::sm90
