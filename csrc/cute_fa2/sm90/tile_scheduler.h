// Which tiles a persistent CTA works on, one after the other. Of a dense call all is decided before
// the launch (host/tile_schedule.h). Of sequences of their own lengths a CTA takes the next tile
// that nobody has, or has one place alone.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/pack_gqa.h"
#include "common/packed_tiles.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "common/tile_places.h"
#include "host/tile_schedule.h"

namespace flash_cute::sm90 {

// What a CTA works on at a time: a tile, or a subtile of one (TailSplit).
struct WorkTile {
  static constexpr int kNoRow = -1;  // as row0: there are no more tiles

  int row0, row_end;  // its query rows; consumers beyond them have nothing to do
  int head;           // as tiles count heads (GqaLayout)
  int batch;          // of results: split * params.batch + the entry of the batch
};

// The same of sequences of their own lengths: the producer tells the consumers which it is.
struct PackedWorkTile : WorkTile {
  Sequence sequence;
};

// And of a split of their keys. `batch` is the sequence.
struct PackedSplitTile : PackedWorkTile {
  int split;
};

// Tiles are shared out in rounds. Every other round runs backwards over the CTAs: a CTA that had a
// long tile gets a short one next.
//
// SchedulePolicy::kHeadGroups starts each head group anew. Every second group starts backwards: the
// CTAs that had no tile in the last round before then come first. Each pair of groups starts at
// another CTA.
class PersistentTileScheduler {
 public:
  PersistentTileScheduler(const TileSchedule& schedule, const PackGqa& pack_gqa, int batch)
      : decoder_(schedule.order, pack_gqa.heads, batch),
        block_m_(schedule.block_m),
        whole_tiles_(static_cast<int>(schedule.tail.whole_tiles)),
        subtiles_(schedule.tail.subtiles),
        subtile_rows_(schedule.tail.subtile_rows),
        count_(static_cast<int>(schedule.tail.work_tiles())),
        ctas_(schedule.ctas) {
    const bool anew = schedule.policy == SchedulePolicy::kHeadGroups;
    first_together_ = anew ? decoder_.first_head_group_tiles() : count_;
    together_ = anew ? decoder_.head_group_tiles() : count_;
  }

  // A CTA's work tiles, by number.
  class Iterator {
   public:
    CUTE_DEVICE explicit Iterator(int cta) : place_(cta) {}

    CUTE_DEVICE int first(const PersistentTileScheduler& scheduler) { return next(scheduler); }
    // The number of the next work tile; past the last, one that the scheduler has not.
    CUTE_DEVICE int next(const PersistentTileScheduler& scheduler) {
      const unsigned tiles = scheduler.count_, ctas = scheduler.ctas_;
      while (first_ < tiles) {
        const unsigned together = first_ == 0 ? scheduler.first_together_ : scheduler.together_;
        const unsigned offset = scheduled_ + (is_backward_ ? ctas - 1 - place_ : place_);
        const unsigned index = first_ + offset;
        const bool exists = offset < together && index < tiles;
        scheduled_ += ctas;
        is_backward_ = !is_backward_;
        if (scheduled_ >= together) start_next_group(together, ctas);
        if (exists) return static_cast<int>(index);
      }
      return scheduler.count_;
    }

   private:
    CUTE_DEVICE void start_next_group(unsigned together, unsigned ctas) {
      first_ += together;
      scheduled_ = 0;
      is_backward_ = ++group_ % 2 != 0;
      if (!is_backward_) {  // 1/2, 1/4, 3/4, 1/2, 0, ... of the CTAs from where the first one began
        place_ += group_ % 4 != 0 ? ctas / 2 : ctas * 3 / 4;
        if (place_ >= ctas) place_ -= ctas;
      }
    }

    unsigned place_;          // of the CTA among the CTAs, in this group
    unsigned first_ = 0;      // tile of the group; past the last it may pass 2^31
    unsigned scheduled_ = 0;  // tiles of the group, in the rounds before
    unsigned group_ = 0;      // groups before this one
    bool is_backward_ = false;
  };

  CUTE_DEVICE int count() const { return count_; }

