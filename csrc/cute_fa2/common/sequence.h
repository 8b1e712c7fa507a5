// The pair of sequences that a tile attends over. The kernels ask it for lengths and never read
// them from the parameters, so that packed sequences can stand here later. (For these sm90's loads
// need more: its tensor maps know where tensors end, not where sequences do.)
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "params.h"

namespace flash_cute {

struct Sequence {
  int len_q;
  int len_k;
  // The keys that the tile attends to, [key_begin, key_end): all, or one of the parts that they are
  // split into.
  int key_begin;
  int key_end;

  CUTE_HOST_DEVICE explicit Sequence(const FwdParams& params)
      : len_q(params.len_q), len_k(params.len_k), key_begin(0), key_end(params.len_k) {}
  CUTE_HOST_DEVICE Sequence(const FwdParams& params, int split)
      : len_q(params.len_q),
        len_k(params.len_k),
        key_begin(split * params.splits.keys),
        key_end(cute::min(params.len_k, key_begin + params.splits.keys)) {}
};

}  // namespace flash_cute
