// Softmax over a row of which only one block of scores is there at a time (Milakov & Gimelshein
// 2018; Dao et al. 2022).
#pragma once

#include <bit>
#include <cute/tensor.hpp>
#include <limits>

#include "common/platform.h"
#include "params.h"

namespace flash_cute {

// The holders of a row are the threads that have parts of it, here the four lanes of a quad. `any`:
// whether the predicate is true for any of the threads that branch together, here a warp; `meet`
// stands in its place where there is nothing to ask (it may be a barrier). `max`, `sum`: over a
// row's holders, each of whom gets the result.
struct QuadAllreduce {
  static CUTE_DEVICE bool any(bool predicate) { return platform::any_in_warp(predicate); }
  static CUTE_DEVICE void meet() {}

  template <int kRows>
  static CUTE_DEVICE void max(float (&rows)[kRows]) {
    CUTE_UNROLL
    for (float& row : rows) {
      row = fmaxf(row, platform::shuffle_xor(row, 2));
      row = fmaxf(row, platform::shuffle_xor(row, 1));
    }
  }

  template <int kRows>
  static CUTE_DEVICE void sum(float (&rows)[kRows]) {
    CUTE_UNROLL
    for (float& row : rows) {
      row += platform::shuffle_xor(row, 2);
      row += platform::shuffle_xor(row, 1);
    }
  }
};

// What a row's weights are relative to, by its limit. Scores are raw products; with c = scale_log2
// > 0 a score s weighs 2^(c s - reference).
//
// Without kAnyScale, scales for which FwdParams::subtract_max_first holds are left to others.
template <bool kAnyScale = true>
class Reference {
 public:
  CUTE_DEVICE explicit Reference(const FwdParams& params) : params_(params) {}

  // What is c times the maximum but for the rounding of the two steps does as well as a reference,
  // if only all use the same. Of a row that has seen no key: no score is below it, and -inf -
  // reference is -inf, not NaN.
  CUTE_DEVICE float of(float limit) const {
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    return fmaxf(fmaf(limit, params_.scale_log2, -FwdParams::kSlackLog2), kLowest);
  }

  // By what weights relative to the reference of one limit are multiplied, to be relative to that
  // of another, which is no lower.
  CUTE_DEVICE float rescale(float from, float to) const {
    return platform::exp2(kAnyScale && params_.subtract_max_first
                              ? (from - finite(to)) * params_.scale_log2
                              : of(from) - of(to));
  }

  // The log-sum-exp (natural logarithm) of a row; -inf without a key.
  CUTE_DEVICE float lse(RowStats row) const {
    constexpr float kLn2 = 0.693147180559945309f;
    const float log2_weight =
        kAnyScale && params_.subtract_max_first ? row.limit * params_.scale_log2 : of(row.limit);
    return row.sum == 0.f ? -INFINITY : (log2_weight + platform::log2(row.sum)) * kLn2;
  }

  // 0 for -inf, as -inf - -inf is NaN.
  static CUTE_DEVICE float finite(float limit) { return limit == -INFINITY ? 0.f : limit; }

 private:
  const FwdParams& params_;  // read where needed: a constant-bank operand costs no register
};

// The running stats of kRows rows. The reference is c times the row's maximum as it was when
// last raised: it follows the maximum only where a weight would exceed 2^kSlackLog2, as each rise
// costs a rescaling of O. Several threads hold each row (`holders`): the reference is that of the
// whole row, the sum that of the thread's own columns until `normalize`.
template <int kRows_, bool kAnyScale = true>
class OnlineSoftmax {
 public:
  static constexpr int kRows = kRows_;

  CUTE_DEVICE explicit OnlineSoftmax(const FwdParams& params)
      : params_(params), reference_(params) {
    start();
  }

