// A consumer's accumulators in global memory, as fp32 sums.
#pragma once

#include <cute/tensor.hpp>

#include "sm90/hopper.h"

namespace flash_cute::sm90 {

// Sums lie in the order in which threads hold them: warp by warp, four elements of each lane side
// by side, then the next four. So 32 lanes touch 512 bytes, and the sums of a warp are in one
// piece.
class WarpgroupSums {
  using Copy = cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, float>;
  template <class Float>
  static CUTE_DEVICE auto at(Float* four) {
    return cute::make_tensor(cute::make_gmem_ptr(four), cute::Shape<cute::_4>{});
  }
  static CUTE_DEVICE auto in_shared(float* four) {
    return cute::make_tensor(cute::make_smem_ptr(four), cute::Shape<cute::_4>{});
  }

 public:
  template <class Accumulator>
  static CUTE_DEVICE void store_to(float* part, const Accumulator& accumulator) {
    for_each_four(accumulator, [&](int i, int offset) {
      cute::copy(Copy{}, cute::make_tensor(accumulator.data() + i, cute::Shape<cute::_4>{}),
                 at(part + offset));
    });
  }
  // The same in shared memory, and back.
  template <class Accumulator>
  static CUTE_DEVICE void store_to_shared(float* part, const Accumulator& accumulator) {
    for_each_four(accumulator, [&](int i, int offset) {
      cute::copy(Copy{}, cute::make_tensor(accumulator.data() + i, cute::Shape<cute::_4>{}),
                 in_shared(part + offset));
    });
  }
  template <class Accumulator>
  static CUTE_DEVICE void load_from_shared(float* part, Accumulator& accumulator) {
    for_each_four(accumulator, [&](int i, int offset) {
      cute::copy(Copy{}, in_shared(part + offset),
                 cute::make_tensor(accumulator.data() + i, cute::Shape<cute::_4>{}));
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
  template <class Accumulator, class F>
  static CUTE_DEVICE void for_each_four(const Accumulator& accumulator, F&& f) {
    const int warp = hopper::warp_in_warpgroup(), lane = hopper::thread_in_warpgroup() % 32;
    const int first = (warp * decltype(cute::size(accumulator))::value * 8 + lane) * 4;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(accumulator); i += 4) f(i, first + i * 32);
  }
};

}  // namespace flash_cute::sm90
