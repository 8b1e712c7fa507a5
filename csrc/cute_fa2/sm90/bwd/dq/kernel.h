// A CTA of the SM90 backward that computes dQ of a tile of query rows. No CTA adds to what another
// has: dQ is deterministic, and needs no memory for sums.
#pragma once

#include <cute/tensor.hpp>

#include "common/gradient.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/dq/mainloop.h"
#include "sm90/bwd/dq/producer.h"
#include "sm90/bwd/dq/traits.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct DqKernel {
  using Traits = Traits_;
  using Arguments = BwdArguments;
  using SharedMemory = typename Traits::SharedMemory;
  using Mainloop = DqMainloop<Traits, kMask>;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    const BwdParams& params = arguments.params;
    if constexpr (has_sequences(kMask)) {  // the grid is as large as there may be tiles
      if (platform::cta_index() >= arguments.template tile_count<kMask>()) {
        platform::wait_for_kernel_before();  // as at the end of a tile, below
        return;
      }
    }
    if (hopper::is_first_thread()) {
      prefetch_tensor_maps<kMask>(arguments.maps);
      Traits::init_barriers(smem);
      hopper::fence_barrier_init();
    }
    platform::sync_cta();  // the barriers are visible to all threads

    constexpr WarpgroupRoles kRoles = Traits::kConfig.roles();
    const int warpgroup = hopper::warpgroup_index();
    // Each role computes its own: the producer has few registers.
    if (warpgroup == 0) {
      hopper::register_dealloc<kRoles.producer_registers()>();
      const auto [tile, sequence, first_index, seen] = tile_of(arguments);
      if (hopper::warp_in_warpgroup() == 0 && hopper::is_elected()) {
        using Producer = DqProducer<Traits, has_sequences(kMask)>;
        Producer(arguments, tile, sequence, smem).run(keys(params, tile, sequence));
        // Nothing above needs it. But what follows in the stream waits for this kernel alone: it
        // ends behind the main kernel.
        platform::wait_for_kernel_before();
      }
      return;
    }
    hopper::register_alloc<kRoles.consumer_registers()>();
    const int consumer = warpgroup - 1;
    // ((2, 2, kHeadDim / 8), 1, 1)
    auto tdQrdQ = cute::partition_fragment_C(typename Traits::MmaDq{}, typename Traits::ShapeQ{});
    const auto [tile, sequence, first_index, seen] = tile_of(arguments);
    Mainloop(arguments, tile, sequence, first_index, smem, consumer)
        .run(keys(params, tile, sequence), tdQrdQ);
    store_gradient<typename Traits::Element, typename Traits::MmaDq, typename Traits::ShapeQ>(
        place_of_dq(params, sequence, tile.batch, tile.head),
        tile.m_block * Traits::kBlockM + consumer * Traits::kConsumerRows, params.scale.scale,
        tdQrdQ, hopper::thread_in_warpgroup());
  }

 private:
  static CUTE_DEVICE auto tile_of(const Arguments& arguments) {
    return arguments.template tile<kMask>(platform::warp_uniform(platform::cta_index()));
  }

  // The blocks of keys that the tile sees.
  static CUTE_DEVICE BlockRange keys(const BwdParams& params, TileCoord tile,
                                     const Sequence& sequence) {
    const typename Mainloop::TileMask mask(params, sequence, UnpackedRows{});
    return Mainloop::visible(mask, sequence, tile.m_block * Traits::kBlockM, Traits::kBlockM);
  }
};

}  // namespace flash_cute::sm90
