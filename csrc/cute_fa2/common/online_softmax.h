// Softmax over a row of which one block of scores is there at a time (Milakov & Gimelshein 2018;
// Dao et al. 2022).
#pragma once

#include <bit>
#include <cute/tensor.hpp>
#include <limits>

#include "common/platform.h"
#include "common/sink.h"
#include "common/softmax_policy.h"
#include "host/params.h"

namespace flash_cute {

// How the threads that hold parts of a row agree: here the four lanes of a quad. `max` and `sum` go
// over a row's holders, each of which gets the result. `any`: whether the predicate is true for any
// thread that branches together with this one, here a warp. `sync` replaces it where there is
// nothing to ask (in CrossWarpAllreduce both are barriers).
struct QuadAllreduce {
  static CUTE_DEVICE bool any(bool predicate) { return platform::any_in_warp(predicate); }
  static CUTE_DEVICE void sync() {}

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

// The running statistics of kRows rows. The limit is that of the whole row; the sum is that of the
// thread's own columns until `normalize`.
//
// A block of scores takes four calls, and `bounds` or `subtrahends` before the last:
//   may_exceed     whether one of this thread's scores may exceed its row's limit. Can be asked
//                  before a mask, which only lowers scores.
//   update_limits  raises the limits that are exceeded, and subtracts those of exact rows. `start`
//                  is its short form for the first block of a tile.
//   rescale        multiplies `out`, the weighted sum of V so far, where limits have changed. Not
//                  needed while `out` is 0.
//   apply_exp2     replaces the scores that update_limits has had by their weights.
// `scores` and `out` are matrices of (rows, columns). Their rows are all kRows, or consecutive ones
// from kFirstRow on; the statistics of the others stay as they are.
template <int kRows_>
class OnlineSoftmax {
 public:
  static constexpr int kRows = kRows_;

  CUTE_DEVICE explicit OnlineSoftmax(const FwdParams& params) : params_(params), policy_(params) {
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

  // What follows from the limits. Where there are registers it is kept until they change.
  struct Bounds {
    int exceeding_bits[kRows];  // of the least score that may exceed the limit; see greatest_bits
    float subtrahend[kRows];
  };
  CUTE_DEVICE Bounds bounds() const {
    Bounds result;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      result.exceeding_bits[r] = policy_.needs_every_block(limit_[r])
                                     ? std::numeric_limits<int>::lowest()
                                     : std::bit_cast<int>(limit_[r]) + 1;
      result.subtrahend[r] = policy_.subtrahend(limit_[r]);
    }
    return result;
  }

  // The subtrahends alone, where registers are too short to keep them.
  struct Subtrahends {
    float subtrahend[kRows];
  };
  CUTE_DEVICE Subtrahends subtrahends() const {
    Subtrahends result;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) result.subtrahend[r] = policy_.subtrahend_in_loop(limit_[r]);
    return result;
  }

