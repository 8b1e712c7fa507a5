// From a plan to a running SM80 kernel. Included by the generated instantiation files alone.
#pragma once

#include <type_traits>

#include "common/grid.h"
#include "host/launch_fwd.h"
#include "sm80/fwd/kernel.h"
#include "sm80/fwd/traits_chunked.h"
#include "sm80/fwd/traits_fp32.h"
#include "static_switch.h"
#include "tiles/fwd_sm80.h"

namespace flash_cute {

template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm80(const FwdPlan& plan, const FwdParams& params, int device,
                     cudaStream_t stream) {
  constexpr auto kTiles = fwd_tiles_sm80(bytes_of(kDType));
  index_switch<kTiles.size()>(plan.tile, [&](auto index) {
    constexpr FwdConfigSm80 kConfig = fwd_tiles_sm80(bytes_of(kDType))[index()].config;
    if constexpr (kConfig.head_dim == kHeadDim) {
      const PackGqa pack_gqa(plan.gqa);
      const sm80::Arguments arguments = {
          params, pack_gqa, sm80::SingleTileScheduler(plan.schedule, pack_gqa, params.batch),
          PackedTiles(params.tiles, pack_gqa.heads, plan.schedule.order.head_group)};
      using Traits = std::conditional_t<
          kDType == DType::kFloat, sm80::Fp32FwdTraits<kConfig>,
          std::conditional_t<kConfig.is_chunked(), sm80::ChunkedFwdTraits<kDType, kConfig>,
                             sm80::FwdTraits<kDType, kConfig>>>;
      run_grid<sm80::FwdKernel<Traits, kMask>>(arguments, plan.schedule.ctas, device, stream);
    }
  });
}

}  // namespace flash_cute
