// A consumer's accumulators in global memory, as fp32 sums.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/gradient.h"
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
  template <bool kShuffles = false, class Accumulator>
  static CUTE_DEVICE void store_to_shared(float* part, const Accumulator& accumulator) {
    for_each_four<kShuffles>(accumulator, [&](int i, int offset) {
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
  // The sums of this warp, of kSize of a warpgroup.
  template <int kSize>
  static CUTE_DEVICE float* of_warp(float* part) {
    return part + hopper::warp_in_warpgroup() * (kSize / 4);
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
  // A lane's share of the sums of a warp's 16 rows. 8 columns of rows r and r + 8 are 16 floats in
  // one piece: 2 columns of 2 rows of each lane of a quad. So lane l takes rows l % 8 and l % 8 +
  // 8, and of each 32 columns the 8 from l / 8 * 8 on. (2 columns, 2 rows, 4 lanes of a quad,
  // kColumns / 32)
  template <int kColumns>
  using Rows = decltype(cute::make_tensor<float>(
      cute::Shape<cute::_2, cute::_2, cute::_4, cute::Int<kColumns / 32>>{}));
  template <int kColumns>
  static CUTE_DEVICE void load_rows(const float* part, Rows<kColumns>& sums) {
    const int thread = hopper::thread_in_warpgroup_here();  // without a shuffle, which takes long
    const int warp = thread / 32, lane = thread % 32;
    const float* const of_lane = part + warp * kWarpRows * kColumns + lane % 8 * 16;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(sums); i += 4) {
      const int column = i / 16 * 32 + lane / 8 * 8;
      cute::copy(Copy{}, at(of_lane + column * kWarpRows + i % 16),
                 cute::make_tensor(sums.data() + i, cute::Shape<cute::_4>{}));
    }
  }
  // Those as elements, rounded, from the first row of the place on.
  template <class Element, int kColumns>
  static CUTE_DEVICE void store_rounded(const Rows<kColumns>& sums, const GradientPlace& place,
                                        float factor) {
    using namespace cute;
    const int thread = hopper::thread_in_warpgroup_here();
    const int warp = thread / 32, lane = thread % 32;
    const int row = warp * kWarpRows + lane % 8;
    const TensorView<void*>& view = place.view;
    Element* const to = static_cast<Element*>(view.data) + place.batch * view.stride_batch +
                        place.head * view.stride_head + (place.first + row) * view.stride_row;
    CUTE_UNROLL
    for (int strip = 0; strip < kColumns / 32; ++strip) {
      const int column = strip * 32 + lane / 8 * 8;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= place.rows || column >= place.columns) continue;
        auto eight = make_tensor<float>(_8{});
        CUTE_UNROLL
        for (int c = 0; c < 8; ++c) eight(c) = factor * sums(c % 2, r, c / 2, strip);
        auto words = make_tensor<uint32_t>(_4{});
        convert_to_words<Element>(eight, words);
        Element* const chunk = to + 8 * r * view.stride_row + column;
        copy(Copy_Atom<UniversalCopy<uint128_t>, uint32_t>{}, words,
             make_tensor(make_gmem_ptr(reinterpret_cast<uint32_t*>(chunk)), Shape<_4>{}));
      }
    }
  }

 private:
  static constexpr int kWarpRows = 16;

  // `kShuffles`: finds the warp by a shuffle. That takes long, but fewer registers.
  template <bool kShuffles = false, class Accumulator, class F>
  static CUTE_DEVICE void for_each_four(const Accumulator& accumulator, F&& f) {
    const int thread =
        kShuffles ? hopper::thread_in_warpgroup() : hopper::thread_in_warpgroup_here();
    const int warp = kShuffles ? hopper::warp_in_warpgroup() : thread / 32, lane = thread % 32;
    const int first = (warp * decltype(cute::size(accumulator))::value * 8 + lane) * 4;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(accumulator); i += 4) f(i, first + i * 32);
  }
};

}  // namespace flash_cute::sm90
