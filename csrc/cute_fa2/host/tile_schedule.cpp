#include "host/tile_schedule.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "tiles/fwd_sm90.h"

namespace flash_cute {

constexpr int kConsumerRows = FwdConfigSm90::kConsumerRows;

int TileGrid::kv_heads_within(int64_t bytes) const {
  const int64_t columns = params.head_dim + params.head_dim_v;
  const int64_t head_bytes = std::max<int64_t>(1, params.len_k * columns * bytes_of(params.dtype));
  return static_cast<int>(std::clamp<int64_t>(bytes / head_bytes, 1, kv_heads()));
}

TileOrder TileOrder::make(const TileGrid& grid, int kv_head_group, int last_rows) {
  const FwdParams& params = grid.params;
  const int m_blocks = grid.m_blocks(), block_m = grid.block_m;
  const int row_count = grid.gqa.rows(params.len_q);

  // Work of a tile if it had `tile_rows`: rows by keys that any of them sees.
  const auto work = [&](int m_block, int64_t tile_rows) {
    if (grid.params.is_full()) return tile_rows * params.len_k;
    const int row0 = m_block * block_m, row_end = std::min(row0 + block_m, row_count);
    const int first = std::max(0, params.band.begin_of(grid.gqa.query(row0)));
    const int end = std::min(params.len_k, params.band.end_of(grid.gqa.query(row_end - 1)));
    return tile_rows * std::max(0, end - first);
  };
  const int64_t last_work = work(m_blocks - 1, last_rows);
  int before_last = 0;
  while (before_last < m_blocks - 1 && work(m_blocks - 2 - before_last, block_m) > last_work) {
    ++before_last;
  }

  const int heads = grid.gqa.heads * params.batch * params.splits.count;
  const int head_group = kv_head_group * grid.gqa.heads_per_kv;
  return {.m_blocks = m_blocks,
          .heads = heads,
          .head_group = head_group,
          .first_head_group = (heads - 1) % head_group + 1,
          .ascending = m_blocks > 1 && work(0, block_m) > work(m_blocks - 2, block_m),
          .before_last = before_last};
}

TailSplit TailSplit::make(const FwdParams& params, int block_m, int64_t tiles, int64_t ctas) {
  TailSplit tail{};
  // Without a mask the last round is split. Under one the last of many tiles are short, so only
  // tiles that are fewer than the CTAs are.
  tail.tail_tiles = params.is_full() || tiles < ctas ? tiles % ctas : 0;
  tail.whole_tiles = tiles - tail.tail_tiles;  // fault: tile-missing
  // Subtiles are as small as leaves a CTA for each. A triangle's two may be more than the CTAs:
  // whoever has a long one then has a short one, too. The fewer keys there are, the fewer CTAs
  // may have a second one. They count in units that were measured (notes/sm90_forward.md).
  const int64_t units = ceil_div(params.len_k, params.head_dim <= 128 ? 128 : 64);
  const int64_t second = 2 * tail.tail_tiles - ctas;
  const bool in_two_rounds = params.is_triangle() && 8 * second <= (2 * units - 3) * ctas;
  do {
    tail.subtile_rows += kConsumerRows;
    tail.subtiles = static_cast<int>(ceil_div(block_m, tail.subtile_rows));
  } while (tail.subtiles > (in_two_rounds ? 2 : 1) && tail.subtiles * tail.tail_tiles > ctas);
  const bool is_split = tail.tail_tiles > 0 && tail.subtiles > 1;
  return is_split ? tail : none(tail.whole_tiles + tail.tail_tiles, block_m);
}

double TailSplit::time(const FwdParams& params, int block_m, int64_t ctas) const {
  const double subtile = 0.5 * (block_m + subtile_rows);
  if (params.is_triangle()) {
    // Only the longest tile has all keys, the mean one half of them. Short ones fill the gaps.
    const double all = whole_tiles * block_m + tail_tiles * subtiles * subtile;
    return std::max(tail_tiles > 0 ? subtile : block_m, all / ctas / 2);
  }
  return ceil_div(whole_tiles, ctas) * block_m + (tail_tiles > 0 ? subtile : 0);
}

const char* name_of(SchedulePolicy policy) {
  switch (policy) {
    case SchedulePolicy::kOneTilePerCta:
      return "one tile per CTA";
    case SchedulePolicy::kHeadByHead:
      return "persistent, head by head";
    case SchedulePolicy::kHeadGroups:
      return "persistent, head group by head group";
    case SchedulePolicy::kGroupedSequence:
      return "persistent, head groups as one sequence";
    case SchedulePolicy::kList:
      return "a list, one tile per CTA";
    case SchedulePolicy::kPersistentList:
      return "persistent, a list";
    case SchedulePolicy::kPlaces:
      return "one place per CTA";
  }
  __builtin_unreachable();
}

TileSchedule one_tile_per_cta(const TileGrid& grid) {
  // Equal tiles need no order but that of memory. Thirds of L2: measured (notes/sm80_forward.md).
  const int thirds_of_l2 = grid.params.head_dim <= 64 ? 1 : 2;
  const int kv_head_group =
      grid.params.is_full() ? 1 : grid.kv_heads_within(grid.l2_bytes / 3 * thirds_of_l2);
  const TileOrder order = TileOrder::make(grid, kv_head_group, grid.block_m);
  return {SchedulePolicy::kOneTilePerCta, grid.block_m, order,
          TailSplit::none(order.tiles(), grid.block_m), order.tiles()};
}

namespace {

// The policies of persistent CTAs. Each says whether it `serves` a grid, and the head group that it
// takes. The first that serves the grid has it.

// What they have in common.
struct PersistentGrid {
  const TileGrid& grid;
  int64_t ctas;
  int last_rows;  // a head's last tile takes as long as one of so many rows

