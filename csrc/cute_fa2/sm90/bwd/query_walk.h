// The walk of a tile of keys over the query rows that see them: in each query head of its group,
// from the last block to the first, or from one of the tile's own. The producer makes it, the
// others read it from the queue of tiles.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/mask.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"

namespace flash_cute::sm90 {

// Query rows of one head.
struct QueryBlock {
  int head;
  int m_block;
};

class QueryWalk {
 public:
  // `rows`: the blocks that see keys of the tile. DqAdder counts on it that each of them does.
  CUTE_DEVICE QueryWalk(const BwdArguments& arguments, TileCoord tile, BlockRange rows)
      : first_head_(tile.head * arguments.params.group_size +
                    tile.split * arguments.heads_of_split),
        end_head_(cute::min(first_head_ + arguments.heads_of_split,
                            (tile.head + 1) * arguments.params.group_size)),
        rows_(rows) {
    // dQ is stored everywhere.
    if (arguments.dq_by == DqBy::kTile) rows_ = {0, arguments.params.m_blocks};
  }

  CUTE_DEVICE bool is_empty() const { return rows_.end <= rows_.begin; }
  CUTE_DEVICE QueryBlock first() const { return {first_head_, rows_.end - 1}; }
  CUTE_DEVICE bool has(QueryBlock block) const { return block.head < end_head_; }
  CUTE_DEVICE QueryBlock next(QueryBlock block) const {
    if (block.m_block > rows_.begin) return {block.head, block.m_block - 1};
    return {block.head + 1, rows_.end - 1};
  }

 protected:
  int first_head_, end_head_;
  BlockRange rows_;
};

// The same blocks from another one on: down to the first, and then from the last one down to where
// it began. Each tile of a head begins kBlocksOfKeys ahead of the one before. So fewer add to the
// sums of one block of dQ at a time.
template <int kBlocksOfKeys>
class StaggeredWalk : public QueryWalk {
 public:
  CUTE_DEVICE StaggeredWalk(const BwdArguments& arguments, TileCoord tile, BlockRange rows)
      : QueryWalk(arguments, tile, rows) {
    // Among a sequence's first rows, under a mask, all begin at their last block: that is faster.
    // Modulo a power of two, as a division would take long.
    const bool is_short = rows_.begin > 0 && rows_.end <= kShort;
    const unsigned ahead = is_short ? 0 : tile.m_block * kBlocksOfKeys;
    const unsigned count = cute::max(1, rows_.end - rows_.begin);
    begin_ = rows_.end - 1 - static_cast<int>(ahead & (cute::bit_floor(count) - 1));
  }

  CUTE_DEVICE QueryBlock first() const { return {first_head_, begin_}; }
  CUTE_DEVICE QueryBlock next(QueryBlock block) const {
    const int m_block = block.m_block > rows_.begin ? block.m_block - 1 : rows_.end - 1;
    return {m_block == begin_ ? block.head + 1 : block.head, m_block};  // fault: bwd90-walk
  }

 private:
  static constexpr int kShort = 32;  // blocks of rows (notes/sm90_backward.md)
  int begin_;
};

// A block's index (BwdArguments::PlacedTile::first_index).
CUTE_DEVICE int index_of(const BwdParams& params, int first_index, QueryBlock block) {
  return first_index + block.head * params.m_blocks + block.m_block;
}

}  // namespace flash_cute::sm90
