// The pair of sequences that a tile attends over. The kernels ask it for lengths and first rows and
// never read them from the parameters, so that packed or paged sequences can stand here later.
#pragma once

#include <cute/config.hpp>

#include "params.h"

namespace flash_cute {

struct Sequence {
  int len_q;
  int len_k;

  CUTE_HOST_DEVICE explicit Sequence(const FwdParams& params)
      : len_q(params.len_q), len_k(params.len_k) {}
};

}  // namespace flash_cute
