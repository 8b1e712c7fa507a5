// The tiles of sequences of their own lengths: each block of a list in each head (BlockList).
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>

#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"

namespace flash_cute {

class PackedTiles {
 public:
  PackedTiles() = default;
  PackedTiles(const BlockList& list, int heads) : list_(list), heads_(heads) {}

  CUTE_DEVICE int count() const { return *list_.count * heads_.divisor; }
  CUTE_DEVICE TileCoord tile(int index) const {
    int head;
    const SequenceTile& tile = entry(index, head);
    return coord(tile, head);
  }
  CUTE_DEVICE Sequence sequence(int index) const {
    int head;
    return sequence(entry(index, head));
  }

  // The entry of tile `index`, which is of head `head`.
  CUTE_DEVICE const SequenceTile& entry(int index, int& head) const {
    int number;
    heads_(number, head, index);
    return list_.sorted[number];
  }
  static CUTE_DEVICE TileCoord coord(const SequenceTile& entry, int head) {
    return {entry.block, head, entry.batch, 0};
  }
  static CUTE_DEVICE Sequence sequence(const SequenceTile& entry) {
    return {entry.len_q, entry.len_k, entry.first_q, entry.first_k, 0, entry.len_k};
  }

 private:
  BlockList list_{};
  cutlass::FastDivmod heads_{1};
};

}  // namespace flash_cute
