// A learnable sink: a key of every row, with a score of its own and no value (Xiao et al. 2023,
// arXiv 2309.17453; learned for each head, as in gpt-oss). It joins a row when all keys are summed.
#pragma once

#include <cute/config.hpp>

#include "common/platform.h"

namespace flash_cute {

struct Sink {
  float score;  // of one head, in natural logarithm

  static constexpr float kLog2e = 1.44269504088896341f;
  static constexpr float kLn2 = 0.693147180559945309f;

  // The log-sum-exp of a row, with the sink. That of the keys alone is -inf if there are none.
  CUTE_DEVICE float join(float lse) const {
    const float most = fmaxf(lse, score);
    if (most == -INFINITY) return most;
    const float rest = platform::exp2((fminf(lse, score) - most) * kLog2e);
    return most + platform::log2(1.f + rest) * kLn2;
  }
  // What the row's output keeps: the keys' share of the weights.
  CUTE_DEVICE float share_of_keys(float lse) const {
    if (lse == -INFINITY) return 0.f;
    return platform::reciprocal(1.f + platform::exp2((score - lse) * kLog2e));
  }
};

}  // namespace flash_cute
