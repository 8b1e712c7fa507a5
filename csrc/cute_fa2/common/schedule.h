// Which tile a thread block works on.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

#include "common/platform.h"
#include "params.h"

namespace flash_cute {

struct TileCoord {
  int m_block;  // which block_m query rows
  int head;     // query head
  int batch;
};

// One block per tile on a one-dimensional grid (y and z end at 65,535). Consecutive blocks walk
// over the query rows of one head, so that its K and V stay in L2, and from the last rows to the
// first: under a causal mask the longest tiles start first and the short ones fill the gaps at the
// end.
struct OneTilePerBlock {
  static int64_t grid_size(const FwdParams& params, int block_m) {
    return static_cast<int64_t>((params.len_q + block_m - 1) / block_m) * params.heads_q *
           params.batch;
  }

  static CUTE_DEVICE TileCoord tile(const FwdParams& params, int block_m, int block_index) {
    const int m_blocks = (params.len_q + block_m - 1) / block_m;
    const int head_and_batch = block_index / m_blocks;
    return {platform::same_in_warp(m_blocks - 1 - block_index % m_blocks),
            platform::same_in_warp(head_and_batch % params.heads_q),
            platform::same_in_warp(head_and_batch / params.heads_q)};
  }
};

}  // namespace flash_cute
