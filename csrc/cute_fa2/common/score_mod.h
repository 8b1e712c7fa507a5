// The slot for a change of scores between Q K^T and the mask. There is none yet.
#pragma once

#include <cute/config.hpp>

#include "host/params.h"

namespace flash_cute {

struct NoScoreMod {
  // `scores`: a thread's of the tile that begins at (row0, key0), as a matrix of (rows, columns).
  template <class Scores>
  static CUTE_DEVICE void apply(const FwdParams&, Scores& /*scores*/, int /*row0*/, int /*key0*/) {}
};

}  // namespace flash_cute
