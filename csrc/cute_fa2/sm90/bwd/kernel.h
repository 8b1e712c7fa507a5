// A CTA of the SM90 backward from beginning to end, in one pass. Its warpgroups have roles. It has one
// tile of keys.
#pragma once

#include <cute/tensor.hpp>

#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/adder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/mainloop.h"
#include "sm90/bwd/pipeline.h"
#include "sm90/bwd/producer.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/store_keys.h"
#include "sm90/bwd/traits.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct BwdKernel {
  using Traits = Traits_;
  using Arguments = BwdArguments;
  using SharedMemory = typename Traits::SharedMemory;
  using Mainloop = BwdMainloop<Traits, kMask>;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    if (hopper::is_first_thread()) {
      prefetch_tensor_maps(arguments.maps);
      BwdPipeline<Traits>::init_barriers(smem);
      hopper::fence_barrier_init();
    }
    platform::sync_cta();  // the barriers are visible to all threads

    // Each role computes its own: the producer has few registers.
    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::register_dealloc<Traits::kConfig.roles().producer_registers()>();
      const TileCoord tile = tile_of(arguments);
      const int consumer = hopper::warp_in_warpgroup() - 1;  // of which the warp adds dQ
      if (hopper::is_first_thread()) {
        const Sequence sequence(params, tile.batch);
        BwdProducer<Traits>(arguments, tile, sequence, smem).run(walk(arguments, tile, sequence));
      } else if (arguments.dq_by == DqBy::kSums && hopper::is_first_lane()) {
        const Sequence sequence(params, tile.batch);
        if (consumer < Traits::kConsumers) {
          DqAdder<Traits>(arguments, tile, smem, consumer).run(walk(arguments, tile, sequence));
        }
      }
    } else {
      hopper::register_alloc<Traits::kConfig.roles().consumer_registers()>();
      const int consumer = warpgroup - 1;
      auto tdKrdK = partition_fragment_C(typename Traits::MmaDk{}, typename Traits::ShapeDk{});
      auto tdVrdV = partition_fragment_C(typename Traits::MmaDv{}, typename Traits::ShapeDv{});
      const TileCoord tile = tile_of(arguments);
      const Sequence sequence(params, tile.batch);
      Mainloop mainloop(arguments, tile, sequence, smem, consumer);
      mainloop.run(walk(arguments, tile, sequence), tdKrdK, tdVrdV);
      using Element = typename Traits::Element;
      store_keys<Element, typename Traits::MmaDk, typename Traits::ShapeDk, Traits::kConsumers>(
          arguments, tile, sequence, consumer,
          {params.dk, params.workspace.dk, params.head_dim, params.scale.scale}, tdKrdK);
      store_keys<Element, typename Traits::MmaDv, typename Traits::ShapeDv, Traits::kConsumers>(
          arguments, tile, sequence, consumer,
          {params.dv, params.workspace.dv, params.head_dim_v, 1.f}, tdVrdV);
      mainloop.make_dq_of_sums();
    }
  }

 private:
  static CUTE_DEVICE TileCoord tile_of(const Arguments& arguments) {
    return arguments.decoder.tile(platform::warp_uniform(platform::cta_index()));
  }

  static CUTE_DEVICE QueryWalk walk(const Arguments& arguments, TileCoord tile,
                                    const Sequence& sequence) {
    const typename Mainloop::TileMask mask(arguments.params, sequence, UnpackedRows{});
    return {arguments, tile, mask, sequence, Traits::kBlockM, Traits::kBlockN};
  }
};

}  // namespace flash_cute::sm90
