// From a plan to the running kernels of an SM80 backward above head dim 256, or in fp32. Included
// by the generated instantiation files alone.
#pragma once

#include "common/grid.h"
#include "host/launch_bwd.h"
#include "sm80/bwd/large/bias_gradient.h"
#include "sm80/bwd/large/kernel.h"
#include "static_switch.h"
#include "tiles/bwd_sm80_large.h"

namespace flash_cute {

namespace sm80 {

template <class Traits>
void launch_bwd_large(const BwdPlan& plan, BwdParams params, int device, cudaStream_t stream) {
  const int heads_kv = params.heads_kv();
  if (!params.is_packed()) {
    params.band.begin -= params.len_k - params.len_q;
    params.band.end -= params.len_k - params.len_q;
  }
  const auto run = [&]<Gradient kOf>(Constant<kOf>, const TileOrder& order, int64_t tiles,
                                     const BlockList& list, int heads, int columns) {
    const int64_t groups = ceil_div(columns, Traits::kColumns);
    run_grid<LargeBwdKernel<Traits, kOf>>(
        {params, TileDecoder(order, heads, params.batch),
         PackedTiles(list, heads, order.head_group), cutlass::FastDivmod(static_cast<int>(groups)),
         cutlass::FastDivmod(params.group_size)},
        tiles * groups, device, stream);
  };
  run(Constant<Gradient::kDv>{}, plan.order, plan.ctas, params.key_tiles, heads_kv,
      params.head_dim_v);
  run(Constant<Gradient::kDk>{}, plan.order, plan.ctas, params.key_tiles, heads_kv,
      params.head_dim);
  run(Constant<Gradient::kDq>{}, plan.dq_order, plan.dq_order.tiles(), params.dq_tiles,
      params.heads_q, params.head_dim);
  if (params.dbias.data) {
    using Kernel = LargeBiasGradientKernel<Traits>;
    const typename Kernel::Arguments of_bias(params, plan.bias_splits, plan.block_m);
    run_grid<Kernel>(of_bias, of_bias.ctas(), device, stream);
  }
}

}  // namespace sm80

template <DType kDType, int kColumns>
void launch_bwd_sm80_large(const BwdPlan& plan, const BwdParams& params, int device,
                           cudaStream_t stream) {
  constexpr auto kTiles = large_bwd_tiles_sm80(bytes_of(kDType));
  index_switch<kTiles.size()>(plan.tile, [&](auto index) {
    constexpr LargeBwdConfigSm80 kConfig = large_bwd_tiles_sm80(bytes_of(kDType))[index()].config;
    if constexpr (kConfig.columns == kColumns) {
      sm80::launch_bwd_large<sm80::LargeBwdTraits<kDType, kConfig>>(plan, params, device, stream);
    }
  });
}

}  // namespace flash_cute
