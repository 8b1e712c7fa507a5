// A CTA of the SM90 backward that computes dK and dV of a tile of keys, by two consumers of which
// each has one of them. It takes tile after tile.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

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
      platform::wait_for_kernel_before();  // the others wait for what this warpgroup brings
      // DqKernel fills the multiprocessors that this one leaves. It reads the statistics without a
      // wait. So it may begin only when the preprocess is over: behind the wait above.
      platform::let_next_begin();
      constexpr bool kIsPacked = has_sequences(kMask);
      if (!hopper::is_elected()) return;
      const int warp = hopper::thread_in_warpgroup() / 32;
      if (warp == 0) {
        BwdProducer<Traits, kIsPacked, Loads::kKAndQ> producer(arguments, smem);
        smem.queue.template give<kMask, Traits::kBlockM, Traits::kBlockN>(
            arguments, [&](const auto& tile) { producer.run(tile); });
      } else if (warp == 1) {
        BwdProducer<Traits, kIsPacked, Loads::kVAndDout> producer(arguments, smem);
        smem.queue.template take<true>([&](const auto& tile) { producer.run(tile); });
      }
    } else {
      hopper::register_alloc<kRoles.consumer_registers()>();
      if (warpgroup == 1) {
        compute</*kIsDv=*/true>(arguments, smem);
      } else {
        compute</*kIsDv=*/false>(arguments, smem);
      }
    }
  }

 private:
  template <bool kIsDv>
  static CUTE_DEVICE void compute(const Arguments& arguments, SharedMemory& smem) {
    using Mma = std::conditional_t<kIsDv, typename Traits::MmaDv, typename Traits::MmaDk>;
    using Shape = std::conditional_t<kIsDv, typename Traits::ShapeDv, typename Traits::ShapeDk>;
    // dK or dV, ((2, 2, columns / 8), 1, 1)
    auto sums = cute::partition_fragment_C(Mma{}, Shape{});
    using Mainloop = DkvMainloop<Traits, kMask, kIsDv>;
    typename Mainloop::State state;
    smem.queue.template take<false>([&](const auto& key_tile) {
      const TileCoord& tile = key_tile.at;  // again from shared memory, when it is asked for
      const Sequence& sequence = key_tile.template sequence_of<kMask>(arguments.params);
      Mainloop(arguments, tile, sequence, smem, state).run(key_tile.walk, sums);
      const BwdParams& params = arguments.params;
      const KeysGradient gradient =
          kIsDv ? KeysGradient{params.dv, params.workspace.dv, params.head_dim_v, 1.f}
                : KeysGradient{params.dk, params.workspace.dk, params.head_dim, params.scale.scale};
      store_keys<typename Traits::Element, Mma, Shape, 1>(arguments, tile, sequence, 0, gradient,
                                                          sums);
    });
  }
};

}  // namespace flash_cute::sm90
