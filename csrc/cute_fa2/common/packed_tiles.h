// The tiles of sequences of their own lengths: each block of a list in each head (BlockList).
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>

#include "common/tile_decoder.h"
#include "host/params.h"

namespace flash_cute {

class PackedTiles {
 public:
  PackedTiles() = default;
  PackedTiles(const BlockList& list, int heads) : list_(list), heads_(heads) {}

  CUTE_DEVICE int count() const { return *list_.count * heads_.divisor; }
  CUTE_DEVICE TileCoord tile(int index) const {
    int number, head;
    heads_(number, head, index);
    const SequenceBlock block = list_.sorted[number];
    return {block.block, head, block.batch, 0};
  }

 private:
  BlockList list_{};
  cutlass::FastDivmod heads_{1};
};

}  // namespace flash_cute
