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

// Those of a thread's rows. Each lies an even number of rows behind the first, or the first is
// even. So one address gives all, with constants: a pair of rows is 4 floats, and a row's delta
// lies 2 behind its log-sum-exp.
class StatsOfRows {
 public:
  CUTE_DEVICE StatsOfRows(const TwoRowGradStats* rows, int first)
      : first_(&rows[first >> 1].lse_log2[first & 1]) {}
  // Of the row that lies so many behind the first.
  CUTE_DEVICE RowGradStats operator()(int behind) const {
    const float* const lse_log2 = first_ + behind / 2 * 4 + behind % 2;
    return {lse_log2[0], lse_log2[2]};
  }

 private:
  const float* first_;
};

CUTE_DEVICE RowGradStats stats_of_row(const TwoRowGradStats* rows, int row) {
  const TwoRowGradStats& two = rows[row >> 1];
  return {two.lse_log2[row & 1], two.delta[row & 1]};
}

}  // namespace flash_cute
