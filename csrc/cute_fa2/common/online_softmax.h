// Softmax over a row of which only one block of scores is there at a time (Milakov & Gimelshein
// 2018; Dao et al. 2022).
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "params.h"

namespace flash_cute {

// The running statistics of kRows rows. Scores are raw products; with c = scale_log2 > 0 a score s
// weighs 2^(c (s - m)), relative to the row's reference m. That is the row's maximum when it was
// last raised: it follows the maximum only where a weight would exceed 2^kSlack, as each rise costs
// a rescaling of O. The four lanes of a quad share each row: the reference is that of the whole
// row, the sum that of the lane's own columns until `finish`.
//
// Without kAnyScale, scales for which FwdParams::subtract_max_first holds are left to others.
template <int kRows, bool kAnyScale = true>
class OnlineSoftmax {
 public:
  CUTE_DEVICE explicit OnlineSoftmax(const FwdParams& params) : params_(params) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      reference_[r] = -INFINITY;
      sum_[r] = 0.f;
    }
  }

  // Takes one more block of scores: replaces them by their weights, and rescales `out`, the
  // weighted sum of V so far, where the reference rises. Both are matrices of (kRows, columns).
  template <class Scores, class Out>
  CUTE_DEVICE void step(Scores& scores, Out& out) {
    if (raise(scores)) rescale(out);
    weigh(scores);
  }

  // The three parts of a step, for those who have something else to do in between. `raise` lets
  // the references follow the block's maxima; where it returns true (for the whole warp), what was
  // summed up before is to be rescaled before anything is added to it.
  template <class Scores>
  CUTE_DEVICE bool raise(const Scores& scores) {
    float row_max[kRows];
    bool rises = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = reference_[r];
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) row_max[r] = fmaxf(row_max[r], scores(r, c));
      rises |= is_rise(r, row_max[r]);
    }

    // Each row decides for itself, so that its result does not depend on its neighbours; the warp
    // decides together whether there is anything to do. A lane's own columns tell whether there
    // is; how far a row rises, its four lanes find together.
    if (!platform::any_in_warp(rises)) return false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = fmaxf(row_max[r], platform::shuffle_xor(row_max[r], 2));
      row_max[r] = fmaxf(row_max[r], platform::shuffle_xor(row_max[r], 1));
      const float reference = is_rise(r, row_max[r]) ? row_max[r] : reference_[r];
      rescale_[r] = platform::exp2((reference_[r] - finite(reference)) * params_.scale_log2);
      reference_[r] = reference;
      sum_[r] *= rescale_[r];
    }
    return true;
  }

  template <class Out>
  CUTE_DEVICE void rescale(Out& out) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= rescale_[r];
    }
  }

  template <class Scores>
  CUTE_DEVICE void weigh(Scores& scores) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      // c s - c m is one fused multiply-add a score. It errs by the rounding of c m alone, by the
      // same amount for the whole row, which the sum takes out again; but where c is so large that
      // this amount could overflow, m goes first.
      float scaled_reference = finite(reference_[r]) * params_.scale_log2;
      if (kAnyScale && params_.subtract_max_first) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) scores(r, c) -= finite(reference_[r]);
        scaled_reference = 0.f;
      }
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        scores(r, c) = platform::exp2(scores(r, c) * params_.scale_log2 - scaled_reference);
        sum_[r] += scores(r, c);
      }
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
      const float inverse = 1.f / sum;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) {
        out(r, c) = sum == 0.f ? 0.f : out(r, c) * inverse;  // NaN x 0 in a key unseen stays out
      }
      constexpr float kLn2 = 0.693147180559945309f;
      lse(r) = sum == 0.f ? -INFINITY
                          : (reference_[r] * params_.scale_log2 + platform::log2(sum)) * kLn2;
    }
    return lse;
  }

 private:
  // Weights up to 2^8 lose nothing: fp16 reaches to 2^16, and sums are in fp32.
  static constexpr float kSlack = 8.f;

  // A row's first key is a rise from -inf.
  CUTE_DEVICE bool is_rise(int r, float row_max) const {
    return (row_max - reference_[r]) * params_.scale_log2 > kSlack;
  }

  // The reference of a row that has seen no key yet is -inf; 0 in its place keeps -inf - -inf (NaN)
  // out.
  static CUTE_DEVICE float finite(float reference) {
    return reference == -INFINITY ? 0.f : reference;
  }

  float reference_[kRows];
  float sum_[kRows];
  float rescale_[kRows];     // of the last raise
  const FwdParams& params_;  // read where needed: a constant-bank operand costs no register
};

}  // namespace flash_cute
