// Packed sequences: which tile a CTA works on next takes two trips to memory, one behind the other:
// for a number that nobody has, and for what the list has there. A thread beside the producer makes
// them, while that one still loads the tile before.
#pragma once

#include <cute/config.hpp>

#include "common/platform.h"
#include "sm90/hopper.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

// In shared memory, for one tile.
template <class Tile>
struct NextTile {
  Tile tile;               // or kNoRow
  hopper::Barrier found;   // the tile is there
  hopper::Barrier wanted;  // the producer has read it, and wants the next one

  CUTE_DEVICE void init_barriers() {
    found.init(1);
    wanted.init(1);
  }

  // The thread that finds the CTA's tiles. Without a list there is one, which is here.
  CUTE_DEVICE void find(const PackedTileScheduler& scheduler, PackedTileScheduler::Iterator tiles) {
    platform::wait_for_kernel_before();  // it makes the list
    const unsigned count = scheduler.count();
    unsigned parity = 0;
    for (unsigned index = tiles.first(scheduler); index < count; index = tiles.next(scheduler)) {
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
