// How the tiles of keys come to persistent CTAs: each takes the next one that nobody has. The producer
// asks for it, once it has begun the last load of the one before, and tells the others.
#pragma once

#include <cute/config.hpp>

#include "common/platform.h"
#include "sm90/bwd/arguments.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

// In shared memory.
struct TileQueue {
  hopper::Barrier full;   // `tile` is there
  hopper::Barrier empty;  // all have read it
  int tile;               // or -1 behind the last

  // `readers`: how many arrive when they have read.
  CUTE_DEVICE void init(int readers) {
    full.init(1);
    empty.init(readers);
  }

  // One thread hands out tile after tile, and itself calls f(tile).
  template <class F>
  CUTE_DEVICE void give(const BwdArguments& arguments, F&& f) {
    uint32_t parity = 0;
    for (int index = platform::cta_index(); index < arguments.tiles;) {
      put(index, parity);
      f(arguments.decoder.tile(index));
      index = arguments.ctas + platform::next_number(arguments.params.workspace.tickets);
    }
    put(-1, parity);
  }
  // Whole warps call f(tile) for tile after tile.
  template <class F>
  CUTE_DEVICE void take(const BwdArguments& arguments, F&& f) {
    for (uint32_t parity = 0;; parity ^= 1) {
      full.wait(parity);  // fault: bwd90-tile-full
      const int index = platform::warp_uniform(tile);
      hopper::sync_warp();
      hopper::arrive_of_warp(empty, /*after_accesses=*/true);
      if (index < 0) return;
      f(arguments.decoder.tile(index));
    }
  }
  // One thread does.
  template <class F>
  CUTE_DEVICE void take_alone(const BwdArguments& arguments, F&& f) {
    for (uint32_t parity = 0;; parity ^= 1) {
      full.wait(parity);
      const int index = tile;
      empty.arrive();
      if (index < 0) return;
      f(arguments.decoder.tile(index));
    }
  }

 private:
  CUTE_DEVICE void put(int index, uint32_t& parity) {
    empty.wait(parity ^ 1);  // fault: bwd90-tile-empty
    tile = index;
    full.arrive();
    parity ^= 1;
  }
};

}  // namespace flash_cute::sm90