  PersistentGrid(const TileGrid& grid, int multiprocessors) : grid(grid), ctas(multiprocessors) {
    // A consumer with few rows works as long as one with all of its own. One without any waits for
    // the others, which alone take more than half of a whole tile's time.
    const int block_m = grid.block_m;
    const int rows = grid.gqa.rows(grid.params.len_q) - (grid.m_blocks() - 1) * block_m;
    const int filled = static_cast<int>(ceil_div(rows, kConsumerRows)) * kConsumerRows;
    last_rows = std::max(filled, block_m * 3 / 5);
  }

  bool last_is_whole() const { return last_rows == grid.block_m; }
  // Tiles of equal work. Those of splits are about equal.
  bool tiles_are_equal() const {
    return grid.params.splits.count > 1 || (grid.params.is_full() && last_is_whole());
  }
  // K and V of short sequences are read from memory about as fast as they are used. Small head
  // groups then keep reads and work mixed.
  bool is_short() const { return !grid.params.is_full() && grid.params.len_k < 1024; }
};

struct HeadByHead {
  static constexpr SchedulePolicy kPolicy = SchedulePolicy::kHeadByHead;

  static bool serves(const PersistentGrid& p) {
    return p.tiles_are_equal() || (p.is_short() && p.last_is_whole() && pairs_are_equal(p));
  }
  static int kv_head_group(const PersistentGrid&) { return 1; }

 private:
  // Whether CTAs get equal work though tiles differ. If two rounds hold whole heads, the CTA of a
  // head's i-th tile next gets the i-th from the end of another head. If each query sees one key
  // more than the one before, all such pairs are equal. The last two rounds may lack a twentieth.
  static bool pairs_are_equal(const PersistentGrid& p) {
    const FwdParams& params = p.grid.params;
    const int64_t two_rounds = 2 * p.ctas;
    const int64_t tiles = p.grid.kv_heads() * p.grid.tiles_per_kv_head();
    return params.band.grows_evenly(params.len_q, params.len_k) &&
           two_rounds % p.grid.tiles_per_kv_head() == 0 &&
           100 * ceil_div(tiles, two_rounds) * two_rounds <= 105 * tiles;
  }
};

struct HeadGroups {
  static constexpr SchedulePolicy kPolicy = SchedulePolicy::kHeadGroups;

  static bool serves(const PersistentGrid& p) { return fills_ctas(p, kv_head_group(p)); }

  static int kv_head_group(const PersistentGrid& p) {
    const bool small = p.is_short() && fills_ctas(p, head_group_of(p, 1));
    return head_group_of(p, small ? 1 : 2);
  }

 private:
  // Whether tiles differ much (by a mask, or in a short head's last one) and a group has 5/4 tiles
  // or more for each CTA. With fewer, some CTAs would have none.
  static bool fills_ctas(const PersistentGrid& p, int kv_head_group) {
    const bool differ =
        !p.tiles_are_equal() && (!p.grid.params.is_full() || p.grid.m_blocks() <= 6);
    return differ && 4 * (kv_head_group * p.grid.tiles_per_kv_head()) >= 5 * p.ctas;
  }

  // As few groups as so many thirds of L2 allow, of as many heads each. Or groups that fill whole
  // rounds, if these are within a tenth of that and leave enough for the first group.
  static int head_group_of(const PersistentGrid& p, int thirds_of_l2) {
    const int kv_heads = p.grid.kv_heads();
    const int most = p.grid.kv_heads_within(p.grid.l2_bytes / 3 * thirds_of_l2);
    const int groups = static_cast<int>(ceil_div(kv_heads, most));
    const int even = static_cast<int>(ceil_div(kv_heads, groups));
    const int fill_rounds = static_cast<int>(p.ctas / std::gcd(p.grid.tiles_per_kv_head(), p.ctas));
    const int filling = (even + fill_rounds / 2) / fill_rounds * fill_rounds;
    const bool fills = groups > 1 && filling > 0 && 10 * std::abs(filling - even) <= even &&
                       fills_ctas(p, (kv_heads - 1) % filling + 1);
    return fills ? filling : even;
  }
};

struct GroupedSequence {
  static constexpr SchedulePolicy kPolicy = SchedulePolicy::kGroupedSequence;
  static bool serves(const PersistentGrid&) { return true; }
  static int kv_head_group(const PersistentGrid& p) { return HeadGroups::kv_head_group(p); }
};

template <class Policy, class... Others>
TileSchedule schedule_by(const PersistentGrid& p, TailSplit tail) {
  if constexpr (sizeof...(Others) > 0) {
    if (!Policy::serves(p)) return schedule_by<Others...>(p, tail);
  }
  const TileGrid& grid = p.grid;
  // Where each group is scheduled anew, no tile is split.
  if (Policy::kPolicy == SchedulePolicy::kHeadGroups) {
    tail = TailSplit::none(grid.tiles(), grid.block_m);
  }
  // If all tiles are split, none of the subtiles lacks consumers.
  const bool all_split = tail.whole_tiles == 0 && tail.subtiles > 1;
  return {Policy::kPolicy, grid.block_m,
          TileOrder::make(grid, Policy::kv_head_group(p), all_split ? grid.block_m : p.last_rows),
          tail, static_cast<int>(std::min(tail.work_tiles(), p.ctas))};
}

}  // namespace

TileSchedule persistent_schedule(const TileGrid& grid, const TailSplit& tail, int multiprocessors) {
  return schedule_by<HeadByHead, HeadGroups, GroupedSequence>(PersistentGrid(grid, multiprocessors),
                                                              tail);
}

}  // namespace flash_cute
