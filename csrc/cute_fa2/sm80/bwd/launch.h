// From a plan to the running kernels of an SM80 backward. Included by the generated instantiation
// files alone.
#pragma once

#include <iterator>

#include "common/grid.h"
#include "host/launch_bwd.h"
#include "sm80/bwd/bias_gradient.h"
#include "sm80/bwd/kernel.h"
#include "static_switch.h"
#include "tiles/bwd_sm80.h"

namespace flash_cute {

namespace sm80 {

template <class Traits, class TiledMma, class Shape>
void launch_convert(const TensorView<void*>& gradient, const float* sums, const BwdParams& params,
                    int splits, int heads, int blocks, int rows, int columns, float factor,
                    int device, cudaStream_t stream) {
  using Kernel = ConvertKernel<Traits, TiledMma, Shape>;
  // Blocks of packed sequences are of all together.
  const int64_t tiles = int64_t{params.is_packed() ? 1 : params.batch} * heads * blocks;
  run_grid<Kernel>({gradient, sums, splits, tiles, cutlass::FastDivmod(blocks),
                    cutlass::FastDivmod(heads), rows, columns, factor, params.row_blocks},
                   tiles, device, stream);
}

template <class Traits, MaskKind kMask>
void launch_bwd(const BwdPlan& plan, const BwdParams& params, int device, cudaStream_t stream) {
  const int heads_kv = params.heads_kv(), n_blocks = params.n_blocks;
  const BwdArguments arguments = {params, TileDecoder(plan.order, heads_kv, params.batch),
                                  static_cast<int>(ceil_div(params.group_size, plan.head_splits)),
                                  heads_kv,
                                  PackedTiles(params.key_tiles, heads_kv, plan.order.head_group)};
  run_grid<BwdKernel<Traits, kMask>>(arguments, plan.ctas, device, stream);
  const float scale = params.scale.scale;
  if (params.workspace.dq) {
    launch_convert<Traits, typename Traits::TiledMmaDq, typename Traits::ShapeQ>(
        params.dq, params.workspace.dq, params, 1, params.heads_q, params.m_blocks, params.len_q,
        params.head_dim, scale, device, stream);
  }
  if (params.workspace.dk) {
    using TiledMma = typename Traits::TiledMmaDkv;
    launch_convert<Traits, TiledMma, typename Traits::ShapeK>(
        params.dk, params.workspace.dk, params, plan.head_splits, heads_kv, n_blocks, params.len_k,
        params.head_dim, scale, device, stream);
    launch_convert<Traits, TiledMma, typename Traits::ShapeV>(
        params.dv, params.workspace.dv, params, plan.head_splits, heads_kv, n_blocks, params.len_k,
        params.head_dim_v, 1.f, device, stream);
  }
}

}  // namespace sm80

template <DType kDType, int kHeadDim>
void launch_bias_gradient_sm80(const BwdPlan& plan, const BwdParams& params, int device,
                               cudaStream_t stream) {
  using Kernel = sm80::BiasGradientKernel<sm80::BiasGradientTraits<kDType, kHeadDim>>;
  const typename Kernel::Arguments arguments(params, plan.bias_splits, plan.block_m);
  run_grid<Kernel>(arguments, arguments.ctas(), device, stream);
  if (plan.bias_splits > 1) {
    using SumKernel = sm80::BiasSumKernel<ElementOf<kDType>>;
    const typename SumKernel::Arguments of_sum = {params.dbias, params.workspace.dbias,
                                                  plan.bias_splits};
    run_grid<SumKernel>(of_sum, of_sum.ctas(), device, stream);
  }
}

template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_bwd_sm80(const BwdPlan& plan, const BwdParams& params, int device,
                     cudaStream_t stream) {
  constexpr auto kTiles = bwd_tiles_sm80(bytes_of(kDType));
  index_switch<kTiles.size()>(plan.tile, [&](auto index) {
    constexpr BwdConfigSm80 kConfig = bwd_tiles_sm80(bytes_of(kDType))[index()].config;
    if constexpr (kConfig.head_dim == kHeadDim) {
      sm80::launch_bwd<sm80::BwdTraits<kDType, kConfig>, kMask>(plan, params, device, stream);
    }
  });
}

}  // namespace flash_cute
