// The order in which tiles are worked on, and which CTA gets which: decided here once a call, as
// plain data. The kernels' tile schedulers (smXX/tile_scheduler.h) carry it out.
#pragma once

#include <cstdint>

#include "host/gqa_layout.h"
#include "host/params.h"

namespace flash_cute {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Packed sequences: how many of `heads` their tiles go through side by side (PackedTiles). It
// divides them, and is at most `most`, but one.
constexpr int packed_head_group(int heads, int64_t most) {
  int group = most < 1 ? 1 : most < heads ? static_cast<int>(most) : heads;
  while (heads % group != 0) --group;
  return group;
}

// What the policies know of a call.
struct TileGrid {
  const FwdParams& params;  // its splits are set
  GqaLayout gqa;
  int block_m;
  int l2_bytes;

  int m_blocks() const { return gqa.m_blocks(params.len_q, block_m); }
  int kv_heads() const { return params.heads_kv() * params.batch; }
  int64_t tiles_per_kv_head() const { return int64_t{gqa.heads_per_kv} * m_blocks(); }
  int64_t tiles() const { return gqa.tiles(params, block_m) * params.splits.count; }
  // How many heads of K and V have K and V in so many bytes; at least one.
  int kv_heads_within(int64_t bytes) const;
};

// Tiles are numbered head group by head group (L2 swizzle): the K and V of a group stay in L2
// together. Within a group they go along the query rows, those with more visible keys first.
// Under a causal mask that is from the last rows to the first. The first group may have fewer heads
// than the others, and its many short tiles fill the gaps at the end. sm90's backward goes through
// it last, and there it may have more.
struct TileOrder {
  int m_blocks;
  int heads;             // over the batch and all splits, as tiles count heads
  int head_group;        // heads of a group
  int first_head_group;  // and of the first one
  bool ascending;        // from the first rows on, else from the last
  // If descending: how many tiles of a head come before its last. That one may lack rows, and
  // stands where its work puts it.
  int before_last;

  // `kv_head_group` counts heads of K and V; with each come the query heads that share it. The last
  // tile of a head takes as long as one of `last_rows` rows.
  static TileOrder make(const TileGrid& grid, int kv_head_group, int last_rows);

  int tiles() const { return m_blocks * heads; }
};

// How tiles are shared out among persistent CTAs. Whole ones come first. Those behind them are too
// few for all CTAs, and are split into subtiles. A subtile has the rows of some of the tile's
// consumers. Its CTA reads all of the tile's keys. It takes about the mean of a whole tile's time
// and the subtile's share of it (notes/sm90_forward.md).
struct TailSplit {
  int64_t whole_tiles;
  int64_t tail_tiles;  // tiles that are split; 0 if none is
  int subtiles;        // of each of them
  int subtile_rows;    // of each but the last

  static TailSplit none(int64_t tiles, int block_m) { return {tiles, 0, 1, block_m}; }
  static TailSplit make(const FwdParams& params, int block_m, int64_t tiles, int64_t ctas);

  // The busiest CTA's time. The unit is one row of a whole tile times all keys.
  double time(const FwdParams& params, int block_m, int64_t ctas) const;

  int64_t work_tiles() const { return whole_tiles + tail_tiles * subtiles; }
};

// kOneTilePerCta      the grid has a CTA for each tile (sm80)
// Persistent CTAs, one for each SM, take tile after tile (sm90):
// kHeadByHead         heads one after the other: for tiles of equal work
// kHeadGroups         each head group is scheduled anew: for tiles of unequal work
// kGroupedSequence    head groups, but scheduled as one sequence: for small groups
// Packed sequences have a list, the longest tiles first, which the device makes:
// kList               a CTA for each tile that there may be
// kPersistentList     persistent CTAs, each of which takes the next tile that nobody has
// Or, where all tiles run at a time and scores do not change, they have none:
// kPlaces             a CTA for each place that a tile may have (sm90)
enum class SchedulePolicy {
  kOneTilePerCta,
  kHeadByHead,
  kHeadGroups,
  kGroupedSequence,
  kList,
  kPersistentList,
  kPlaces
};

const char* name_of(SchedulePolicy policy);

struct TileSchedule {
  SchedulePolicy policy;
  int block_m;
  TileOrder order;
  TailSplit tail;
  int ctas;
};

TileSchedule one_tile_per_cta(const TileGrid& grid);

// `tail`: how the tail is split where the policy allows it.
TileSchedule persistent_schedule(const TileGrid& grid, const TailSplit& tail, int multiprocessors);

}  // namespace flash_cute
