// Views of the fragments of m16n8k16 beside those of common/fragment.h.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

#include "common/fragment.h"

namespace flash_cute::sm80 {

// kCount of a warp's MMAs along the rows, from kFirst on. A thread has two rows of each.
template <int kFirst_, int kCount_>
struct MmaRange {
  static constexpr int kFirst = kFirst_;
  static constexpr int kCount = kCount_;
  static constexpr int kFirstRow = 2 * kFirst;  // of the thread's
};

// (values, MMA_M, MMA_N) -> (values, Rows::kCount, MMA_N), of a range of MMAs
template <class Rows, class Engine, class Layout>
CUTE_DEVICE constexpr auto select_rows(cute::Tensor<Engine, Layout>& fragment) {
  using namespace cute;
  auto layout = fragment.layout();
  auto rows = make_layout(Int<Rows::kCount>{}, stride<1>(layout));
  return make_tensor(fragment.data() + layout(_0{}, Int<Rows::kFirst>{}, _0{}),
                     make_layout(get<0>(layout), rows, get<2>(layout)));
}

// (values, MMA_M, MMA_N) -> (values, MMA_M, kCount): the accumulators along the columns from kFirst
// on.
template <int kFirst, int kCount, class Engine, class Layout>
CUTE_DEVICE constexpr auto select_columns(cute::Tensor<Engine, Layout>& fragment) {
  using namespace cute;
  auto layout = fragment.layout();
  auto columns = composition(get<2>(layout), make_layout(Int<kCount>{}));
  return make_tensor(fragment.data() + layout(_0{}, _0{}, Int<kFirst>{}),
                     make_layout(get<0>(layout), get<1>(layout), columns));
}

// (values, MMA_M, MMA_N) -> (values, MMA_M, 2): the pair's two accumulators along the columns.
template <class Engine, class Layout>
CUTE_DEVICE constexpr auto pair_of_columns(cute::Tensor<Engine, Layout>& fragment, int pair) {
  using namespace cute;
  auto layout = fragment.layout();
  return make_tensor(
      fragment.data() + layout(_0{}, _0{}, 2 * pair),
      make_layout(get<0>(layout), get<1>(layout), make_layout(_2{}, stride<2>(layout))));
}

// The elements of `source`, which lie side by side, as `To`.
template <class To, class Engine, class Layout>
CUTE_DEVICE auto convert(const cute::Tensor<Engine, Layout>& source) {
  using From = typename Engine::value_type;
  constexpr int kSize = decltype(cute::size(source))::value;
  static_assert(decltype(cute::cosize(source.layout()))::value == kSize);
  auto result = cute::make_tensor<To>(source.layout());
  const auto& from = *reinterpret_cast<const cutlass::Array<From, kSize>*>(source.data());
  *reinterpret_cast<cutlass::Array<To, kSize>*>(result.data()) =
      cutlass::NumericArrayConverter<To, From, kSize>{}(from);
  return result;
}

// The same, where only pairs of elements lie side by side.
template <class To, class Engine, class Layout>
CUTE_DEVICE auto convert_pairs(const cute::Tensor<Engine, Layout>& source) {
  using From = typename Engine::value_type;
  static_assert(decltype(source.layout()(cute::_1{}))::value == 1);
  auto result = cute::make_tensor<To>(cute::shape(source));
  CUTE_UNROLL
  for (int i = 0; i < cute::size(source); i += 2) {
    const auto& pair = *reinterpret_cast<const cutlass::Array<From, 2>*>(&source(i));
    *reinterpret_cast<cutlass::Array<To, 2>*>(&result(i)) =
        cutlass::NumericArrayConverter<To, From, 2>{}(pair);
  }
  return result;
}

}  // namespace flash_cute::sm80
