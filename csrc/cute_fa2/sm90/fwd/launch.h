// From a plan to a running SM90 kernel. Included by the generated instantiation files alone.
#pragma once

#include <iterator>

#include "common/grid.h"
#include "host/launch_fwd.h"
#include "sm90/fwd/kernel.h"
#include "sm90/fwd/large/kernel.h"
#include "static_switch.h"
#include "tiles/fwd_sm90.h"

namespace flash_cute {

template <DType kDType, int kHeadDim, MaskKind kMask, bool kSplitKV>
void launch_fwd_sm90(const FwdPlan& plan, const FwdParams& params, int device,
                     cudaStream_t stream) {
  index_switch<std::size(kFwdTilesSm90)>(plan.tile, [&](auto index) {
    constexpr bool kIsPacked = has_sequences(kMask);
    constexpr TileEntrySm90 kEntry = kFwdTilesSm90[index()];
    if constexpr (kEntry.config.head_dim == kHeadDim &&
                  (kSplitKV ? kEntry.split_kv : kEntry.serves(kMask))) {
      const PackGqa pack_gqa(plan.gqa);
      const sm90::Arguments arguments = {
          plan.tensor_maps, params, pack_gqa,
          sm90::PersistentTileScheduler(plan.schedule, pack_gqa, params.batch),
          sm90::PackedTileScheduler(params.tiles, pack_gqa, plan.schedule)};
      if constexpr (kEntry.config.is_large()) {
        run_grid<sm90::LargeFwdKernel<sm90::LargeFwdTraits<kDType, kEntry.config>, kMask>>(
            arguments, plan.schedule.ctas, device, stream);
      } else {
        constexpr bool kReadsBias = kMask == MaskKind::kScored && kEntry.bias;
        using Traits = sm90::FwdTraits<kDType, kEntry.config, kSplitKV, kIsPacked, kReadsBias>;
        run_grid<sm90::FwdKernel<Traits, kMask>>(arguments, plan.schedule.ctas, device, stream,
                                                 /*overlaps=*/kIsPacked && params.tiles.sorted);
      }
    }
  });
}

}  // namespace flash_cute
