// How the rows' statistics (BwdWorkspace::stats) lie in memory: two neighbouring rows side by side,
// first both log-sum-exps, then both deltas. A thread that has both rows loads either pair at once.
#pragma once

#include <cute/config.hpp>

#include "host/params.h"

namespace flash_cute {

struct alignas(16) TwoRowGradStats {
  float lse_log2[2];
  float delta[2];

  CUTE_DEVICE void set(int row, RowGradStats stats) {
    lse_log2[row & 1] = stats.lse_log2;
    delta[row & 1] = stats.delta;
  }
};
static_assert(sizeof(TwoRowGradStats) == 2 * sizeof(RowGradStats));

// From row 2 * i on is entry i. Blocks of rows have an even size, so each begins at one.
CUTE_DEVICE TwoRowGradStats* in_pairs(RowGradStats* stats) {
  return reinterpret_cast<TwoRowGradStats*>(stats);
}

// Those of a thread's rows, which lie an even number of rows behind its first. So one address gives
// all, with constants.
class StatsOfRows {
 public:
  CUTE_DEVICE StatsOfRows(const TwoRowGradStats* rows, int first)
      : first_(&rows[first >> 1].lse_log2[first & 1]) {}
  CUTE_DEVICE RowGradStats operator()(int even) const {
    return {first_[2 * even], first_[2 * even + 2]};
  }

 private:
  const float* first_;
};

CUTE_DEVICE RowGradStats stats_of_row(const TwoRowGradStats* rows, int row) {
  const TwoRowGradStats& two = rows[row >> 1];
  return {two.lse_log2[row & 1], two.delta[row & 1]};
}

}  // namespace flash_cute
