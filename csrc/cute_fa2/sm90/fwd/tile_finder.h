// Packed sequences: a thread beside the producer finds the CTA's next tile. That takes two reads,
// one behind the other: a number that nobody has, and what the list has there. They run while the
// producer still loads the tile before.
#pragma once

#include <cute/config.hpp>

#include "common/platform.h"
#include "sm90/hopper.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

// In shared memory, for one tile.
template <class Tile>
struct NextTile {
  Tile tile;               // behind the last, its row0 is kNoRow
  hopper::Barrier found;   // the tile is there
  hopper::Barrier wanted;  // the producer wants the next one; it has read this one before

  CUTE_DEVICE void init_barriers() {
    found.init(1);
    wanted.init(1);
  }

  // By the thread that finds tiles. Without a list, the CTA's one tile is here already.
  CUTE_DEVICE void find(const PackedTileScheduler& scheduler, PackedTileScheduler::Iterator tiles) {
    // It makes the list. A CTA without a tile waits, too: the combine kernel waits for this one
    // alone.
    platform::wait_for_kernel_before();
    unsigned index = tiles.first(scheduler);
    scheduler.prefetch(index);
    const unsigned count = scheduler.count();
    for (unsigned parity = 0; index < count; index = tiles.next(scheduler)) {
      if (scheduler.has_list()) scheduler.tile(index, tile);
      found.arrive();
      wanted.wait(parity);  // the producer has read it; fault: next-tile
      parity ^= 1;
    }
    tile.row0 = WorkTile::kNoRow;
    found.arrive();
  }
};

}  // namespace flash_cute::sm90
