// The pipelines of shared-memory stages: through them the forward's producer hands tiles to the
// consumers. Here are their barriers, and what both sides have to agree on.
#pragma once

#include "common/mask.h"
#include "common/sequence.h"
#include "sm90/fwd/arguments.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
struct Pipeline {
  using SharedMemory = typename Traits::SharedMemory;
  using KVState = PipelineState<Traits::kStages>;
  using QState = PipelineState<Traits::kQStages>;
  using Tile = typename Traits::Tile;
  static constexpr bool kIsPacked = has_sequences(kMask);
  using TileMask = Mask<kMask, GqaLayout, !kIsPacked || Traits::kSplitKV>;

  static CUTE_DEVICE const auto& scheduler(const Arguments& arguments) {
    if constexpr (kIsPacked) {
      return arguments.packed_scheduler;
    } else {
      return arguments.scheduler;
    }
  }
  using Scheduler = std::conditional_t<kIsPacked, PackedTileScheduler, PersistentTileScheduler>;

  static CUTE_DEVICE void init_barriers(SharedMemory& smem) {
    constexpr int kWarps = hopper::kWarpgroup / 32;
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      for (int i = 0; i < Traits::kConsumers; ++i) {
        smem.q_full[stage][i].init(1);  // the producer, and the bytes that it expects
        smem.q_empty[stage][i].init(hopper::kWarpgroup);  // each thread of the consumer
      }
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.v_full[stage].init(1);
      smem.k_empty[stage].init(Traits::kConsumers * kWarps);  // fault: arrivals
      smem.v_empty[stage].init(Traits::kConsumers * kWarps);
    }
    if constexpr (kIsPacked) smem.next.init_barriers();
  }

  // The sequence of a tile, with the keys of its split.
  static CUTE_DEVICE Sequence sequence(const Arguments& arguments, const Tile& tile) {
    const FwdParams& params = arguments.params;
    if constexpr (kIsPacked) {
      return tile.sequence;
    } else if constexpr (Traits::kSplitKV) {
      return Sequence::of_split(params, arguments.scheduler.split(tile));
    } else {
      return Sequence::of<kMask>(params, tile.batch);
    }
  }

  static CUTE_DEVICE TileMask mask(const Arguments& arguments, const Tile& tile) {
    return {arguments.params, sequence(arguments, tile), arguments.pack_gqa};
  }

  // The key blocks that a tile visits: those of which any of its rows sees a key. Without any it is
  // one block. So there is always a block to work on.
  static CUTE_DEVICE BlockRange blocks_of(const Arguments& arguments, const Tile& tile) {
    const BlockRange blocks =
        mask(arguments, tile).visible_blocks(tile.row0, tile.row_end, Traits::kBlockN);
    return blocks.begin < blocks.end ? blocks : BlockRange{0, 1};
  }
};

}  // namespace flash_cute::sm90