  // Rows that have seen no score yet.
  CUTE_DEVICE void start() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      limit_[r] = -INFINITY;
      sum_[r] = 0.f;
    }
  }

  // What scores are compared with and what is subtracted from them. It follows from the references:
  // who has the registers keeps it until `raise` returns true.
  struct Bounds {
    int rising_bits[kRows];  // of the least score by which the row may rise; see greatest_bits
    float subtrahend[kRows];
  };
  CUTE_DEVICE Bounds bounds() const {
    Bounds result;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      result.rising_bits[r] =
          limit_[r] < 0.f ? std::numeric_limits<int>::lowest() : std::bit_cast<int>(limit_[r]) + 1;
      result.subtrahend[r] =
          kAnyScale && params_.subtract_max_first ? 0.f : reference_.of(limit_[r]);
    }
    return result;
  }

  // A block of scores takes four calls. `may_rise` tells whether a row's reference may have to rise
  // by those of its scores that this thread has; it may be asked before a mask, which only lowers
  // scores. `raise` updates the references, and returns false where none rose, the same for all who
  // vote together. Where it returns true, `rescale` multiplies `out`, the weighted sum of V so far,
  // before this block's is added to it; while `out` is 0 that may be left out. `weigh` replaces the
  // scores by their weights; they have to be those that `raise` has had, which may have subtracted
  // the maximum. `scores` and `out` are matrices of (kRows, columns), or of consecutive rows,
  // the first of which is kFirstRow; the stats of the others stay as they are.
  template <int kFirstRow = 0, class Scores>
  CUTE_DEVICE bool may_rise(const Scores& scores) const {
    bool result = false;
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(scores); ++r) {
      const float limit = limit_[kFirstRow + r];
      result |= greatest_bits(scores, r) > std::bit_cast<int>(limit) || limit < 0.f;
    }
    return result;
  }
  // The same, of all rows, by bounds that were kept.
  template <class Scores>
  CUTE_DEVICE bool may_rise(const Scores& scores, const Bounds& bounds) const {
    static_assert(decltype(cute::size<0>(scores))::value == kRows);
    bool result = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) result |= greatest_bits(scores, r) >= bounds.rising_bits[r];
    return result;
  }

  // In the first block of a tile (`is_first`) no row has seen a score before, and all rise.
  template <int kFirstRow = 0, class Scores, class Holders = QuadAllreduce>
  CUTE_DEVICE bool raise(Scores& scores, bool may_rise, bool is_first,
                         const Holders& holders = {}) {
    // Each row decides for itself, so that its result does not depend on its neighbours; all decide
    // together whether there is anything to do. A thread's own columns tell whether there may be;
    // how far a row rises, its holders find together.
    const bool all_rise = is_first || (kAnyScale && params_.subtract_max_first);
    if (all_rise) {
      holders.meet();
    } else {
      if (!holders.any(may_rise)) return false;
    }
    constexpr int kCount = decltype(cute::size<0>(scores))::value;
    static_assert(kFirstRow + kCount <= kRows);
    float row_max[kCount];
    CUTE_UNROLL
    for (int r = 0; r < kCount; ++r) {
      row_max[r] = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < cute::size<1>(scores); ++c) row_max[r] = fmaxf(row_max[r], scores(r, c));
    }
    // Again, by the scores themselves: where a limit is below 0, the bits have not told.
    if (!all_rise) {
      bool rises = false;
      CUTE_UNROLL
      for (int r = 0; r < kCount; ++r) rises |= row_max[r] > limit_[kFirstRow + r];
      if (!holders.any(rises)) return false;
    }
    holders.max(row_max);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int r = kFirstRow + i;
      const float limit = row_max[i] > limit_[r] ? row_max[i] + params_.slack : limit_[r];
      rescale_[r] = reference_.rescale(limit_[r], limit);
      if (kAnyScale && params_.subtract_max_first) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) scores(i, c) -= reference_.finite(limit);
      }
      limit_[r] = limit;
      sum_[r] *= rescale_[r];
    }
    return true;
  }

  template <int kFirstRow = 0, class Out>
  CUTE_DEVICE void rescale(Out& out) const {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(out); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= rescale_[kFirstRow + r];
    }
  }

  // c s - reference is one fused multiply-add a score, exact but for its last rounding. Where c is
  // so large that c s itself has lost what tells scores apart, `raise` has subtracted the maximum.
  template <int kFirstRow = 0, class Scores>
  CUTE_DEVICE void weigh(Scores& scores) {
    weigh<kFirstRow>(scores, bounds());
  }
  // Or of some of the block's columns.
  template <int kFirstRow = 0, class Scores>
  CUTE_DEVICE void weigh(Scores& scores, const Bounds& bounds) {
    // Column by column, so that the weights that the product with V takes first come first.
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(scores); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < cute::size<0>(scores); ++r) {
        float& score = scores(r, c);
        score = platform::exp2(score * params_.scale_log2 - bounds.subtrahend[kFirstRow + r]);
        sum_[kFirstRow + r] += score;
      }
    }
  }

  // Exponentials that stand before it stay before what follows, which ptxas would else move ahead
  // of some of them: a branch that reads every sum. None is below 0, which ptxas does not know.
  CUTE_DEVICE void fence_exp2() const {
    float least = sum_[0];
    CUTE_UNROLL
    for (int r = 1; r < kRows; ++r) least = fminf(least, sum_[r]);
    platform::schedule_fence(platform::any_in_warp(least < 0.f) ? -1 : 0);
  }

  // Divides `out` by the rows' sums. A row without a key has a sum of 0 and gets out = 0.
  template <class Out, class Holders = QuadAllreduce>
  CUTE_DEVICE void normalize(Out& out, const Holders& holders = {}) {
    holders.sum(sum_);
    bool has_keyless = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float inverse = platform::reciprocal(sum_[r]);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= inverse;
      has_keyless |= sum_[r] == 0.f;
    }
    // Apart, as it is rare but where a tile has few rows. 0 x (1 / 0) is NaN, and so is what 0 x
    // infinity has left in `out`, where V has one.
    if (platform::any_in_warp(has_keyless)) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) = sum_[r] == 0.f ? 0.f : out(r, c);
      }
    }
  }

  // After `normalize`, of row `row`, which threads choose each for itself: what it has come to, and
  // its log-sum-exp.
  CUTE_DEVICE float lse(int row) const { return reference_.lse(stats(row)); }
  CUTE_DEVICE RowStats stats(int row) const {
    RowStats result{limit_[0], sum_[0]};
    CUTE_UNROLL
    for (int r = 1; r < kRows; ++r) {
      result.limit = r == row ? limit_[r] : result.limit;
      result.sum = r == row ? sum_[r] : result.sum;
    }
    return result;
  }

 private:
  // The greatest score of row `row`, or a lesser one if all are negative, by its bits. Numbers of
  // which one at least is not negative are in the order of their bits, taken for integers; and of
  // three integers Hopper finds the greatest in one instruction.
  template <class Scores>
  static CUTE_DEVICE int greatest_bits(const Scores& scores, int row) {
    int greatest = std::bit_cast<int>(scores(row, 0));
    CUTE_UNROLL
    for (int c = 1; c < cute::size<1>(scores); ++c) {
      greatest = cute::max(greatest, std::bit_cast<int>(scores(row, c)));
    }
    return greatest;
  }

  // A score above its row's limit makes the reference rise; -inf before the first key.
  float limit_[kRows];
  float sum_[kRows];
  float rescale_[kRows];     // of the last raise
  const FwdParams& params_;  // read where needed: a constant-bank operand costs no register
  Reference<kAnyScale> reference_;
};

}  // namespace flash_cute