  template <int kFirstRow = 0, class Scores>
  CUTE_DEVICE bool may_exceed(const Scores& scores) const {
    bool result = false;
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(scores); ++r) {
      const float limit = limit_[kFirstRow + r];
      result |=
          greatest_bits(scores, r) > std::bit_cast<int>(limit) || policy_.needs_every_block(limit);
    }
    return result;
  }
  // The same, of all rows, by bounds that were kept.
  template <class Scores>
  CUTE_DEVICE bool may_exceed(const Scores& scores, const Bounds& bounds) const {
    static_assert(decltype(cute::size<0>(scores))::value == kRows);
    bool result = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) result |= greatest_bits(scores, r) >= bounds.exceeding_bits[r];
    return result;
  }

  // `is_first`: the first block of a tile, where all rows get a limit. False if it has changed
  // nothing, the same for all threads that vote together.
  template <int kFirstRow = 0, class Scores, class Allreduce = QuadAllreduce>
  CUTE_DEVICE bool update_limits(Scores& scores, bool may_exceed, bool is_first,
                                 const Allreduce& allreduce = {}) {
    // Each row decides for itself, so that its result does not depend on its neighbours. All vote
    // whether there is anything to do.
    if (is_first) {
      allreduce.sync();
    } else {
      if (!allreduce.any(may_exceed)) return false;
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
    // Again, by the scores themselves: where a limit is below 0, bits have not told.
    if (!is_first) {
      bool exceeds = false;
      CUTE_UNROLL
      for (int r = 0; r < kCount; ++r) {
        const float limit = limit_[kFirstRow + r];
        exceeds |= row_max[r] > limit || policy_.is_exact(limit);
      }
      if (!allreduce.any(exceeds)) return false;
    }
    allreduce.max(row_max);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int r = kFirstRow + i;
      const float limit = row_max[i] > limit_[r] ? policy_.limit_above(row_max[i]) : limit_[r];
      rescale_[r] = policy_.rescale(limit_[r], limit);
      limit_[r] = limit;
      sum_[r] *= rescale_[r];
    }
    subtract_limits<kFirstRow>(scores);
    return true;
  }

  // `update_limits` for a tile's first block: all limits are new, so there is no vote. A row is one
  // warp's.
  template <class Scores>
  CUTE_DEVICE void start(Scores& scores) {
    start();
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) limit_[r] = fmaxf(limit_[r], scores(r, c));
    }
    QuadAllreduce::max(limit_);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) limit_[r] = policy_.limit_above(limit_[r]);
    subtract_limits(scores);
  }

  template <int kFirstRow = 0, class Out>
  CUTE_DEVICE void rescale(Out& out) const {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(out); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= rescale_[kFirstRow + r];
    }
  }

  // Of some of the block's columns, or all.
  template <int kFirstRow = 0, class Scores, class Bounds>
  CUTE_DEVICE void apply_exp2(Scores& scores, const Bounds& bounds) {
    // Column by column: the product with V takes the weights of the first columns first.
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(scores); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < cute::size<0>(scores); ++r) {
        sum_[kFirstRow + r] += weigh(scores(r, c), bounds.subtrahend[kFirstRow + r]);
      }
    }
  }

  // The same, where a row's sum takes the sum of a block. Added one by one, small weights would be
  // rounded away beside a large sum.
  template <class Scores, class Bounds>
  CUTE_DEVICE void apply_exp2_in_stages(Scores& scores, const Bounds& bounds) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float sum = 0.f;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        sum += weigh(scores(r, c), bounds.subtrahend[r]);
      }
      sum_[r] += sum;
    }
  }

  // Keeps the exponentials before it ahead of what follows: ptxas moves nothing across a branch
  // that reads every sum. It does not know that no sum is below 0.
  CUTE_DEVICE void fence_exp2() const {
    float least = sum_[0];
    CUTE_UNROLL
    for (int r = 1; r < kRows; ++r) least = fminf(least, sum_[r]);
    platform::schedule_fence(platform::any_in_warp(least < 0.f) ? -1 : 0);
  }

  // Divides `out` by the rows' sums. A row without a key has a sum of 0 and gets out = 0.
  template <class Out, class Allreduce = QuadAllreduce>
  CUTE_DEVICE void normalize(Out& out, const Allreduce& allreduce = {}) {
    allreduce.sum(sum_);
    bool has_keyless = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float inverse = platform::reciprocal(sum_[r]);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= inverse;
      has_keyless |= sum_[r] == 0.f;  // fault: keyless-row
    }
    // 0 x (1 / 0) is NaN, and so is 0 x inf, which an infinity in V has left in `out`. Apart from
    // the loop, as rows without a key are rare.
    if (platform::any_in_warp(has_keyless)) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) = sum_[r] == 0.f ? 0.f : out(r, c);
      }
    }
  }

  // After `normalize`: gives the sink its share of each row. `head_of` is the query head of a row.
  template <class Out, class HeadOf>
  CUTE_DEVICE void join_sink(Out& out, const HeadOf& head_of) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Sink sink = {params_.sink[head_of(r)]};
      const float share = sink.share_of_keys(policy_.lse({limit_[r], sum_[r]}));
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= share;
    }
  }

  // After `normalize`: the log-sum-exp and the statistics of row `row`, which each thread chooses.
  // The former is with the sink of query head `head`, if there is one.
  template <bool kIsFp32 = false>
  CUTE_DEVICE float lse(int row, int head) const {
    const float of_keys = kIsFp32 ? policy_.lse_fp32(stats(row)) : policy_.lse(stats(row));
    return params_.sink ? Sink{params_.sink[head]}.join(of_keys) : of_keys;  // fault: sink-lse
  }
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
  // One fused multiply-add a score.
  CUTE_DEVICE float weigh(float& score, float subtrahend) const {
    return score = platform::exp2(score * params_.scale.scale_log2 - subtrahend);
  }

  // Subtracts the limits of exact rows from their scores.
  template <int kFirstRow = 0, class Scores>
  CUTE_DEVICE void subtract_limits(Scores& scores) const {
    bool has_exact = false;
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(scores); ++r) {
      has_exact |= policy_.is_exact(limit_[kFirstRow + r]);
    }
    if (!platform::any_in_warp(has_exact)) return;
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(scores); ++r) {
      const float limit = limit_[kFirstRow + r];
      const float offset = policy_.is_exact(limit) ? limit : 0.f;  // fault: exact-row
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) scores(r, c) -= offset;
    }
  }

  // The bits of the greatest score of row `row`, or of a lesser one if all are negative. Where one
  // at least is not negative, floats are in the order of their bits, taken for integers. Of three
  // integers Hopper finds the greatest in one instruction.
  template <class Scores>
  static CUTE_DEVICE int greatest_bits(const Scores& scores, int row) {
    int greatest = std::bit_cast<int>(scores(row, 0));
    CUTE_UNROLL
    for (int c = 1; c < cute::size<1>(scores); ++c) {
      greatest = cute::max(greatest, std::bit_cast<int>(scores(row, c)));  // fault: limit
    }
    return greatest;
  }

  float limit_[kRows];  // -inf before the first key
  float sum_[kRows];
  float rescale_[kRows];     // of the last change of limits
  const FwdParams& params_;  // read where needed: a constant-bank operand costs no register
  SoftmaxPolicy policy_;
};

}  // namespace flash_cute
