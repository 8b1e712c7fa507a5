#include "host/launch_fwd.h"

#include "generated/variants.inc"
#include "host/launch_blocks.h"
#include "static_switch.h"
#include "tiles/fwd_sm90.h"

namespace flash_cute {

void launch_fwd(const FwdPlan& plan, FwdParams params, void* workspace, int device,
                cudaStream_t stream) {
  place_workspace(plan, params, workspace);
  const bool is_split = plan.splits.count > 1;
  if (params.tiles.sorted) {
    BlockRequests requests;
    requests.add(
        {.list = params.tiles,
         .sides = {.rows = plan.schedule.block_m >> plan.gqa.log2_rows, .other_rows = plan.block_n},
         .sorts = true,
         .index_rows = plan.schedule.block_m,
         .splits = plan.splits.count,
         .split_blocks = static_cast<int>(ceil_div(plan.splits.keys, plan.block_n))});
    if (is_split) {  // all rows are written by the combine kernel
      requests.stats = params.splits.stats.data;
      requests.stats_count = plan.splits.count * params.rows();
    } else {
      requests.add_unused(params.out, params.dtype, params.heads_q, params.head_dim_v, false);
      requests.add_unused_lse(params.lse, params.heads_q);
    }
    launch_blocks(params, requests, device, stream);
  }
  const auto launch_sm80 = [&](auto dtype, auto head_dim) {
    mask_switch(params.mask, [&](auto mask) {
      launch_fwd_sm80<dtype(), head_dim(), mask()>(plan, params, device, stream);
    });
  };
  if (params.dtype == DType::kFloat) {
    built_switch<kBuiltFp32HeadDims>(
        plan.head_dim, [&](auto head_dim) { launch_sm80(Constant<DType::kFloat>{}, head_dim); });
  } else if (plan.arch == Arch::kSm80) {
    built_switch<kBuiltHalfDtypes>(params.dtype, [&](auto dtype) {
      const auto launch = [&](auto head_dim) { launch_sm80(dtype, head_dim); };
      built_switch<kBuiltHeadDims>(plan.head_dim, launch);
      built_switch<kBuiltLargeHeadDims>(plan.head_dim, launch);
    });
  } else if constexpr (kSm90IsBuilt) {
    built_switch<kBuiltHalfDtypes>(params.dtype, [&](auto dtype) {
      mask_switch(params.mask, [&](auto mask) {
        built_switch<kBuiltHeadDims>(plan.head_dim, [&](auto head_dim) {
          // The kernels for splits serve any mask, but changed scores, which have none.
          constexpr MaskKind kOfSplits =
              has_sequences(mask()) ? MaskKind::kPacked : MaskKind::kBanded;
          if (is_split) {
            launch_fwd_sm90<dtype(), head_dim(), kOfSplits, true>(plan, params, device, stream);
          } else {
            launch_fwd_sm90<dtype(), head_dim(), mask(), false>(plan, params, device, stream);
          }
        });
        built_switch<kBuiltLargeHeadDims>(plan.head_dim, [&](auto head_dim) {
          if constexpr (has_fwd_sm90(head_dim(), mask())) {
            launch_fwd_sm90<dtype(), head_dim(), mask(), false>(plan, params, device, stream);
          }
        });
      });
    });
  }
  if (is_split) launch_combine(params, device, stream);
}

}  // namespace flash_cute