  // Which split of the keys a tile has, and of which entry of the batch.
  CUTE_DEVICE int split(WorkTile tile) const { return decoder_.per_batch().div(tile.batch); }
  CUTE_DEVICE int batch_of(WorkTile tile) const { return decoder_.per_batch().rem(tile.batch); }

  // Its rows may end behind those of the sequence; a subtile may have none of them.
  CUTE_DEVICE WorkTile tile(int index) const {
    const bool is_subtile = index >= whole_tiles_;
    int tail_tile, subtile;
    subtiles_(tail_tile, subtile, is_subtile ? index - whole_tiles_ : 0);
    const TileCoord tile = decoder_.tile(is_subtile ? whole_tiles_ + tail_tile : index);
    int row0 = tile.m_block * block_m_, row_end = row0 + block_m_;
    if (is_subtile) {
      row0 += subtile * subtile_rows_;
      row_end = cute::min(row_end, row0 + subtile_rows_);
    }
    const int batch = tile.split * decoder_.per_batch().divisor + tile.batch;
    return {row0, row_end, tile.head, batch};
  }

 private:
  TileDecoder decoder_;
  int block_m_;
  int whole_tiles_;               // come before the subtiles:
  cutlass::FastDivmod subtiles_;  // so many of each tail tile, of
  int subtile_rows_;              // so many rows
  int count_;                     // work tiles
  int ctas_;
  int first_together_;  // tiles that are scheduled together at first: a head group's, or all
  int together_;        // and then
};

// The same for sequences of their own lengths. There are so many tiles as the device has found, the
// longest first; or if they are few, as many as there are places for them.
class PackedTileScheduler {
 public:
  PackedTileScheduler(const BlockList& list, const PackGqa& pack_gqa, const TileSchedule& schedule)
      : tiles_(list, pack_gqa.heads, schedule.order.head_group),
        places_(list.bound, pack_gqa.heads, schedule.block_m >> pack_gqa.log2_rows),
        block_m_(schedule.block_m),
        ctas_(schedule.ctas),
        has_list_(schedule.policy != SchedulePolicy::kPlaces) {}

  class Iterator {
   public:
    CUTE_DEVICE explicit Iterator(int cta) : first_(cta) {}

    // A CTA's first tile is that of its number. The counter goes on behind those of all CTAs.
    CUTE_DEVICE int first(const PackedTileScheduler&) const { return first_; }
    CUTE_DEVICE static int next(const PackedTileScheduler& scheduler) {
      return scheduler.has_list_ ? scheduler.ctas_ + scheduler.tiles_.take() : kMaxLength;
    }

   private:
    int first_;
  };

  // Asked for once: the answer is in memory.
  CUTE_DEVICE int count() const { return has_list_ ? tiles_.count() : places_.count(); }
  CUTE_DEVICE bool has_list() const { return has_list_; }
  CUTE_DEVICE void prefetch(int index) const {
    if (has_list_) tiles_.prefetch(index);
  }

  CUTE_DEVICE void tile(int index, PackedWorkTile& tile) const {
    tile = work_tile(tiles_.tile(index), tiles_.sequence(index));
  }
  CUTE_DEVICE void tile(int index, PackedSplitTile& tile) const {
    const TileCoord coord = tiles_.split_tile(index);
    tile = {work_tile(coord, tiles_.split_sequence(index)), coord.split};
  }

  // Without a list: what is in a place, which all threads of the CTA clear of other rows.
  CUTE_DEVICE PackedWorkTile look_up(const FwdParams& params, const PackGqa& pack_gqa, int index,
                                     int threads) const {
    TileCoord tile = places_.tile(params, index);
    Sequence sequence = Sequence::of<MaskKind::kPacked>(params, tile.batch);
    places_.clear_unused(params, pack_gqa, tile, sequence, platform::thread_index(), threads);
    if (tile.m_block < 0) tile.m_block = sequence.len_q = 0;
    return work_tile(tile, sequence);
  }

 private:
  CUTE_DEVICE PackedWorkTile work_tile(const TileCoord& tile, const Sequence& sequence) const {
    const int row0 = tile.m_block * block_m_;
    return {{row0, row0 + block_m_, tile.head, tile.batch}, sequence};
  }

  PackedTiles tiles_;
  TilePlaces places_;
  int block_m_;
  int ctas_;
  bool has_list_;
};

}  // namespace flash_cute::sm90
