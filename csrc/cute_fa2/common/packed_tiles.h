// The tiles of sequences of their own lengths: each block of a list in each head (BlockList). They
// go through all blocks in as many heads side by side as L2 has room for (`packed_head_group`).
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>

#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"

namespace flash_cute {

class PackedTiles {
 public:
  PackedTiles() = default;
  // `head_group` divides `heads`.
  PackedTiles(const BlockList& list, int heads, int head_group)
      : list_(list), heads_(heads), head_group_(head_group) {}

  CUTE_DEVICE int count() const { return *list_.count * heads_; }
  // For CTAs that take tiles in turn: 0, 1, 2 ...
  CUTE_DEVICE int take() const { return platform::next_number(list_.taken); }

  // Asks for the entry of a CTA's first tile ahead of `count`: one trip to memory less. It is most
  // likely one of the first group of heads.
  CUTE_DEVICE void prefetch(int index) const {
    const auto* const entry = list_.sorted + cute::min(head_group_.div(index), list_.bound - 1);
    platform::prefetch(entry);
    platform::prefetch(&entry->key_end);  // it lies in two sectors
  }
  // The entry of tile `index`, which is of head `head`.
  CUTE_DEVICE const SequenceTile& entry(int index, int& head) const {
    const int of_group = *list_.count * head_group_.divisor;
    int head0 = 0;
    for (; index >= of_group; index -= of_group) head0 += head_group_.divisor;  // few groups
    int number, in_group;
    head_group_(number, in_group, index);
    head = head0 + in_group;
    return list_.sorted[number];
  }
  // For kernels without split-KV:
  CUTE_DEVICE TileCoord tile(int index) const {
    int head;
    const SequenceTile& tile = entry(index, head);
    return coord(tile, head);
  }
  CUTE_DEVICE Sequence sequence(int index) const {
    int head;
    return sequence(entry(index, head));
  }
  static CUTE_DEVICE TileCoord coord(const SequenceTile& entry, int head) {
    return {entry.block, head, entry.batch, 0};
  }
  static CUTE_DEVICE Sequence sequence(const SequenceTile& entry) {
    return {entry.len_q, entry.len_k, entry.first_q, entry.first_k, 0, entry.len_k};
  }
  // With it:
  CUTE_DEVICE TileCoord split_tile(int index) const {
    int head;
    const SequenceTile& tile = entry(index, head);
    return {tile.block, head, tile.batch, tile.split};
  }
  CUTE_DEVICE Sequence split_sequence(int index) const {
    int head;
    const SequenceTile& tile = entry(index, head);
    return {tile.len_q, tile.len_k, tile.first_q, tile.first_k, tile.key_begin, tile.key_end};
  }

 protected:
  BlockList list_{};
  int heads_ = 1;
  cutlass::FastDivmod head_group_{1};
};

// The same, but the last group of heads may be larger. `head_group` divides the heads ahead of it.
// (sm80's kernels lack the registers for this.)
class PackedTilesToEnd : private PackedTiles {
 public:
  using PackedTiles::count;

  PackedTilesToEnd() = default;
  PackedTilesToEnd(const BlockList& list, int heads, int head_group, int last_head_group)
      : PackedTiles(list, heads, head_group), last_head_group_(last_head_group) {}
  CUTE_DEVICE const SequenceTile& entry(int index, int& head) const {
    const int of_group = *list_.count * head_group_.divisor;
    const int last = heads_ - last_head_group_.divisor;
    int head0 = 0;
    while (head0 < last && index >= of_group) {  // few groups
      head0 += head_group_.divisor;
      index -= of_group;
    }
    int number, in_group;
    (head0 < last ? head_group_ : last_head_group_)(number, in_group, index);
    head = head0 + in_group;
    return list_.sorted[number];
  }

 private:
  cutlass::FastDivmod last_head_group_{1};
};

}  // namespace flash_cute
