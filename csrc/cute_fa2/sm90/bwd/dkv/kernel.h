// A CTA of the SM90 backward that computes dK and dV of a tile of keys, by two consumers of which each
// has one of them. It takes tile after tile.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/dkv/mainloop.h"
#include "sm90/bwd/dkv/traits.h"
#include "sm90/bwd/producer.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/store_keys.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct DkvKernel {
  using Traits = Traits_;
  using Arguments = BwdArguments;
  using SharedMemory = typename Traits::SharedMemory;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    const BwdParams& params = arguments.params;
    if (hopper::is_first_thread()) {
      prefetch_tensor_maps(arguments.maps);
      Traits::init_barriers(smem);
      hopper::fence_barrier_init();
    }
    platform::sync_cta();  // the barriers are visible to all threads

    constexpr WarpgroupRoles kRoles = Traits::kConfig.roles();
    const int warpgroup = hopper::warpgroup_index();
    // Each role computes its own: the producer has few registers.
    if (warpgroup == 0) {
      hopper::register_dealloc<kRoles.producer_registers()>();
      if (hopper::is_first_thread()) {
        BwdProducer<Traits> producer(arguments, smem);
        smem.queue.give(arguments, [&](TileCoord tile) {
          const Sequence sequence(params, tile.batch);
          producer.run(tile, sequence, walk(arguments, tile, sequence));
        });
      }
    } else {
      hopper::register_alloc<kRoles.consumer_registers()>();
      if (warpgroup == 1) {
        compute<true>(arguments, smem,
                      {params.dv, params.workspace.dv, params.head_dim_v, 1.f});
      } else {
        compute<false>(arguments, smem,
                       {params.dk, params.workspace.dk, params.head_dim, params.scale.scale});
      }
    }
  }

 private:
  static CUTE_DEVICE QueryWalk walk(const Arguments& arguments, TileCoord tile,
                                    const Sequence& sequence) {
    const Mask<kMask, UnpackedRows> mask(arguments.params, sequence, UnpackedRows{});
    return {arguments, tile, mask, sequence, Traits::kBlockM, Traits::kBlockN};
  }

  template <bool kIsDv>
  static CUTE_DEVICE void compute(const Arguments& arguments, SharedMemory& smem,
                                  const KeysGradient& gradient) {
    using Mma = typename Traits::MmaDk;
    using Shape = typename Traits::ShapeDk;
    auto sums = cute::partition_fragment_C(Mma{}, Shape{});
    using Mainloop = DkvMainloop<Traits, kMask, kIsDv>;
    typename Mainloop::State state;
    smem.queue.take(arguments, [&](TileCoord tile) {
      const Sequence sequence(arguments.params, tile.batch);
      Mainloop(arguments, tile, sequence, smem, state).run(walk(arguments, tile, sequence), sums);
      store_keys<typename Traits::Element, Mma, Shape, 1>(arguments, tile, sequence, 0, gradient,
                                                          sums);
    });
  }
};

}  // namespace flash_cute::sm90
