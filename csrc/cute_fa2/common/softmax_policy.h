// What the weights of a row are relative to, so that none overflows.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "common/platform.h"
#include "host/params.h"

namespace flash_cute {

// Scores are raw products. With c = scale_log2 > 0, a score s weighs 2^(c (s - limit) +
// kSlackLog2), where no score seen so far is greater than the row's limit. A limit is set `slack`
// above the row's maximum, and holds until a score exceeds it (lazy rescaling).
//
//   ordinary rows   2^(c s - reference), with reference = c limit - kSlackLog2, rounded: one fused
//                   multiply-add a score. All weights of a row have the same rounding of it.
//   exact rows      2^(c (s - limit) + kSlackLog2), where |limit| >= exact_from: there the rounding
//                   of the reference could overflow a weight. s - limit comes first; it is exact.
class SoftmaxPolicy {
 public:
  CUTE_DEVICE explicit SoftmaxPolicy(const FwdParams& params) : scale_(params.scale) {}

  CUTE_DEVICE bool is_exact(float limit) const {
    return fabsf(limit) >= scale_.exact_from && limit != -INFINITY;
  }
  // Whether the limit has to be looked at in every block, by one comparison of bits. Either it is
  // below 0, where bits do not order floats, or the row is exact.
  CUTE_DEVICE bool needs_every_block(float limit) const {
    return std::bit_cast<uint32_t>(limit) >= std::bit_cast<uint32_t>(scale_.exact_from);
  }

  CUTE_DEVICE float limit_above(float row_max) const {
    return fminf(row_max + scale_.slack, std::numeric_limits<float>::max());
  }

  // What is subtracted from c s, or of an exact row from c (s - limit).
  CUTE_DEVICE float subtrahend(float limit) const {
    return is_exact(limit) ? -SoftmaxScale::kSlackLog2 : reference(limit);
  }
  // The same in one instruction less, for a loop that asks in every step. Before the first key all
  // scores are -inf, and any finite number does. The select is of the limit: after a select of the
  // result ptxas spills at head dim 64.
  CUTE_DEVICE float subtrahend_in_loop(float limit) const {
    const float ordinary = fabsf(limit) < scale_.exact_from ? limit : 0.f;
    return fmaf(ordinary, scale_.scale_log2, -SoftmaxScale::kSlackLog2);
  }

  // The factor that brings weights relative to one limit to another, which is no lower.
  CUTE_DEVICE float rescale(float from, float to) const {
    return platform::exp2(is_exact(to) ? (from - to) * scale_.scale_log2
                                       : reference(from) - reference(to));
  }

  // The log-sum-exp (natural logarithm) of a row; -inf without a key.
  CUTE_DEVICE float lse(RowStats row) const {
    constexpr float kLn2 = 0.693147180559945309f;
    const float log2_weight = fmaf(row.limit, scale_.scale_log2, -SoftmaxScale::kSlackLog2);
    return row.sum == 0.f ? -INFINITY : (log2_weight + platform::log2(row.sum)) * kLn2;
  }

  // The same for fp32: of an ordinary row the sum of the logarithms loses nothing. Exact rows are
  // rounded as in `lse`, and so are those so large that a rest would be less than a digit.
  CUTE_DEVICE float lse_fp32(RowStats row) const {
    constexpr double kLn2 = 0.69314718055994531;
    constexpr float kHi = static_cast<float>(kLn2), kLo = static_cast<float>(kLn2 - kHi);
    const float log2_weight = fmaf(row.limit, scale_.scale_log2, -SoftmaxScale::kSlackLog2);
    const float log2_sum = platform::log2(row.sum);
    const float sum = log2_weight + log2_sum, added = sum - log2_weight;
    const float rest = (log2_weight - (sum - added)) + (log2_sum - added);  // that `sum` lacks
    const float low = fabsf(sum) < SoftmaxScale::kExactFrom ? fmaf(sum, kLo, rest * kHi) : 0.f;
    return row.sum == 0.f ? -INFINITY : fmaf(sum, kHi, low);
  }

  // Of an ordinary row. Before the first key the limit is -inf and the reference finite: then
  // -inf - reference is -inf, not NaN.
  CUTE_DEVICE float reference(float limit) const {
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    return fmaxf(fmaf(limit, scale_.scale_log2, -SoftmaxScale::kSlackLog2), kLowest);
  }

 private:
  const SoftmaxScale& scale_;  // read where needed: a constant-bank operand costs no register
};

}  // namespace flash_cute
