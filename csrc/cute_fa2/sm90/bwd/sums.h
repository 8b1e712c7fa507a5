// A consumer's accumulators in global memory, as fp32 sums.
#pragma once

#include <cute/tensor.hpp>

#include "sm90/hopper.h"

namespace flash_cute::sm90 {

// Sums lie in the order in which threads hold them: four elements of each thread of a warpgroup
// side by side, then the next four. So 32 lanes touch 512 bytes.
struct WarpgroupSums {
  template <class Accumulator>
  static CUTE_DEVICE void add_to(float* part, const Accumulator& accumulator) {
    for_each_four(accumulator, [&](int i, int offset) {
      const float four[4] = {accumulator(i), accumulator(i + 1), accumulator(i + 2),
                             accumulator(i + 3)};
      hopper::reduce_add(part + offset, four);
    });
  }
  template <class Accumulator>
  static CUTE_DEVICE void store_to(float* part, const Accumulator& accumulator) {
    for_each_four(accumulator, [&](int i, int offset) {
      cute::copy(Copy{}, cute::make_tensor(accumulator.data() + i, cute::Shape<cute::_4>{}),
                 at(part + offset));
    });
  }
  // accumulator += what is in memory
  template <class Accumulator>
  static CUTE_DEVICE void add_from(const float* part, Accumulator& accumulator) {
    for_each_four(accumulator, [&](int i, int offset) {
      auto four = cute::make_tensor<float>(cute::_4{});
      cute::copy(Copy{}, at(part + offset), four);
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) accumulator(i + j) += four(j);
    });
  }

 private:
  using Copy = cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, float>;
  template <class Float>
  static CUTE_DEVICE auto at(Float* four) {
    return cute::make_tensor(cute::make_gmem_ptr(four), cute::Shape<cute::_4>{});
  }
  template <class Accumulator, class F>
  static CUTE_DEVICE void for_each_four(const Accumulator& accumulator, F&& f) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(accumulator); i += 4) {
      f(i, i * hopper::kWarpgroup + 4 * hopper::thread_in_warpgroup());
    }
  }
};

}  // namespace flash_cute::sm90
