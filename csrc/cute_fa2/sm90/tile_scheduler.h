// Which tiles a thread block works on, one after the other. There is one block for each
// multiprocessor, and the tiles are dealt out in advance.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>
#include <numeric>

#include "common/tile.h"
#include "common/tile_order.h"
#include "config.h"
#include "params.h"

namespace flash_cute::sm90 {

// What a thread block works on at a time: a tile of the order, or some consumers' rows of one.
struct WorkTile {
  int row0, row_end;  // its query rows; more consumers than that have rows have nothing to do
  int head;           // query head, or group of them (PackGqa)
  int batch;  // of keys in parts (SplitKV), where results stand: part * params.batch + batch
};

// Tiles are dealt out in rounds, of which every other runs backwards over the blocks: who had the
// longer tile has the shorter one next. Sections of tiles that differ much begin anew, in pairs:
// the second begins backwards, so that of as many rounds its last, in which there is not a tile for
// everybody, is for those whom the first one's spared; and the next pair with another block.
//
// Tiles of which there are too few for all blocks are dealt out in parts (TailSplit).
class TileScheduler {
 public:
  static TileScheduler make(const FwdParams& params, const PackGqa& pack_gqa, MaskKind mask,
                            int block_m, int multiprocessors, int l2_bytes) {
    const int m_blocks = pack_gqa.m_blocks(params.len_q, block_m);
    // A consumer with few rows works as long as one with all of its own; one without any waits for
    // the others, who alone take more than half of a whole tile's time.
    constexpr int kRows = FwdConfigSm90::kConsumerRows;
    const int last_rows = pack_gqa.count(params.len_q) - (m_blocks - 1) * block_m;
    const int worth = std::max((last_rows + kRows - 1) / kRows * kRows, block_m * 3 / 5);

    // Equal tiles need no order but that of memory, and those of keys in parts are about equal.
    // Others are dealt out anew for each section where they differ much, by a mask or in a short
    // head's last one, unless a section has less than 5/4 rounds: that would leave blocks without a
    // tile.
    const bool splits = params.splits.count > 1;
    const bool equal = splits || (mask == MaskKind::kFull && worth == block_m);
    const int64_t places = multiprocessors;
    const int64_t kv_head_tiles = int64_t{pack_gqa.group_size()} * m_blocks;
    const auto anew = [&](int section) {
      return !equal && (mask != MaskKind::kFull || m_blocks <= 6) &&
             4 * (section * kv_head_tiles) >= 5 * places;
    };
    // As few sections as L2 allows, of as many heads each, but for the first. Or, if so many heads,
    // give or take a tenth, fill whole rounds, and enough for the first section are left, of these.
    const int kv_heads = params.heads_kv() * params.batch;
    const int fill_rounds = static_cast<int>(places / std::gcd(kv_head_tiles, places));
    const auto heads_of_section = [&](int thirds_of_l2) {
      const int most = TileOrder::kv_heads_within(l2_bytes / 3 * thirds_of_l2, params);
      const int sections = (kv_heads - 1) / most + 1;
      const int section = (kv_heads - 1) / sections + 1;
      const int filling = (section + fill_rounds / 2) / fill_rounds * fill_rounds;
      const bool fills = sections > 1 && filling > 0 &&
                         10 * std::abs(filling - section) <= section &&
                         anew((kv_heads - 1) % filling + 1);
      return fills ? filling : section;
    };
    // Of short sequences K and V are read from memory about as fast as they are used: smaller
    // sections keep reads and work mixed, best of all those of one head.
    const bool few_keys = mask != MaskKind::kFull && params.len_k < 1024;
    const bool by_heads =
        equal || (few_keys && worth == block_m &&
                  even_by_heads(params, kv_head_tiles, kv_heads * kv_head_tiles, places));
    const bool small = few_keys && anew(heads_of_section(1));
    const int section = by_heads ? 1 : heads_of_section(small ? 1 : 2);

    const int64_t tiles = kv_heads * kv_head_tiles * params.splits.count;
    const bool is_triangle = mask == MaskKind::kBanded && params.is_triangle();
    const TailSplit dealt = anew(section) || splits
                                ? TailSplit{tiles, 0, 1, block_m}
                                : TailSplit::make(block_m, mask, is_triangle, tiles, places);
    const bool all_cut = dealt.whole == 0 && dealt.parts > 1;  // of parts none lacks consumers

    TileScheduler s;
    s.order_ = TileOrder::make(params, pack_gqa, mask, block_m, all_cut ? block_m : worth, section);
    s.block_m_ = block_m;
    s.whole_ = static_cast<int>(dealt.whole);
    s.parts_ = cutlass::FastDivmod(dealt.parts);
    s.part_rows_ = dealt.part_rows;
    s.count_ = static_cast<int>(dealt.whole + dealt.cut * dealt.parts);
    s.blocks_ = std::min(s.count_, multiprocessors);
    s.first_dealt_ = anew(section) ? s.order_.first_section_tiles() : s.count_;
    s.dealt_together_ = anew(section) ? s.order_.section_tiles() : s.count_;
    return s;
  }

