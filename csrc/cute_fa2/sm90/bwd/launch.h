// From a plan to the running kernels of an SM90 backward. Included by the generated instantiation
// files alone.
#pragma once

#include <algorithm>
#include <iterator>

#include "common/grid.h"
#include "host/launch_bwd.h"
#include "sm90/bwd/convert.h"
#include "sm90/bwd/dkv/kernel.h"
#include "sm90/bwd/dq/kernel.h"
#include "sm90/bwd/kernel.h"
#include "sm90/bwd/window/kernel.h"
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

// Tiles of keys, and dK and dV of their sums.
template <class Traits, class Kernel>
void launch_keys(const BwdPlan& plan, const BwdArguments& arguments, int device,
                 cudaStream_t stream) {
  using Element = typename Traits::Element;
  constexpr int kParts = Traits::kBlockN / Traits::kConsumerKeys;
  using ConvertDk =
      ConvertKernel<Element, typename Traits::MmaDk, typename Traits::ShapeDk, kParts>;
  using ConvertDv =
      ConvertKernel<Element, typename Traits::MmaDv, typename Traits::ShapeDv, kParts>;
  const BwdParams& params = arguments.params;
  run_grid<Kernel>(arguments, plan.ctas, device, stream, /*overlaps=*/true);
  if (!params.workspace.dk) return;
  launch_convert<ConvertDk>(params.dk, params.workspace.dk, params, plan.head_splits,
                            arguments.heads_kv, params.n_blocks, params.len_k, params.head_dim,
                            params.scale.scale, device, stream);
  launch_convert<ConvertDv>(params.dv, params.workspace.dv, params, plan.head_splits,
                            arguments.heads_kv, params.n_blocks, params.len_k, params.head_dim_v,
                            1.f, device, stream);
}

template <DType kDType, BwdEntrySm90 kEntry, MaskKind kMask>
void launch_bwd(const BwdPlan& plan, const BwdParams& params, int device, cudaStream_t stream) {
  // Those of all tiles of a head of K: they share its blocks of dQ.
  const int64_t consumers =
      int64_t{plan.head_splits} * std::max(params.n_blocks, 1) * kEntry.keys.consumers;
  BwdArguments arguments = {
      plan.tensor_maps,
      params,
      TileDecoder(plan.order, params.heads_kv(), params.batch),
      cutlass::FastDivmod(params.m_blocks),
      cutlass::FastDivmod(params.heads_q),
      cutlass::FastDivmod(params.group_size),
      static_cast<int>(ceil_div(params.group_size, plan.head_splits)),
      params.heads_kv(),
      plan.dq_by,
      static_cast<int>(ceil_div(int64_t{params.group_size} * params.m_blocks, consumers)),
      plan.order.tiles(),
      plan.ctas,
      PackedTilesToEnd(params.key_tiles, params.heads_kv(), plan.order.head_group,
                       plan.order.first_head_group),
      plan.window};
  if constexpr (kEntry.has_window(kMask)) {
    if (plan.dq_by == DqBy::kWindow) {
      using Traits = WindowTraits<kDType, kEntry.window()>;
      return run_grid<WindowKernel<Traits, kMask>>(arguments, plan.ctas, device, stream,
                                                   /*overlaps=*/true);
    }
  }
  constexpr bool kReadsBias = kMask == MaskKind::kScored && kEntry.bias;
  if constexpr (kEntry.keys.is_one_pass()) {
    using Traits = BwdTraits<kDType, kEntry.keys, kReadsBias, kEntry.keys.staggers(kMask)>;
    launch_keys<Traits, BwdKernel<Traits, kMask>>(plan, arguments, device, stream);
  } else {
    using Traits = DkvTraits<kDType, kEntry.keys, kReadsBias>;
    launch_keys<Traits, DkvKernel<Traits, kMask>>(plan, arguments, device, stream);
  }
  if (plan.dq_by == DqBy::kOwnKernel) {
    arguments.decoder = TileDecoder(plan.dq_order, params.heads_q, params.batch);
    const int head_group = plan.dq_order.head_group;
    arguments.packed_tiles =
        PackedTilesToEnd(params.dq_tiles, params.heads_q, head_group, head_group);
    using Traits = DqTraits<kDType, kEntry.rows, kReadsBias>;
    run_grid<DqKernel<Traits, kMask>>(arguments, plan.dq_order.tiles(), device, stream,
                                      /*overlaps=*/true);
  }
}

}  // namespace sm90

template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_bwd_sm90(const BwdPlan& plan, const BwdParams& params, int device,
                     cudaStream_t stream) {
  index_switch<std::size(kBwdTilesSm90)>(plan.tile, [&](auto index) {
    constexpr BwdEntrySm90 kEntry = kBwdTilesSm90[index()];
    if constexpr (kEntry.head_dim() == kHeadDim) {
      sm90::launch_bwd<kDType, kEntry, kMask>(plan, params, device, stream);
    }
  });
}

}  // namespace flash_cute
