// A persistent CTA of the SM90 forward from beginning to end. Its warpgroups have roles. Each tile
// has the main loop and the epilogue.
#pragma once

#include "common/fragment.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "sm90/fwd/arguments.h"
#include "sm90/fwd/epilogue.h"
#include "sm90/fwd/mainloop.h"
#include "sm90/fwd/pipeline.h"
#include "sm90/fwd/producer.h"
#include "sm90/fwd/traits.h"
#include "sm90/hopper.h"
#include "sm90/kv_source.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct FwdKernel {
  using Traits = Traits_;
  using Arguments = sm90::Arguments;
  using Producer = FwdProducer<Traits, kMask, TmaKV<Traits, has_sequences(kMask)>>;
  using Mainloop = FwdMainloop<Traits, kMask>;
  using Epilogue = FwdEpilogue<Traits>;
  using Pipeline = sm90::Pipeline<Traits, kMask>;
  using Iterator = typename Pipeline::Scheduler::Iterator;

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    if (hopper::is_first_thread()) {
      hopper::prefetch_tensor_map(arguments.maps.q);
      hopper::prefetch_tensor_map(arguments.maps.k);
      hopper::prefetch_tensor_map(arguments.maps.v);
      if constexpr (!Traits::kSplitKV) hopper::prefetch_tensor_map(arguments.maps.out);
      Pipeline::init_barriers(smem);
      hopper::fence_barrier_init();  // fault: init-fence
    }
    if constexpr (kMask == MaskKind::kPacked && !Traits::kSplitKV) look_up(arguments, smem);
    platform::sync_cta();  // the initialised barriers are visible to all threads

    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::register_dealloc<Traits::kConfig.producer_registers()>();
      const Iterator tiles(platform::cta_index());
      // By warps first: else ptxas spills the producer's addresses (notes/packed.md).
      const int warp = hopper::warp_in_warpgroup();
      if (warp == 0) {
        if (hopper::is_elected()) Producer(arguments, smem).run(tiles);
      } else if (Pipeline::kIsPacked && warp == 1) {
        if constexpr (Pipeline::kIsPacked) {
          if (hopper::is_elected()) smem.next.find(arguments.packed_scheduler, tiles);
        }
      }
    } else {
      hopper::register_alloc<Traits::kConfig.consumer_registers()>();
      const int index = warpgroup - 1;
      Mainloop mainloop(arguments, smem, index);
      mainloop.run([&](const auto& tile, int row0, auto& softmax, auto& tOrO) {
        auto out = as_matrix(tOrO);  // (rows, columns)
        softmax.normalize(out);
        const Sequence sequence = Pipeline::sequence(arguments, tile);
        if constexpr (Traits::kSplitKV) {
          Epilogue::run_split(arguments, of_results(arguments.params, tile), row0, sequence, tOrO,
                              softmax);
        } else {
          if (arguments.params.sink) Epilogue::join_sink(arguments, tile, row0, out, softmax);
          Epilogue::run(arguments, smem, tile, index, row0, sequence, tOrO, softmax);
        }
      });
      Epilogue::finish();
    }
  }

 private:
  // A split's tile with the batch of its results, as WorkTile has it.
  static CUTE_DEVICE WorkTile of_results(const FwdParams& params,
                                         const typename Traits::Tile& tile) {
    WorkTile result = tile;
    if constexpr (Traits::kIsPacked) {
      const bool is_padded = params.sequences.cu_seqlens_q == nullptr;
      result.batch = tile.split * params.entries() + (is_padded ? tile.batch : 0);
    }
    return result;
  }

  // Where no list has the CTA's tile. Here, where registers are still many.
  static CUTE_DEVICE void look_up(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    const PackedTileScheduler& scheduler = arguments.packed_scheduler;
    if (scheduler.has_list()) return;
    const PackedWorkTile tile = scheduler.look_up(arguments.params, arguments.pack_gqa,
                                                  platform::cta_index(), Traits::kThreads);
    if (hopper::is_first_thread()) smem.next.tile = tile;
  }
};

}  // namespace flash_cute::sm90
