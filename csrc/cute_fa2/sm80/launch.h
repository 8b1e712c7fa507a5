// From parameters to a running SM80 kernel. Included by the generated instantiation files alone.
#pragma once

#include <iterator>

#include "common/grid.h"
#include "config.h"
#include "device.h"
#include "dispatch.h"
#include "sm80/fwd_kernel.h"
#include "static_switch.h"

namespace flash_cute {
namespace sm80 {

template <class Kernel>
void launch(const FwdParams& params, MaskKind mask, int device, cudaStream_t stream) {
  constexpr int kBlockM = Kernel::Traits::kBlockM;
  const QueryRows query_rows = QueryRows::make(params, kBlockM);
  check_grid(query_rows.tiles(params, kBlockM) * params.splits.count);
  const Arguments arguments = {
      params, query_rows, Schedule::make(params, query_rows, mask, kBlockM, l2_bytes_of(device))};
  run_grid<Kernel>(arguments, arguments.schedule.blocks(), device, stream);
}

}  // namespace sm80

template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm80(const FwdParams& params, int config_index, int device, cudaStream_t stream) {
  index_switch<std::size(kFwdSm80)>(config_index, [&](auto index) {
    constexpr FwdConfig kConfig = kFwdSm80[index()].config;
    if constexpr (kConfig.head_dim == kHeadDim) {
      sm80::launch<sm80::FwdKernel<sm80::FwdTraits<kDType, kConfig>, kMask>>(params, kMask, device,
                                                                             stream);
    }
  });
}

}  // namespace flash_cute
