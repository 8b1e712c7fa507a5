// A persistent CTA of the SM90 forward above head dim 256, from beginning to end.
#pragma once

#include "common/platform.h"
#include "common/sequence.h"
#include "sm90/fwd/arguments.h"
#include "sm90/fwd/epilogue.h"
#include "sm90/fwd/large/producer.h"
#include "sm90/fwd/large/scores.h"
#include "sm90/fwd/large/traits.h"
#include "sm90/fwd/large/values.h"
#include "sm90/fwd/pipeline.h"
#include "sm90/hopper.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct LargeFwdKernel {
  using Traits = Traits_;
  using Arguments = sm90::Arguments;
  using SharedMemory = typename Traits::SharedMemory;
  using Producer = LargeFwdProducer<Traits, kMask>;
  using Epilogue = FwdEpilogue<Traits>;
  using Iterator = typename Pipeline<Traits, kMask>::Scheduler::Iterator;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    if (hopper::is_first_thread()) {
      hopper::prefetch_tensor_map(arguments.maps.q);
      hopper::prefetch_tensor_map(arguments.maps.k);
      hopper::prefetch_tensor_map(arguments.maps.v);
      hopper::prefetch_tensor_map(arguments.maps.out);
      init_barriers(smem);
      hopper::fence_barrier_init();
    }
    platform::sync_cta();  // the initialised barriers are visible to all threads

    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::register_dealloc<Traits::kConfig.producer_registers()>();
      if (hopper::is_first_thread()) {
        Producer(arguments, smem).run_keys(Iterator(platform::cta_index()));
      } else if (platform::thread_index() == 32) {
        Producer(arguments, smem).run_values(Iterator(platform::cta_index()));
      }
    } else if (warpgroup == 1) {
      hopper::register_alloc<Traits::kConfig.scores_registers()>();
      ScoresMainloop<Traits, kMask>(arguments, smem).run();
    } else {
      hopper::register_alloc<Traits::kConfig.consumer_registers()>();
      const int group = warpgroup - 2;
      ValuesMainloop<Traits, kMask>(arguments, smem, group)
          .run([&](const WorkTile& tile, auto& tOrO) {
            const int warp = hopper::warp_in_warpgroup();
            Epilogue::store_out(arguments, smem, tile, group, warp,
                                tile.row0 + warp * Traits::kWarpRows,
                                Pipeline<Traits, kMask>::sequence(arguments, tile), tOrO,
                                group * Traits::kHeadDimV);
          });
      Epilogue::finish();
    }
  }

 private:
  static CUTE_DEVICE void init_barriers(SharedMemory& smem) {
    constexpr int kWarps = hopper::kWarpgroup / 32 * hopper::kArrivalsOfWarp;
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      smem.tile_full[stage].init(1);                                            // the producer
      smem.tile_empty[stage].init((1 + Traits::kGroups) * hopper::kWarpgroup);  // each thread
    }
    smem.q_full.init(1);  // the producer, and the bytes that it expects
    smem.q_empty.init(kWarps);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.k_empty[stage].init(kWarps);
    }
    for (int group = 0; group < Traits::kGroups; ++group) {
      for (int stage = 0; stage < Traits::kVStages; ++stage) {
        smem.v_full[group][stage].init(1);
        smem.v_empty[group][stage].init(kWarps);
      }
    }
    for (int stage = 0; stage < Traits::kPStages; ++stage) {
      smem.p_full[stage].init(kWarps);
      smem.p_empty[stage].init(Traits::kGroups * kWarps);
    }
  }
};

}  // namespace flash_cute::sm90
