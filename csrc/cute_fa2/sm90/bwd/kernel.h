// A CTA of the SM90 backward from beginning to end, in one pass. Its warpgroups have roles. It takes
// tile after tile of keys.
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
      BwdPipeline<Traits>::init_barriers(smem, arguments.dq_by);
      hopper::fence_barrier_init();
    }
    platform::sync_cta();  // the barriers are visible to all threads

    // Each role computes its own: the producer has few registers.
    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::register_dealloc<Traits::kConfig.roles().producer_registers()>();
      const int consumer = hopper::warp_in_warpgroup() - 1;  // of which the warp adds dQ
      if (hopper::is_first_thread()) {
        BwdProducer<Traits> producer(arguments, smem);
        smem.queue.give(arguments, [&](TileCoord tile) {
          const Sequence sequence(params, tile.batch);
          producer.run(tile, sequence, walk(arguments, tile, sequence));
        });
      } else if (arguments.dq_by == DqBy::kSums && consumer >= 0 &&
                 consumer < Traits::kConsumers && hopper::is_first_lane()) {
        DqAdder<Traits> adder(arguments, smem, consumer);
        smem.queue.take_alone(arguments, [&](TileCoord tile) {
          adder.run(tile, walk(arguments, tile, Sequence(params, tile.batch)));
        });
      }
    } else {
      hopper::register_alloc<Traits::kConfig.roles().consumer_registers()>();
      const int consumer = warpgroup - 1;
      typename Mainloop::State state;
      auto tdKrdK = partition_fragment_C(typename Traits::MmaDk{}, typename Traits::ShapeDk{});
      auto tdVrdV = partition_fragment_C(typename Traits::MmaDv{}, typename Traits::ShapeDv{});
      smem.queue.take(arguments, [&](TileCoord tile) {
        const Sequence sequence(params, tile.batch);
        Mainloop mainloop(arguments, tile, sequence, smem, consumer, state);
        mainloop.run(walk(arguments, tile, sequence), tdKrdK, tdVrdV);
        using Element = typename Traits::Element;
        store_keys<Element, typename Traits::MmaDk, typename Traits::ShapeDk, Traits::kConsumers>(
            arguments, tile, sequence, consumer,
            {params.dk, params.workspace.dk, params.head_dim, params.scale.scale}, tdKrdK);
        store_keys<Element, typename Traits::MmaDv, typename Traits::ShapeDv, Traits::kConsumers>(
            arguments, tile, sequence, consumer,
            {params.dv, params.workspace.dv, params.head_dim_v, 1.f}, tdVrdV);
        mainloop.make_dq_of_sums();
        mainloop.end_tile();
      });
      const TileCoord none{};
      Mainloop(arguments, none, Sequence(params, 0), smem, consumer, state).make_dq_of_sums();
    }
  }

 private:
  static CUTE_DEVICE QueryWalk walk(const Arguments& arguments, TileCoord tile,
                                    const Sequence& sequence) {
    const typename Mainloop::TileMask mask(arguments.params, sequence, UnpackedRows{});
    return {arguments, tile, mask, sequence, Traits::kBlockM, Traits::kBlockN};
  }
};

}  // namespace flash_cute::sm90
