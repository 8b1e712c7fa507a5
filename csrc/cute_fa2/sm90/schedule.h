// Which tiles a thread block works on, one after the other. There is one block for each
// multiprocessor, and the tiles are dealt out in advance.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>
#include <cute/config.hpp>

#include "common/mask.h"
#include "common/sequence.h"
#include "common/tile.h"
#include "config.h"
#include "params.h"

namespace flash_cute::sm90 {

// Tiles are numbered section by section, a section being some (batch, head) pairs whose K and V
// stay in L2 together; within a section from the query rows that see most keys to those that see
// fewest, so that the long tiles come before the short ones: under a causal mask from the last rows
// to the first. The last tile of a head, which may lack rows, then stands where its work puts it.
//
// Tiles are dealt out in rounds, of which every other runs backwards over the blocks: who had the
// longer tile has the shorter one next. Each section of some length begins anew and with another
// block, so that its last round, in which there is not a tile for everybody, favours others.
class Schedule {
 public:
  static Schedule make(const FwdParams& params, const QueryRows& query_rows, MaskKind mask,
                       int block_m, int multiprocessors) {
    constexpr int64_t kSectionBytes = 32 << 20;  // of 50 MB L2
    const int row_count = query_rows.count(params.len_q);
    const int m_blocks = (row_count - 1) / block_m + 1;
    const int heads = query_rows.heads() * params.batch;

    // Of a tile if it had `tile_rows`: rows by keys.
    const Mask<MaskKind::kBanded> band(params, Sequence(params), query_rows);
    const auto work = [&](int m_block, int64_t tile_rows) {
      const int row0 = m_block * block_m, row_end = std::min(row0 + block_m, row_count);
      return tile_rows * (mask == MaskKind::kFull
                              ? params.len_k
                              : std::max(0, band.end(row_end - 1) - band.begin(row0)));
    };
    const bool from_first = m_blocks > 1 && work(0, block_m) > work(m_blocks - 2, block_m);
    // A consumer with few rows works as long as one with all of its own; one without any waits for
    // the others, who alone take more than half of a whole tile's time.
    constexpr int kRows = FwdSm90Config::kConsumerRows;
    const int rows_left = (row_count - (m_blocks - 1) * block_m + kRows - 1) / kRows * kRows;
    const int last_rows = std::max(rows_left, block_m * 3 / 5);
    const int64_t last_work = work(m_blocks - 1, last_rows);
    int before_last = 0;
    while (before_last < m_blocks - 1 && work(m_blocks - 2 - before_last, block_m) > last_work) {
      ++before_last;
    }

    // Equal tiles need no order but that of memory.
    const bool equal = mask == MaskKind::kFull && last_rows == block_m;
    // As few sections as may be, of as many K and V heads each, but for the last.
    const int kv_heads = heads / query_rows.heads_per_kv_head();
    const int64_t head_bytes = std::max<int64_t>(1, int64_t{4} * params.len_k * params.head_dim);
    const int in_l2 =
        static_cast<int>(std::clamp<int64_t>(kSectionBytes / head_bytes, 1, kv_heads));
    const int sections = (kv_heads - 1) / in_l2 + 1;
    const int section =
        equal ? 1 : ((kv_heads - 1) / sections + 1) * query_rows.heads_per_kv_head();
    // A section of much less than two rounds, dealt out anew, would leave blocks without a tile.
    const int64_t section_tiles = int64_t{section} * m_blocks;
    const bool anew = !equal && 3 * section_tiles >= 4 * int64_t{multiprocessors};
    Schedule s;
    s.tiles_ = m_blocks * heads;
    s.blocks_ = std::min(s.tiles_, multiprocessors);
    s.dealt_together_ = anew ? section * m_blocks : s.tiles_;
    s.m_blocks_ = m_blocks;
    s.from_first_ = from_first;
    s.before_last_ = before_last;
    s.full_sections_ = heads / section;
    s.section_tiles_ = cutlass::FastDivmod(section * m_blocks);
    s.section_ = cutlass::FastDivmod(section);
    s.last_section_ = cutlass::FastDivmod(std::max(1, heads % section));
    s.heads_ = cutlass::FastDivmod(query_rows.heads());
    return s;
  }

  int blocks() const { return blocks_; }

  // A block's tiles, one after the other.
  class Tiles {
   public:
    CUTE_DEVICE explicit Tiles(int block) : place_(block) {}

    // The index of the next tile; past the last, one that the schedule has not.
    CUTE_DEVICE int next(const Schedule& schedule) {
      const unsigned tiles = schedule.tiles_, blocks = schedule.blocks_;
      const unsigned section_tiles = schedule.dealt_together_;
      while (first_ < tiles) {
        const unsigned in_section = dealt_ + (is_backward_ ? blocks - 1 - place_ : place_);
        const unsigned index = first_ + in_section;
        const bool exists = in_section < section_tiles && index < tiles;
        dealt_ += blocks;
        is_backward_ = !is_backward_;
        if (dealt_ >= section_tiles) {
          first_ += section_tiles;
          dealt_ = 0;
          is_backward_ = false;
          place_ += blocks * 5 / 8;  // about the golden section, whose multiples spread widely
          if (place_ >= blocks) place_ -= blocks;
        }
        if (exists) return static_cast<int>(index);
      }
      return schedule.tiles_;
    }

   private:
    unsigned place_;      // of the block among the blocks, in this section
    unsigned first_ = 0;  // tile of the section; past the last it may pass 2^31
    unsigned dealt_ = 0;  // tiles of the section, in the rounds before
    bool is_backward_ = false;
  };

  CUTE_DEVICE bool has(int index) const {
    return static_cast<unsigned>(index) < static_cast<unsigned>(tiles_);
  }

  CUTE_DEVICE TileCoord tile(int index) const {
    int section, in_section, m, head_in_section, batch, head;
    section_tiles_(section, in_section, index);
    (section < full_sections_ ? section_ : last_section_)(m, head_in_section, in_section);
    heads_(batch, head, section * section_.divisor + head_in_section);
    const int m_block = from_first_         ? m
                        : m == before_last_ ? m_blocks_ - 1
                                            : m_blocks_ - 1 - m - (m < before_last_);
    return {m_block, head, batch};
  }

 private:
  int tiles_;
  int blocks_;
  int dealt_together_;  // tiles: those of a section, or all
  int m_blocks_;
  bool from_first_;  // tiles are numbered from the first rows on, or else:
  int before_last_;  // tiles of a head that come before its last
  int full_sections_;
  cutlass::FastDivmod section_tiles_;
  cutlass::FastDivmod section_;       // heads of a section
  cutlass::FastDivmod last_section_;  // heads of the last, where it is not whole
  cutlass::FastDivmod heads_;
};

}  // namespace flash_cute::sm90
