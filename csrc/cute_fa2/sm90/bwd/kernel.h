// A CTA of the SM90 backward from beginning to end, in one pass. Its warpgroups have roles. It
// takes tile after tile of keys.
#pragma once

#include <cute/tensor.hpp>

#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/adder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/finished_dq.h"
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
  using FinishedDq = sm90::FinishedDq<Traits, kMask>;
  using KeysStore = sm90::KeysStore<Traits, has_sequences(kMask)>;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    if (hopper::is_first_thread()) {
      prefetch_tensor_maps<kMask>(arguments.maps);
      if (params.head_splits == 1) {
        hopper::prefetch_tensor_map(arguments.maps.dk);
        hopper::prefetch_tensor_map(arguments.maps.dv);
      }
      BwdPipeline<Traits>::init_barriers(smem, arguments.dq_by);
      hopper::fence_barrier_init();
    }
    platform::sync_cta();  // the barriers are visible to all threads

    // Each role computes its own: the producer has few registers.
    constexpr WarpgroupRoles kRoles = Traits::kConfig.roles();
    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::register_dealloc<kRoles.producer_registers()>();
      platform::wait_for_kernel_before();  // the others wait for what this warpgroup brings
      // DqKernel fills the multiprocessors that this one leaves. It reads the statistics without a
      // wait. So it may begin only when the preprocess is over: behind the wait above.
      if (arguments.dq_by == DqBy::kOwnKernel) platform::let_next_begin();
      if (!hopper::is_elected()) return;
      const int warp = hopper::thread_in_warpgroup() / 32;
      if (warp == 0) {
        BwdProducer<Traits, has_sequences(kMask)> producer(arguments, smem);
        smem.queue.template give<kMask, Traits::kBlockM, Traits::kBlockN>(
            arguments, [&](const auto& tile) { producer.run(tile); });
      } else if (arguments.dq_by == DqBy::kSums && warp <= Traits::kConsumers) {
        const int consumer = warp - 1;  // whose dQ the warp adds
        DqAdder<Traits> adder(arguments, smem, consumer);
        smem.queue.template take<true>([&](const auto& tile) { adder.run(tile); });
        adder.take_rest();
      }
    } else {
      hopper::register_alloc<kRoles.consumer_registers()>();
      const int consumer = warpgroup - 1;
      typename Mainloop::State state;
      // ((2, 2, kHeadDim / 8), 1, 1), and of kHeadDimV
      auto tdKrdK = partition_fragment_C(typename Traits::MmaDk{}, typename Traits::ShapeDk{});
      auto tdVrdV = partition_fragment_C(typename Traits::MmaDv{}, typename Traits::ShapeDv{});
      smem.queue.template take<false>([&](const auto& key_tile) {
        const TileCoord& tile = key_tile.at;  // again from shared memory, when it is asked for
        const Sequence& sequence = key_tile.template sequence_of<kMask>(params);
        Mainloop mainloop(arguments, tile, sequence, smem, consumer, state);
        mainloop.run(key_tile.walk, tdKrdK, tdVrdV);
        FinishedDq finished(arguments, smem, consumer, state);
        finished.run();  // the adder reads this tile's last part meanwhile
        KeysStore::run(arguments, tile, sequence, consumer, tdKrdK, tdVrdV,
                       mainloop.wait_for_staging());
        finished.end_tile();
      });
      FinishedDq(arguments, smem, consumer, state).run_rest();
      KeysStore::wait_until_read();  // before the CTA ends
    }
  }
};

}  // namespace flash_cute::sm90
