// A CTA of the SM90 backward of a narrow window: it walks along the diagonal. So it has all keys of
// its rows, and all rows of its keys, and nobody adds to memory. dQ is deterministic.
#pragma once

#include <cute/tensor.hpp>

#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/window/mainloop.h"
#include "sm90/bwd/window/producer.h"
#include "sm90/bwd/window/stretch.h"
#include "sm90/bwd/window/traits.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct WindowKernel {
  using Traits = Traits_;
  using Arguments = BwdArguments;
  using SharedMemory = typename Traits::SharedMemory;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    if (hopper::is_first_thread()) {
      prefetch_tensor_maps<kMask>(arguments.maps);
      Traits::init_barriers(smem);
      hopper::fence_barrier_init();
    }
    platform::sync_cta();  // the barriers are visible to all threads
    platform::wait_for_kernel_before();
    const int index = platform::warp_uniform(platform::cta_index());
    // Of packed sequences the grid is as large as there may be tiles.
    if (index >= arguments.template tile_count<kMask>()) return;

    // Each role computes its own: the producers have few registers.
    constexpr WarpgroupRoles kRoles = Traits::kConfig.roles();
    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::register_dealloc<kRoles.producer_registers()>();
      if (!hopper::is_elected()) return;
      const auto tile = arguments.template tile<kMask>(index);
      const Stretch stretch = stretch_of(arguments, tile);
      const WindowProducer<Traits, has_sequences(kMask)> producer(arguments, tile, stretch, smem);
      const int warp = hopper::thread_in_warpgroup() / 32;
      if (warp == 0) producer.load_rows();
      if (warp == 1) producer.load_keys();
    } else {
      hopper::register_alloc<kRoles.consumer_registers()>();
      const auto tile = arguments.template tile<kMask>(index);
      const Stretch stretch = stretch_of(arguments, tile);
      WindowMainloop<Traits, kMask>(arguments, tile, stretch, smem, warpgroup - 1).run();
    }
  }

 private:
  static CUTE_DEVICE Stretch stretch_of(const Arguments& arguments,
                                        const BwdArguments::PlacedTile& tile) {
    return Stretch::of(tile.at, tile.sequence, arguments.window);
  }
};

}  // namespace flash_cute::sm90
