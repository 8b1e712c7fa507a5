// The type by which CUTLASS and CuTe know a dtype.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "params.h"

namespace flash_cute {

template <DType kDType>
using ElementOf = std::conditional_t<kDType == DType::kHalf, cutlass::half_t, cutlass::bfloat16_t>;

}  // namespace flash_cute
