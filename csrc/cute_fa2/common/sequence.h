// The pair of sequences that a tile attends over, of which the keys may be a part of the tensor's.
// The kernels ask it for lengths and first rows and never read them from the parameters, so that
// packed or paged sequences can stand here later.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "params.h"

namespace flash_cute {

struct Sequence {
  int len_q;
  int first_key;  // of the tensor's; keys are counted from it
  int len_k;

  CUTE_HOST_DEVICE explicit Sequence(const FwdParams& params)
      : len_q(params.len_q), first_key(0), len_k(params.len_k) {}
  // One of the parts of the keys.
  CUTE_HOST_DEVICE Sequence(const FwdParams& params, int split)
      : len_q(params.len_q),
        first_key(split * params.splits.keys),
        len_k(cute::min(params.splits.keys, params.len_k - first_key)) {}
};

}  // namespace flash_cute
