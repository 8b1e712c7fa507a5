// In which order the tiles of a call are taken.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>
#include <cute/config.hpp>

#include "common/mask.h"
#include "common/sequence.h"
#include "common/tile.h"
#include "params.h"

namespace flash_cute {

// Tiles are numbered section by section, a section being some (batch, head) pairs, of each part of
// the keys if these are split, whose K and V stay in L2 together; within a section along the query
// rows, from the end where tiles are longer, so that the short ones come last: under a causal mask
// from the last rows to the first. (A window's may be short at both ends; then some come early.)
// The last tile of a head, which may lack rows, stands where its work puts it. The first section
// may have fewer heads than the others, whose many short tiles fill the gaps at the end.
class TileOrder {
 public:
  // `section` counts heads of K and V, with which come the query heads that share them. The last
  // tile of a head works as long as one of `last_rows` rows.
  static TileOrder make(const FwdParams& params, const PackGqa& pack_gqa, MaskKind mask,
                        int block_m, int last_rows, int section) {
    const int row_count = pack_gqa.count(params.len_q);
    const int m_blocks = pack_gqa.m_blocks(params.len_q, block_m);
    const int heads = pack_gqa.heads() * params.batch * params.splits.count;
    section *= pack_gqa.group_size();

    // Of a tile if it had `tile_rows`: rows by keys.
    const Mask<MaskKind::kBanded> band(params, Sequence(params), pack_gqa);
    const auto work = [&](int m_block, int64_t tile_rows) {
      const int row0 = m_block * block_m, row_end = std::min(row0 + block_m, row_count);
      return tile_rows * (mask == MaskKind::kFull
                              ? params.len_k
                              : std::max(0, band.end(row_end - 1) - band.begin(row0)));
    };
    const int64_t last_work = work(m_blocks - 1, last_rows);
    int before_last = 0;
    while (before_last < m_blocks - 1 && work(m_blocks - 2 - before_last, block_m) > last_work) {
      ++before_last;
    }

    TileOrder order;
    order.tiles_ = m_blocks * heads;
    order.m_blocks_ = m_blocks;
    order.from_first_ = m_blocks > 1 && work(0, block_m) > work(m_blocks - 2, block_m);
    order.before_last_ = before_last;
    order.first_section_ = cutlass::FastDivmod((heads - 1) % section + 1);
    order.section_ = cutlass::FastDivmod(section);
    order.section_tiles_ = cutlass::FastDivmod(section * m_blocks);
    order.heads_ = cutlass::FastDivmod(pack_gqa.heads());
    order.batch_ = cutlass::FastDivmod(params.batch);
    return order;
  }

  // How many heads of K and V have so many bytes of L2; at least one.
  static int kv_heads_within(int64_t bytes, const FwdParams& params) {
    const int kv_heads = params.heads_kv() * params.batch;
    const int64_t head_bytes = std::max<int64_t>(1, int64_t{4} * params.len_k * params.head_dim);
    return static_cast<int>(std::clamp<int64_t>(bytes / head_bytes, 1, kv_heads));
  }

  CUTE_HOST_DEVICE int tiles() const { return tiles_; }
  // By the number of sequences.
  CUTE_HOST_DEVICE const cutlass::FastDivmod& per_batch() const { return batch_; }
  CUTE_HOST_DEVICE int section_tiles() const { return section_tiles_.divisor; }
  CUTE_HOST_DEVICE int first_section_tiles() const { return first_section_.divisor * m_blocks_; }

  CUTE_DEVICE TileCoord tile(int index) const {
    const int after_first = index - first_section_tiles();
    const bool is_first = after_first < 0;
    int section, in_section, m, head_in_section, batch_of_split, head, split, batch;
    section_tiles_(section, in_section, is_first ? 0 : after_first);
    if (is_first) in_section = index;
    const int head0 = is_first ? 0 : first_section_.divisor + section * section_.divisor;
    (is_first ? first_section_ : section_)(m, head_in_section, in_section);
    heads_(batch_of_split, head, head0 + head_in_section);
    batch_(split, batch, batch_of_split);
    const int m_block = from_first_         ? m
                        : m == before_last_ ? m_blocks_ - 1
                                            : m_blocks_ - 1 - m - (m < before_last_);
    return {m_block, head, batch, split};
  }

 private:
  int tiles_;
  int m_blocks_;
  bool from_first_;                    // tiles are numbered from the first rows on, or else:
  int before_last_;                    // tiles of a head that come before its last
  cutlass::FastDivmod first_section_;  // heads of the first section, and of the others
  cutlass::FastDivmod section_;
  cutlass::FastDivmod section_tiles_;
  cutlass::FastDivmod heads_;
  cutlass::FastDivmod batch_;
};

}  // namespace flash_cute
