// A binary search of a warp, with 32 arms: each look is one trip to memory for all lanes.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/platform.h"

namespace flash_cute {

// The last of the numbers [0, count) that holds, where those behind one that does not do neither;
// 0, if none does. All lanes of the warp ask alike.
template <class Holds>
CUTE_DEVICE int last_in_warp(int count, const Holds& holds) {
  const int lane = platform::thread_index() % 32;
  int first = 0;
  while (count > 1) {  // it is one of so many from the first on
    const int each = (count + 31) / 32;
    const bool is_behind = lane * each >= count || !holds(first + lane * each);
    const int skipped = cute::max(0, 31 - platform::count_in_warp(is_behind)) * each;
    first += skipped;
    count = cute::min(each, count - skipped);
  }
  return first;
}

}  // namespace flash_cute
