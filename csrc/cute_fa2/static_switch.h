// From a runtime value to a compile-time constant: each switch calls `f` with a
// std::integral_constant.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "params.h"

namespace flash_cute {

template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

template <class F>
void dtype_switch(DType dtype, F&& f) {
  dtype == DType::kHalf ? f(Constant<DType::kHalf>{}) : f(Constant<DType::kBFloat16>{});
}

template <class F>
void mask_switch(MaskKind mask, F&& f) {
  mask == MaskKind::kFull ? f(Constant<MaskKind::kFull>{}) : f(Constant<MaskKind::kBanded>{});
}

// Calls `f` with the smallest of `kBuckets` (ascending) that is at least `head_dim`.
template <auto kBuckets, class F>
void head_dim_switch(int head_dim, F&& f) {
  const bool found = [&]<std::size_t... I>(std::index_sequence<I...>) {
    return ((head_dim <= kBuckets[I] && (f(Constant<kBuckets[I]>{}), true)) || ...);
  }(std::make_index_sequence<kBuckets.size()>{});
  if (!found) {
    throw std::runtime_error("flash_cute: this build has no kernel for head dim " +
                             std::to_string(head_dim) + ", only for those up to " +
                             std::to_string(kBuckets.back()) + " (FLASH_CUTE_HEAD_DIMS)");
  }
}

// Calls `f` with `index`, which is one of [0, kCount).
template <std::size_t kCount, class F>
void index_switch(int index, F&& f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((index == static_cast<int>(I) && (f(Constant<I>{}), true)) || ...);
  }(std::make_index_sequence<kCount>{});
}

}  // namespace flash_cute
