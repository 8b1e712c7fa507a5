// From a plan to the running kernels of an SM90 backward. Included by the generated instantiation
// files alone.
#pragma once

#include <iterator>

#include "common/grid.h"
#include "host/launch_bwd.h"
#include "sm90/bwd/kernel.h"
#include "static_switch.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute {

namespace sm90 {

template <class Kernel>
void launch_convert(const TensorView<void*>& gradient, const float* sums, const BwdParams& params,
                    int splits, int heads, int blocks, int rows, int columns, float factor,
                    int device, cudaStream_t stream) {
  const int64_t tiles = int64_t{params.batch} * heads * blocks;
  run_grid<Kernel>({gradient, sums, splits, tiles, cutlass::FastDivmod(blocks),
                    cutlass::FastDivmod(heads), rows, columns, factor},
                   tiles, device, stream);
}

template <class Traits, MaskKind kMask>
void launch_bwd(const BwdPlan& plan, const BwdParams& params, int device, cudaStream_t stream) {
  using Element = typename Traits::Element;
  const int heads_kv = params.heads_kv(), n_blocks = params.n_blocks;
  const BwdArguments arguments = {
      plan.tensor_maps, params, TileDecoder(plan.order, heads_kv, params.batch),
      static_cast<int>(ceil_div(params.group_size, plan.head_splits)), heads_kv};
  run_grid<BwdKernel<Traits, kMask>>(arguments, plan.order.tiles(), device, stream);
  const float scale = params.scale.scale;
  if (params.workspace.dq) {
    launch_convert<ConvertKernel<Element, typename Traits::MmaDq, typename Traits::ShapeQ, 1>>(
        params.dq, params.workspace.dq, params, 1, params.heads_q, params.m_blocks, params.len_q,
        params.head_dim, scale, device, stream);
  }
  if (params.workspace.dk) {
    launch_convert<ConvertKernel<Element, typename Traits::MmaDk, typename Traits::ShapeDk,
                                 Traits::kConsumers>>(
        params.dk, params.workspace.dk, params, plan.head_splits, heads_kv, n_blocks, params.len_k,
        params.head_dim, scale, device, stream);
    launch_convert<ConvertKernel<Element, typename Traits::MmaDv, typename Traits::ShapeDv,
                                 Traits::kConsumers>>(
        params.dv, params.workspace.dv, params, plan.head_splits, heads_kv, n_blocks, params.len_k,
        params.head_dim_v, 1.f, device, stream);
  }
}

}  // namespace sm90

template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_bwd_sm90(const BwdPlan& plan, const BwdParams& params, int device,
                     cudaStream_t stream) {
  index_switch<std::size(kBwdTilesSm90)>(plan.tile, [&](auto index) {
    constexpr BwdConfigSm90 kConfig = kBwdTilesSm90[index()];
    if constexpr (kConfig.head_dim == kHeadDim) {
      sm90::launch_bwd<sm90::BwdTraits<kDType, kConfig>, kMask>(plan, params, device, stream);
    }
  });
}

}  // namespace flash_cute
