// Which tile a thread block works on.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>
#include <cute/config.hpp>

#include "common/platform.h"
#include "common/tile.h"
#include "params.h"

namespace flash_cute::sm80 {

// One block per tile on a one-dimensional grid (y and z end at 65,535). Consecutive blocks walk
// over the rows of one head, so that its K and V stay in L2, and from the last rows to the
// first: under a causal mask the longest tiles start first and the short ones fill the gaps at the
// end.
class Schedule {
 public:
  static Schedule make(const FwdParams& params, const QueryRows& query_rows, int block_m) {
    const int m_blocks = (query_rows.count(params.len_q) + block_m - 1) / block_m;
    Schedule s;
    s.blocks_ = int64_t{m_blocks} * query_rows.heads() * params.batch;
    s.m_blocks_ = cutlass::FastDivmod(m_blocks);
    s.heads_ = cutlass::FastDivmod(query_rows.heads());
    return s;
  }

  int64_t blocks() const { return blocks_; }

  CUTE_DEVICE TileCoord tile(int block_index) const {
    int head_and_batch, m, batch, head;
    m_blocks_(head_and_batch, m, block_index);
    heads_(batch, head, head_and_batch);
    return {platform::same_in_warp(m_blocks_.divisor - 1 - m), platform::same_in_warp(head),
            platform::same_in_warp(batch)};
  }

 private:
  int64_t blocks_;
  cutlass::FastDivmod m_blocks_;
  cutlass::FastDivmod heads_;
};

}  // namespace flash_cute::sm80
