// Views of register fragments. An accumulator of m16n8k16 holds ((2 columns, 2 rows), MMA_M, MMA_N)
// elements.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

namespace flash_cute {

// ((2 columns, 2 rows), MMA_M, MMA_N) -> ((2 rows, MMA_M), (2 columns, MMA_N)): the accumulator as
// a matrix of rows.
template <class Layout>
CUTE_DEVICE constexpr auto rows_and_columns(Layout layout) {
  using namespace cute;
  return make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                     make_layout(get<0, 0>(layout), get<2>(layout)));
}

template <class Engine, class Layout>
CUTE_DEVICE constexpr auto as_matrix(cute::Tensor<Engine, Layout>& accumulator) {
  return cute::make_tensor(accumulator.data(), rows_and_columns(accumulator.layout()));
}

template <class Engine, class Layout>
CUTE_DEVICE constexpr auto as_matrix(cute::Tensor<Engine, Layout>&& accumulator) {
  return cute::make_tensor(accumulator.data(), rows_and_columns(accumulator.layout()));
}

// ((2, 2), MMA_M, MMA_N) -> ((2, 2, 2), MMA_M, MMA_N / 2): two neighbouring 16 x 8 accumulators
// hold, lane by lane, the elements of one 16 x 16 A operand, so that P goes from one product to the
// next without leaving its registers.
template <class Engine, class Layout>
CUTE_DEVICE constexpr auto as_a_operand(cute::Tensor<Engine, Layout>& fragment) {
  using namespace cute;
  auto l = logical_divide(fragment.layout(),
                          Shape<_4, Underscore, _2>{});  // ((4), MMA_M, (2, MMA_N / 2))
  return make_tensor(fragment.data(),
                     make_layout(make_layout(get<0>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l)));
}

template <class To, class Engine, class Layout>
CUTE_DEVICE auto convert(const cute::Tensor<Engine, Layout>& source) {
  using From = typename Engine::value_type;
  constexpr int kSize = decltype(cute::size(source))::value;
  auto result = cute::make_tensor<To>(source.layout());
  const auto& from = *reinterpret_cast<const cutlass::Array<From, kSize>*>(source.data());
  *reinterpret_cast<cutlass::Array<To, kSize>*>(result.data()) =
      cutlass::NumericArrayConverter<To, From, kSize>{}(from);
  return result;
}

}  // namespace flash_cute
