// The slot for a change of scores between Q K^T and the mask. There is none yet.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

struct NoScoreMod {
  // `scores`: a matrix of a thread's (rows, columns).
  template <class Scores>
  static CUTE_DEVICE void apply(Scores&) {}
};

}  // namespace flash_cute
