// The types by which CUTLASS and CuTe know a dtype.
#pragma once

#include <cutlass/numeric_types.h>

#include "host/params.h"

namespace flash_cute {

template <DType kDType>
struct ElementType;
template <>
struct ElementType<DType::kHalf> {
  using type = cutlass::half_t;
};
template <>
struct ElementType<DType::kBFloat16> {
  using type = cutlass::bfloat16_t;
};

template <>
struct ElementType<DType::kFloat> {
  using type = float;
};

template <DType kDType>
using ElementOf = typename ElementType<kDType>::type;

}  // namespace flash_cute
