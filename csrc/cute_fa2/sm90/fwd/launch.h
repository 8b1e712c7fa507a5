// From parameters to a running SM90 kernel. Included by the generated instantiation files alone.
#pragma once

#include <algorithm>
#include <iterator>

#include "common/grid.h"
#include "config.h"
#include "device.h"
#include "dispatch.h"
#include "sm90/fwd/kernel.h"
#include "sm90/tensor_map.h"
#include "static_switch.h"

namespace flash_cute {
namespace sm90 {

template <class Kernel>
void launch(const FwdParams& params, DType dtype, MaskKind mask, int device, cudaStream_t stream) {
  using Traits = typename Kernel::Traits;
  const PackGqa pack_gqa = PackGqa::make(params, Traits::kBlockM, most_rows_of_query_sm90(params));
  check_grid(pack_gqa.tiles(params, Traits::kBlockM) * params.splits.count);
  bind_context(device);
  auto map_keys = [&](const TensorView<const void*>& view) {
    return make_tensor_map(view, dtype, params.batch, params.heads_kv(), 1, params.len_k,
                           params.head_dim, 1, Traits::kBlockN, Traits::kStrip);
  };
  auto map_queries = [&](const auto& view, int box_rows) {
    const int heads_of_box = std::min(pack_gqa.rows_of_query(), box_rows);
    return make_tensor_map(view, dtype, params.batch, params.heads_q, pack_gqa.group(),
                           params.len_q, params.head_dim, heads_of_box, box_rows / heads_of_box,
                           Traits::kStrip);
  };
  const Arguments arguments = {
      map_queries(params.q, Traits::kConsumerRows),
      map_keys(params.k),
      map_keys(params.v),
      map_queries(params.out, Traits::kWarpRows),  // of keys in parts not used
      params,
      pack_gqa,
      TileScheduler::make(params, pack_gqa, mask, Traits::kBlockM, multiprocessors_of(device),
                          l2_bytes_of(device)),
  };
  run_grid<Kernel>(arguments, arguments.scheduler.blocks(), device, stream);
}

}  // namespace sm90

template <DType kDType, int kHeadDim, MaskKind kMask, bool kSplits>
void launch_fwd_sm90(const FwdParams& params, int config_index, int device, cudaStream_t stream) {
  index_switch<std::size(kFwdTilesSm90)>(config_index, [&](auto index) {
    constexpr TileEntrySm90 kRow = kFwdTilesSm90[index()];
    if constexpr (kRow.config.head_dim == kHeadDim &&
                  (kSplits ? kRow.splits : kRow.serves(kMask))) {
      sm90::launch<sm90::FwdKernel<sm90::FwdTraits<kDType, kRow.config, kSplits>, kMask>>(
          params, kDType, kMask, device, stream);
    }
  });
}

}  // namespace flash_cute
