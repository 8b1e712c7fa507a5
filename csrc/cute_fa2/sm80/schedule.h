// Which tile a thread block works on.
#pragma once

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
struct OneTilePerBlock {
  static int64_t grid_size(const FwdParams& params, const QueryRows& rows, int block_m) {
    return int64_t{m_blocks(params, rows, block_m)} * rows.heads() * params.batch;
  }

  static CUTE_DEVICE TileCoord tile(const FwdParams& params, const QueryRows& rows, int block_m,
                                    int block_index) {
    const int m_blocks = OneTilePerBlock::m_blocks(params, rows, block_m);
    const int head_and_batch = block_index / m_blocks;
    return {platform::same_in_warp(m_blocks - 1 - block_index % m_blocks),
            platform::same_in_warp(head_and_batch % rows.heads()),
            platform::same_in_warp(head_and_batch / rows.heads())};
  }

 private:
  static CUTE_HOST_DEVICE int m_blocks(const FwdParams& params, const QueryRows& rows,
                                       int block_m) {
    return (rows.count(params.len_q) + block_m - 1) / block_m;
  }
};

}  // namespace flash_cute::sm80
