// How the tiles of keys come to persistent CTAs: each takes the next one that nobody has. The
// producer asks for it, once it has begun the last load of the one before, and tells the others.
#pragma once

#include <cute/config.hpp>

#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"

namespace flash_cute::sm90 {

struct KeyTile {
  int index;  // or -1 behind the last
  TileCoord at;
  QueryWalk walk;
  Sequence sequence;
  int first_index;  // of its blocks of rows (first_index_of)

  // Here, but for what the parameters tell.
  template <MaskKind kMask>
  CUTE_DEVICE decltype(auto) sequence_of(const BwdParams& params) const {
    if constexpr (kMask == MaskKind::kPacked) {
      return (sequence);
    } else {
      return Sequence::of<kMask>(params, at.batch);
    }
  }
};

// In shared memory.
struct TileQueue {
  static constexpr int kStages = 2;
  KeyTile tiles[kStages];
  hopper::Barrier full[kStages];   // the tile is there
  hopper::Barrier empty[kStages];  // all readers are done with it

  CUTE_DEVICE void init(int readers) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(1);
      empty[stage].init(readers);
    }
  }

  // One thread hands out tile after tile, of kBlockN keys, and calls f(tile) itself.
  template <MaskKind kMask, int kBlockM, int kBlockN, class F>
  CUTE_DEVICE void give(const BwdArguments& arguments, F&& f) {
    const BwdParams& params = arguments.params;
    const int count = arguments.tile_count<kMask>();
    PipelineState<kStages> state;
    for (int index = platform::cta_index();;) {
      KeyTile& tile = tiles[state.stage];
      empty[state.stage].wait(state.parity ^ 1);
      const bool is_last = index >= count;
      tile.index = is_last ? -1 : index;
      if (!is_last) {
        const TileCoord at = arguments.tile<kMask>(index);
        const Sequence sequence = Sequence::of<kMask>(params, at.batch);
        const Mask<kMask, UnpackedRows> mask(params, sequence, UnpackedRows{});
        tile.at = at;
        tile.walk = QueryWalk(arguments, at, mask, sequence, kBlockM, kBlockN);
        tile.sequence = sequence;
        tile.first_index = first_index_of<kMask>(params, at.batch);
      }
      full[state.stage].arrive();
      state.advance();
      if (is_last) return;
      f(tile);
      index = arguments.ctas + platform::next_number(params.workspace.tickets);
    }
  }
  // The others call f(tile) for each: whole warps, or one thread that is alone.
  template <bool kIsAlone, class F>
  CUTE_DEVICE void take(F&& f) {
    for (PipelineState<kStages> state;; state.advance()) {
      full[state.stage].wait(state.parity);
      const KeyTile& tile = tiles[state.stage];
      if (tile.index < 0) return;
      f(tile);
      if constexpr (kIsAlone) {
        empty[state.stage].arrive();
      } else {
        hopper::sync_warp();
        hopper::arrive_of_warp(empty[state.stage], /*after_accesses=*/true);
      }
    }
  }
};

}  // namespace flash_cute::sm90