  int blocks() const { return blocks_; }

  // A block's tiles, one after the other.
  class Tiles {
   public:
    CUTE_DEVICE explicit Tiles(int block) : place_(block) {}

    // The index of the next tile; past the last, one that the scheduler has not.
    CUTE_DEVICE int next(const TileScheduler& scheduler) {
      const unsigned tiles = scheduler.count_, blocks = scheduler.blocks_;
      while (first_ < tiles) {
        const unsigned section_tiles =
            first_ == 0 ? scheduler.first_dealt_ : scheduler.dealt_together_;
        const unsigned in_section = dealt_ + (is_backward_ ? blocks - 1 - place_ : place_);
        const unsigned index = first_ + in_section;
        const bool exists = in_section < section_tiles && index < tiles;
        dealt_ += blocks;
        is_backward_ = !is_backward_;
        if (dealt_ >= section_tiles) {
          first_ += section_tiles;
          dealt_ = 0;
          is_backward_ = ++section_ % 2 != 0;
          if (!is_backward_) {  // 1/2, 1/4, 3/4, 1/2, 0, ... of the blocks from where it began
            place_ += section_ % 4 != 0 ? blocks / 2 : blocks * 3 / 4;
            if (place_ >= blocks) place_ -= blocks;
          }
        }
        if (exists) return static_cast<int>(index);
      }
      return scheduler.count_;
    }

   private:
    unsigned place_;        // of the block among the blocks, in this section
    unsigned first_ = 0;    // tile of the section; past the last it may pass 2^31
    unsigned dealt_ = 0;    // tiles of the section, in the rounds before
    unsigned section_ = 0;  // how many were dealt out before this one
    bool is_backward_ = false;
  };

  CUTE_DEVICE bool has(int index) const {
    return static_cast<unsigned>(index) < static_cast<unsigned>(count_);
  }

  // Which part of the keys a tile has, and of which sequence.
  CUTE_DEVICE int split(WorkTile tile) const { return order_.per_batch().div(tile.batch); }
  CUTE_DEVICE int sequence(WorkTile tile) const { return order_.per_batch().rem(tile.batch); }

  // Of heads with so many rows. A part of a tile that lacks rows may have none.
  CUTE_DEVICE WorkTile tile(int index, int row_count) const {
    const bool is_part = index >= whole_;
    int cut, part;
    parts_(cut, part, is_part ? index - whole_ : 0);
    const TileCoord tile = order_.tile(is_part ? whole_ + cut : index);
    int row0 = tile.m_block * block_m_, row_end = row0 + block_m_;
    if (is_part) {
      row0 += part * part_rows_;
      row_end = cute::min(row_end, row0 + part_rows_);
    }
    const int batch = tile.split * order_.per_batch().divisor + tile.batch;
    return {row0, cute::min(row_end, row_count), tile.head, batch};
  }

 private:
  // Whether blocks get equal work from one head of K and V after the other, under a mask: if two
  // rounds hold whole heads, then who has the i-th tile of a head has the i-th from the end of
  // another next, and of whole tiles, if each row sees one key more than the row before, all such
  // pairs are equal. What the last two rounds lack is to be little of all.
  static bool even_by_heads(const FwdParams& params, int64_t kv_head_tiles, int64_t tiles,
                            int64_t places) {
    const bool rows_grow_evenly = !params.is_window() && params.band_end >= 0 &&
                                  params.len_q - 1 + params.band_end <= params.len_k;
    const int64_t two_rounds = 2 * places;
    const int64_t in_whole_rounds = (tiles + two_rounds - 1) / two_rounds * two_rounds;
    return rows_grow_evenly && two_rounds % kv_head_tiles == 0 &&
           100 * in_whole_rounds <= 105 * tiles;
  }

  TileOrder order_;
  int block_m_;
  int whole_;                  // tiles that are dealt out whole, before the others' parts:
  cutlass::FastDivmod parts_;  // so many of each, of
  int part_rows_;              // so many rows
  int count_;                  // of whole tiles and parts
  int blocks_;
  int first_dealt_;     // tiles that are dealt out together at first: a section's, or all
  int dealt_together_;  // and then
};

}  // namespace flash_cute::sm90
