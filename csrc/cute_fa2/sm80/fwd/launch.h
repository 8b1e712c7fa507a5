// From parameters to a running SM80 kernel. Included by the generated instantiation files alone.
#pragma once

#include <iterator>

#include "common/grid.h"
#include "config.h"
#include "device.h"
#include "dispatch.h"
#include "sm80/fwd/kernel.h"
#include "static_switch.h"

namespace flash_cute {
namespace sm80 {

template <class Kernel>
void launch(const FwdParams& params, MaskKind mask, int device, cudaStream_t stream) {
  constexpr int kBlockM = Kernel::Traits::kBlockM;
  const PackGqa pack_gqa = PackGqa::make(params, kBlockM);
  check_grid(pack_gqa.tiles(params, kBlockM) * params.splits.count);
  const Arguments arguments = {
      params, pack_gqa, TileScheduler::make(params, pack_gqa, mask, kBlockM, l2_bytes_of(device))};
  run_grid<Kernel>(arguments, arguments.scheduler.blocks(), device, stream);
}

}  // namespace sm80

template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm80(const FwdParams& params, int config_index, int device, cudaStream_t stream) {
  index_switch<std::size(kFwdTilesSm80)>(config_index, [&](auto index) {
    constexpr FwdConfigSm80 kConfig = kFwdTilesSm80[index()].config;
    if constexpr (kConfig.head_dim == kHeadDim) {
      sm80::launch<sm80::FwdKernel<sm80::FwdTraits<kDType, kConfig>, kMask>>(params, kMask, device,
                                                                             stream);
    }
  });
}

}  // namespace flash_cute
