// The softmax scale as the kernels take it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "host/band.h"

namespace flash_cute {

// Sign and size apart: the main loop only meets a positive, finite factor.
struct SoftmaxScale {
  // Weights up to 2^8 lose nothing: fp16 reaches to 2^16, and sums are in fp32.
  static constexpr float kSlackLog2 = 8.f;
  // Up to this size of scaled scores fp32 tells them apart to half a unit (of log2).
  static constexpr double kExactFrom = 1 << 23;
  // Beyond this scale, scaled scores of ordinary size lose what tells them apart.
  static constexpr double kLargeScaleLog2 = 256;

  float scale;       // as it is
  float q_sign;      // its sign (-1, 0 or 1), multiplied into Q once
  float scale_log2;  // |scale| * log2(e): exponentials are taken in base 2
  // By how much a limit is set above the row's maximum: kSlackLog2 / scale_log2, or 0 for large
  // scales.
  float slack;
  // Rows whose limit is at least so large take scores relative to it before the scale
  // (online_softmax.h). 0 for large scales: all rows do.
  float exact_from;

  // Of a backward, which has no maximum to keep: the sign needs no care.
  FLASH_CUTE_HOST_DEVICE float signed_log2() const { return q_sign * scale_log2; }
};

constexpr double kLog2e = 1.4426950408889634;

inline SoftmaxScale make_softmax_scale(double scale) {
  // Within these the factor is a normal number: -inf x factor is -inf, (s - max) x factor not NaN.
  constexpr double kMin = std::numeric_limits<float>::min();
  constexpr double kMax = std::numeric_limits<float>::max();
  const double scale_log2 = scale == 0 ? 1 : std::clamp(std::abs(scale) * kLog2e, kMin, kMax);
  const bool is_large = scale_log2 > SoftmaxScale::kLargeScaleLog2;
  return {
      .scale = static_cast<float>(std::clamp(scale, -kMax, kMax)),
      .q_sign = scale > 0   ? 1.f
                : scale < 0 ? -1.f
                            : 0.f,
      .scale_log2 = static_cast<float>(scale_log2),
      .slack = is_large ? 0.f
                        : static_cast<float>(std::min(SoftmaxScale::kSlackLog2 / scale_log2, kMax)),
      .exact_from = is_large ? 0.f
                    : SoftmaxScale::kExactFrom / scale_log2 > kMax
                        ? std::numeric_limits<float>::infinity()
                        : static_cast<float>(SoftmaxScale::kExactFrom / scale_log2),
  };
}

}  // namespace flash_cute
