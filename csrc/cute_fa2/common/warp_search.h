// A search by all lanes of a warp: a step cuts the range to a 32nd, and is one trip to memory.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/platform.h"

namespace flash_cute {

// The last number of [0, count) for which `holds` is true. It is true up to there, and false
// behind; if it never is, 0 is returned. All lanes call it with the same arguments.
template <class Holds>
CUTE_DEVICE int last_in_warp(int count, const Holds& holds) {
  const int lane = platform::thread_index() % 32;
  int first = 0;
  while (count > 1) {  // the answer is in [first, first + count)
    const int each = (count + 31) / 32;
    const bool is_behind = lane * each >= count || !holds(first + lane * each);
    const int skipped = cute::max(0, 31 - platform::count_in_warp(is_behind)) * each;
    first += skipped;
    count = cute::min(each, count - skipped);
  }
  return first;
}

}  // namespace flash_cute
