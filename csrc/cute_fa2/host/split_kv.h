// Split-KV, for calls with too few tiles to keep the GPU busy, as in decoding. Here: how many
// splits, and where their results go. ("Flash-Decoding": Dao, Haziza, Massa and Sizov 2023.)
#pragma once

#include <cstdint>

#include "host/gqa_layout.h"
#include "host/params.h"
#include "host/tile_schedule.h"
#include "tiles/fwd_sm80.h"
#include "tiles/fwd_sm90.h"

namespace flash_cute {

// What splits cost. The unit is one key for all rows of a tile, on an SM full of CTAs. The costs
// were set after calls on Hopper (notes/split_kv.md).
struct SplitCost {
  int64_t tiles;          // for each split
  int block_n;            // keys of a block
  int ctas_per_sm;        // sm90: tiles that an SM works on at a time
  double key;             // a key, by a tile's rows
  double tile;            // a tile beside its keys, in keys
  double combine;         // the combine kernel: at all,
  double row;             // for each row,
  double row_of_split;    // and for each split of it
  double rounds_unsplit;  // rounds of tiles on the busiest SM if the keys stay whole

  static SplitCost of_sm80(const FwdParams& params, const GqaLayout& gqa,
                           const TileEntrySm80& entry, int multiprocessors);
  // `gqa` and `entry` are of the tiles for splits. `unsplit` has the tiles for whole keys, and
  // `tail` how many there are.
  static SplitCost of_sm90(const FwdParams& params, const GqaLayout& gqa,
                           const TileEntrySm90& entry, const TileEntrySm90& unsplit,
                           const TailSplit& tail, int multiprocessors);
};

// The splits that take least, where that saves a fifth of the time; `asked`, if not 0: at most
// so many instead.
SplitKV choose_splits(const FwdParams& params, const SplitCost& cost, int multiprocessors,
                      int64_t asked);

// The bytes that the results of `params.splits` take, and where they go: 16-byte aligned memory of
// the device.
int64_t split_workspace_bytes(const FwdParams& params);
void place_splits(SplitKV& splits, const FwdParams& params, void* workspace);

}  // namespace flash_cute
