// From a runtime value to a compile-time constant: each switch calls `f` with a
// std::integral_constant.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "host/params.h"

namespace flash_cute {

template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

template <class F>
void dtype_switch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kHalf:
      return f(Constant<DType::kHalf>{});
    case DType::kBFloat16:
      return f(Constant<DType::kBFloat16>{});
    case DType::kFloat:
      return f(Constant<DType::kFloat>{});
  }
}

template <class F>
void mask_switch(MaskKind mask, F&& f) {
  switch (mask) {
    case MaskKind::kFull:
      return f(Constant<MaskKind::kFull>{});
    case MaskKind::kBanded:
      return f(Constant<MaskKind::kBanded>{});
    case MaskKind::kPacked:
      return f(Constant<MaskKind::kPacked>{});
    case MaskKind::kScored:
      return f(Constant<MaskKind::kScored>{});
  }
}

// Calls `f` with `value` if it is one of kBuilt: dtypes or head dims that this build has.
template <auto kBuilt, class Value, class F>
void built_switch(Value value, F&& f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((value == kBuilt[I] && (f(Constant<kBuilt[I]>{}), true)) || ...);
  }(std::make_index_sequence<kBuilt.size()>{});
}

// Calls `f` with `index`, which is one of [0, kCount).
template <std::size_t kCount, class F>
void index_switch(int index, F&& f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((index == static_cast<int>(I) && (f(Constant<I>{}), true)) || ...);
  }(std::make_index_sequence<kCount>{});
}

}  // namespace flash_cute
