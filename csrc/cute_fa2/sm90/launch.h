// From parameters to a running SM90 kernel. Included by the generated instantiation files alone.
#pragma once

#include <algorithm>
#include <iterator>

#include "common/grid.h"
#include "config.h"
#include "device.h"
#include "dispatch.h"
#include "sm90/fwd_kernel.h"
#include "sm90/tensor_map.h"
#include "static_switch.h"

namespace flash_cute {
namespace sm90 {

template <class Kernel>
void launch(const FwdParams& params, DType dtype, MaskKind mask, int device, cudaStream_t stream) {
  using Traits = typename Kernel::Traits;
  const QueryRows query_rows =
      QueryRows::make(params, Traits::kBlockM, most_rows_of_query_sm90(params));
  check_grid(query_rows.tiles(params, Traits::kBlockM) * params.splits.count);
  bind_context(device);
  auto map_keys = [&](const TensorView<const void*>& view) {
    return make_tensor_map(view, dtype, params.batch, params.heads_kv(), 1, params.len_k,
                           params.head_dim, 1, Traits::kBlockN, Traits::kStrip);
  };
  auto map_queries = [&](const auto& view, int box_rows) {
    const int heads_of_box = std::min(query_rows.rows_of_query(), box_rows);
    return make_tensor_map(view, dtype, params.batch, params.heads_q, query_rows.group(),
                           params.len_q, params.head_dim, heads_of_box, box_rows / heads_of_box,
                           Traits::kStrip);
  };
  const Arguments arguments = {
      map_queries(params.q, Traits::kConsumerRows),
      map_keys(params.k),
      map_keys(params.v),
      map_queries(params.out, Traits::kWarpRows),  // of keys in parts not used
      params,
      query_rows,
      Schedule::make(params, query_rows, mask, Traits::kBlockM, multiprocessors_of(device),
                     l2_bytes_of(device)),
  };
  run_grid<Kernel>(arguments, arguments.schedule.blocks(), device, stream);
}

}  // namespace sm90

template <DType kDType, int kHeadDim, MaskKind kMask, bool kSplits>
void launch_fwd_sm90(const FwdParams& params, int config_index, int device, cudaStream_t stream) {
  index_switch<std::size(kFwdSm90)>(config_index, [&](auto index) {
    constexpr FwdSm90Row kRow = kFwdSm90[index()];
    if constexpr (kRow.config.head_dim == kHeadDim &&
                  (kSplits ? kRow.splits : kRow.serves(kMask))) {
      sm90::launch<sm90::FwdKernel<sm90::FwdTraits<kDType, kRow.config, kSplits>, kMask>>(
          params, kDType, kMask, device, stream);
    }
  });
}

}  // namespace flash_cute
