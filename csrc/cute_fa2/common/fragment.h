// Views of register fragments. An accumulator holds ((2 columns, 2 rows), MMA_M, MMA_N) elements;
// one of wgmma holds ((2 columns, 2 rows, N / 8), MMA_M, MMA_N).
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

namespace flash_cute {

// ((2 columns, 2 rows), MMA_M, MMA_N) -> ((2 rows, MMA_M), (2 columns, MMA_N)): the accumulator as
// a matrix of rows. Of wgmma: ((2 rows, MMA_M), (2 columns, N / 8, MMA_N)).
template <class Layout>
CUTE_DEVICE constexpr auto rows_and_columns(Layout layout) {
  using namespace cute;
  auto rows = make_layout(get<0, 1>(layout), get<1>(layout));
  if constexpr (rank_v<decltype(get<0>(layout))> == 3) {
    return make_layout(rows, make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout)));
  } else {
    return make_layout(rows, make_layout(get<0, 0>(layout), get<2>(layout)));
  }
}

template <class Engine, class Layout>
CUTE_DEVICE constexpr auto as_matrix(cute::Tensor<Engine, Layout>& accumulator) {
  return cute::make_tensor(accumulator.data(), rows_and_columns(accumulator.layout()));
}

template <class Engine, class Layout>
CUTE_DEVICE constexpr auto as_matrix(cute::Tensor<Engine, Layout>&& accumulator) {
  return cute::make_tensor(accumulator.data(), rows_and_columns(accumulator.layout()));
}

// ((2, 2), MMA_M, MMA_N) -> ((2, 2, 2), MMA_M, MMA_N / 2): lane by lane, two neighbouring 16 x 8
// accumulators hold the elements of one 16 x 16 A operand. So P stays in its registers from one
// product to the next. Of wgmma: ((2, 2, N / 8), MMA_M, 1) -> ((2, 2, 2), MMA_M, N / 16).
template <class Engine, class Layout>
CUTE_DEVICE constexpr auto as_a_operand(cute::Tensor<Engine, Layout>& fragment) {
  using namespace cute;
  auto layout = fragment.layout();
  if constexpr (rank_v<decltype(get<0>(layout))> == 3) {
    static_assert(decltype(size<2>(layout))::value == 1);
    auto pairs = logical_divide(get<0, 2>(layout), _2{});  // (2, N / 16)
    return make_tensor(fragment.data(),
                       make_layout(make_layout(get<0, 0>(layout), get<0, 1>(layout), get<0>(pairs)),
                                   get<1>(layout), get<1>(pairs)));
  } else {
    auto l = logical_divide(layout, Shape<_4, Underscore, _2>{});  // ((4), MMA_M, (2, MMA_N / 2))
    return make_tensor(fragment.data(),
                       make_layout(make_layout(get<0>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l)));
  }
}

// The elements of `source` as `To` of 2 bytes, two in each 32-bit word of `words`. The compiler
// never takes such a register apart.
template <class To, class Engine, class Layout, class Words>
CUTE_DEVICE void convert_to_words(const cute::Tensor<Engine, Layout>& source, Words& words) {
  static_assert(decltype(cute::size(source))::value == 2 * decltype(cute::size(words))::value);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(words); ++i) {
    const cutlass::Array<float, 2> from = {source(2 * i), source(2 * i + 1)};
    const auto pair = cutlass::NumericArrayConverter<To, float, 2>{}(from);
    words(i) = reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace flash_cute
