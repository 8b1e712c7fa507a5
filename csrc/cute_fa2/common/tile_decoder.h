// From the number of a tile to its coordinates, in the order of the plan (TileOrder).
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>

#include "host/tile_schedule.h"

namespace flash_cute {

// A tile's coordinates: `m_block` counts tiles of block_m rows, `head` tile heads (GqaLayout). In
// the backward `m_block` counts tiles of block_n keys, `head` heads of K and V, `split` head
// splits.
struct TileCoord {
  int m_block;
  int head;
  int batch;
  int split;
};

class TileDecoder {
 public:
  // `heads` of a sequence, as tiles count them.
  TileDecoder(const TileOrder& order, int heads, int batch)
      : order_(order),
        first_head_group_(order.first_head_group),
        head_group_(order.head_group),
        head_group_tiles_(order.head_group * order.m_blocks),
        heads_(heads),
        batch_(batch) {}

  CUTE_HOST_DEVICE const cutlass::FastDivmod& per_batch() const { return batch_; }
  CUTE_HOST_DEVICE int head_group_tiles() const { return head_group_tiles_.divisor; }
  CUTE_HOST_DEVICE int first_head_group_tiles() const {
    return first_head_group_.divisor * order_.m_blocks;
  }

  CUTE_DEVICE TileCoord tile(int index) const {
    const int after_first = index - first_head_group_tiles();
    const bool is_first = after_first < 0;
    int group, in_group, m, head_in_group, batch_of_split, head, split, batch;
    head_group_tiles_(group, in_group, is_first ? 0 : after_first);
    if (is_first) in_group = index;  // fault: tile-twice
    const int head0 = is_first ? 0 : first_head_group_.divisor + group * head_group_.divisor;
    (is_first ? first_head_group_ : head_group_)(m, head_in_group, in_group);
    heads_(batch_of_split, head, head0 + head_in_group);
    batch_(split, batch, batch_of_split);
    const int last = order_.m_blocks - 1;
    const int m_block = order_.ascending          ? m
                        : m == order_.before_last ? last
                                                  : last - m - (m < order_.before_last);
    return {m_block, head, batch, split};
  }

 private:
  TileOrder order_;
  cutlass::FastDivmod first_head_group_;  // heads of the first head group, and of the others
  cutlass::FastDivmod head_group_;
  cutlass::FastDivmod head_group_tiles_;
  cutlass::FastDivmod heads_;
  cutlass::FastDivmod batch_;
};

}  // namespace flash_cute
