// Softmax over a row of which only one block of scores is there at a time (Milakov & Gimelshein
// 2018; Dao et al. 2022).
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "params.h"

namespace flash_cute {

// The running maximum and sum of kRows rows. Scores are raw products; with c = scale_log2 > 0 a
// score s weighs 2^(c (s - m)). The four lanes of a quad share each row: the maximum is kept for
// the whole row, the sum for the lane's own columns until `finish`.
template <int kRows>
class OnlineSoftmax {
 public:
  CUTE_DEVICE explicit OnlineSoftmax(const FwdParams& params) : params_(params) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      max_[r] = -INFINITY;
      sum_[r] = 0.f;
    }
  }

  // Takes one more block of scores: replaces them by their weights and rescales `out`, the weighted
  // sum of V so far, to the new maximum. Both are matrices of (kRows, columns).
  template <class Scores, class Out>
  CUTE_DEVICE void step(Scores& scores, Out& out) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float row_max = max_[r];
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) row_max = fmaxf(row_max, scores(r, c));
      row_max = fmaxf(row_max, platform::shuffle_xor(row_max, 2));
      row_max = fmaxf(row_max, platform::shuffle_xor(row_max, 1));

      // A row that has seen no key yet has the maximum -inf; 0 in its place keeps -inf - -inf (NaN)
      // out.
      const float shift = row_max == -INFINITY ? 0.f : row_max;
      const float rescale = platform::exp2((max_[r] - shift) * params_.scale_log2);
      max_[r] = row_max;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= rescale;

      // c s - c m is one fused multiply-add a score. It errs by the rounding of c m alone, by the
      // same amount for the whole row, which the sum takes out again; but where c is so large that
      // this amount could overflow, the maximum goes first.
      float scaled_shift = shift * params_.scale_log2;
      if (params_.subtract_max_first) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) scores(r, c) -= shift;
        scaled_shift = 0.f;
      }
      float row_sum = 0.f;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        scores(r, c) = platform::exp2(scores(r, c) * params_.scale_log2 - scaled_shift);
        row_sum += scores(r, c);
      }
      sum_[r] = sum_[r] * rescale + row_sum;
    }
  }

  // Divides `out` by the rows' sums and returns the rows' log-sum-exp (natural logarithm). A row
  // without a key has a sum of 0 and gets out = 0, lse = -inf.
  template <class Out>
  CUTE_DEVICE auto finish(Out& out) {
    auto lse = cute::make_tensor<float>(cute::Int<kRows>{});
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float sum = sum_[r];
      sum += platform::shuffle_xor(sum, 2);
      sum += platform::shuffle_xor(sum, 1);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= inverse;
      constexpr float kLn2 = 0.693147180559945309f;
      lse(r) = sum == 0.f ? -INFINITY : (max_[r] * params_.scale_log2 + platform::log2(sum)) * kLn2;
    }
    return lse;
  }

 private:
  float max_[kRows];
  float sum_[kRows];
  const FwdParams& params_;  // read where needed: a constant-bank operand costs no register
};

}  // namespace flash_cute
