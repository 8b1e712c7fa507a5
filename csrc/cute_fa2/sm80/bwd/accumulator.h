// Accumulators in global memory, as fp32 sums.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"

namespace flash_cute::sm80 {

// Sums in global memory lie in the order in which threads hold them: element i of all threads side
// by side. So 32 lanes touch 128 bytes.
template <class Traits>
struct AccumulatorSums {
  // Adds share `share` of `count` equal ones.
  template <class Accumulator>
  static CUTE_DEVICE void add_to(float* tile, const Accumulator& accumulator, int share = 0,
                                 int count = 1) {
    constexpr int kSize = decltype(cute::size(accumulator))::value;
    float* const mine = tile + platform::thread_index();
    CUTE_UNROLL
    for (int i = kSize * share / count; i < kSize * (share + 1) / count; ++i) {
      platform::reduce_add(mine + i * Traits::kThreads, accumulator(i));
    }
  }
  template <class Accumulator>
  static CUTE_DEVICE void store_to(float* tile, const Accumulator& accumulator) {
    float* const mine = tile + platform::thread_index();
    CUTE_UNROLL
    for (int i = 0; i < cute::size(accumulator); ++i) {
      mine[i * Traits::kThreads] = accumulator(i);
    }
  }
  // accumulator += what is in memory
  template <class Accumulator>
  static CUTE_DEVICE void add_from(const float* tile, Accumulator& accumulator) {
    const float* const mine = tile + platform::thread_index();
    CUTE_UNROLL
    for (int i = 0; i < cute::size(accumulator); ++i) {
      accumulator(i) += mine[i * Traits::kThreads];
    }
  }
};

}  // namespace flash_cute::sm80
