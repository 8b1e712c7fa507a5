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

template <class Walk>
struct KeyTile {
  int index;  // or -1 behind the last
  TileCoord at;
  Walk walk;
  Sequence sequence;
  int first_index;  // of its blocks of rows (BwdArguments::PlacedTile)

  // Here, but for what the parameters tell.
  template <MaskKind kMask>
  CUTE_DEVICE decltype(auto) sequence_of(const BwdParams& params) const {
    if constexpr (has_sequences(kMask)) {
      return (sequence);
    } else {
      return Sequence::of<kMask>(params, at.batch);
    }
  }
};

// In shared memory.
template <class Walk>
struct TileQueue {
  using KeyTile = sm90::KeyTile<Walk>;
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
    // One register has stage and parity: the producer has few.
    for (unsigned index = platform::cta_index(), turn = 0;; ++turn) {
      const unsigned stage = turn % kStages;
      KeyTile& tile = tiles[stage];
      empty[stage].wait((turn / kStages % 2) ^ 1);
      const bool is_last = index >= static_cast<unsigned>(arguments.tile_count<kMask>());
      tile.index = is_last ? -1 : static_cast<int>(index);
      if (!is_last) {
        const auto placed = arguments.tile<kMask>(arguments.in_order<kMask>(index));
        tile.at = placed.at;
        tile.sequence = placed.sequence;
        tile.first_index = placed.first_index;
        tile.walk = Walk(arguments, placed.at, seen<kMask, kBlockM, kBlockN>(params, placed));
      }
      full[stage].arrive();
      if (is_last) return;
      f(tile);
      index = arguments.ctas + platform::next_number(params.workspace.tickets);
    }
  }
  template <MaskKind kMask, int kBlockM, int kBlockN>
  static CUTE_DEVICE BlockRange seen(const BwdParams& params,
                                     const BwdArguments::PlacedTile& tile) {
    if constexpr (has_sequences(kMask)) return tile.seen;
    const Sequence& sequence = tile.sequence;
    const Mask<kMask, UnpackedRows> mask(params, sequence, UnpackedRows{});
    const int key0 = tile.at.m_block * kBlockN;
    return row_blocks_that_see(mask, key0, cute::min(key0 + kBlockN, sequence.len_k),
                               sequence.len_q, kBlockM);
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
