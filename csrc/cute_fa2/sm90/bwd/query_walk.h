// The walk of a tile of keys over the query rows that see them: in each query head of its group,
// from the last block to the first. The producer makes it, the others
// read it from the queue of tiles.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/mask.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute::sm90 {

// Query rows of one head.
struct QueryBlock {
  int head;
  int m_block;
};

class QueryWalk {
 public:
  template <class TileMask>
  CUTE_DEVICE QueryWalk(const BwdArguments& arguments, TileCoord tile, const TileMask& mask,
                        const Sequence& sequence, int block_m, int block_n)
      : first_head_(tile.head * arguments.params.group_size +
                    tile.split * arguments.heads_of_split),
        end_head_(cute::min(first_head_ + arguments.heads_of_split,
                            (tile.head + 1) * arguments.params.group_size)) {
    const int key0 = tile.m_block * block_n;
    const int key_end = cute::min(key0 + block_n, sequence.len_k);
    if (arguments.dq_by == DqBy::kTile) {  // dQ is stored everywhere
      rows_ = {0, arguments.params.m_blocks};
      return;
    }
    rows_ = mask.visible_row_blocks(key0, key_end, sequence.len_q, block_m);
    if (is_empty()) return;
    // The last block may see none of the keys. DqAdder counts on it that it is not visited then.
    const int row0 = (rows_.end - 1) * block_m;
    const int row_end = cute::min(row0 + block_m, sequence.len_q);
    if (mask.begin(row0) >= key_end || mask.end(row_end - 1) <= key0) --rows_.end;
  }

  CUTE_DEVICE bool is_empty() const { return rows_.end <= rows_.begin; }
  CUTE_DEVICE QueryBlock first() const { return {first_head_, rows_.end - 1}; }
  CUTE_DEVICE bool has(QueryBlock block) const { return block.head < end_head_; }
  CUTE_DEVICE QueryBlock next(QueryBlock block) const {
    if (block.m_block > rows_.begin) return {block.head, block.m_block - 1};
    return {block.head + 1, rows_.end - 1};
  }

 private:
  int first_head_, end_head_;
  BlockRange rows_;
};

// The blocks of rows of a sequence, among all: those of a head lie params.m_blocks apart. They are
// numbered as their statistics and their sums of dQ lie in memory. The preprocess has a CTA for each
// of them, so the numbers fit.
template <MaskKind kMask>
CUTE_DEVICE int first_index_of(const BwdParams& params, int batch) {
  return kMask == MaskKind::kPacked
             ? Sequence::first_block(params.sequences.cu_seqlens_q, params.len_q, batch,
                                     BwdConfigSm90::kBlockM)
             : batch * params.heads_q * params.m_blocks;
}
CUTE_DEVICE int index_of(const BwdParams& params, int first_index, QueryBlock block) {
  return first_index + block.head * params.m_blocks + block.m_block;
}

}  // namespace flash_cute::sm90
