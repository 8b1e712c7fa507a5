// The sequence that a tile attends over. Kernels ask it for lengths and offsets, never the
// parameters.
#pragma once

#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "host/params.h"

namespace flash_cute {

struct Sequence {
  int len_q;
  int len_k;
  // Its first row in q and out, and in k and v. Of dense tensors each sequence is a batch entry.
  static constexpr int64_t first_q = 0;
  static constexpr int64_t first_k = 0;
  // The keys that the tile attends to, [key_begin, key_end): all, or those of a split.
  int key_begin;
  int key_end;

  CUTE_HOST_DEVICE Sequence(const AttentionParams& params, int /*batch*/)
      : len_q(params.len_q), len_k(params.len_k), key_begin(0), key_end(params.len_k) {}
  CUTE_HOST_DEVICE Sequence(const FwdParams& params, int /*batch*/, int split)
      : len_q(params.len_q),
        len_k(params.len_k),
        key_begin(split * params.splits.keys),
        key_end(cute::min(params.len_k, key_begin + params.splits.keys)) {}
};

}  // namespace flash_cute
