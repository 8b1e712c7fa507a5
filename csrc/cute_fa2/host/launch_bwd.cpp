#include "host/launch_bwd.h"

#include "generated/variants.inc"
#include "host/launch_blocks.h"
#include "static_switch.h"

namespace flash_cute {

void launch_bwd(const BwdPlan& plan, BwdParams params, void* workspace, int device,
                cudaStream_t stream) {
  place_workspace(plan, params, workspace);
  if (params.is_packed()) {
    BlockRequests requests;
    // sm80: sums that are in order are in that of the keys.
    requests.add(
        {.list = params.key_tiles,
         .sides = {.of_keys = true, .rows = plan.block_n, .other_rows = plan.block_m},
         .sorts = plan.dq_by != DqBy::kSums || plan.arch == Arch::kSm90 || !params.deterministic,
         .index_rows = plan.block_m});
    requests.row_blocks = {.blocks = params.row_blocks,
                           .count = plan.m_blocks,
                           .sides = {.rows = plan.block_m, .other_rows = plan.block_n}};
    if (plan.dq_blocks > 0) {
      requests.add({.list = params.dq_tiles,
                    .sides = {.rows = plan.dq_block_m, .other_rows = plan.block_n},
                    .sorts = true,
                    .index_rows = plan.block_m});
    }
    requests.add_unused(params.dq, params.dtype, params.heads_q, params.head_dim, false);
    requests.add_unused(params.dk, params.dtype, params.heads_kv(), params.head_dim, true);
    requests.add_unused(params.dv, params.dtype, params.heads_kv(), params.head_dim_v, true);
    launch_blocks(params, requests, device, stream);
  }
  launch_preprocess(params, plan, device, stream);
  if (params.dsink) launch_sink_gradient(params, plan, device, stream);
  if (params.len_k == 0) return;  // that of a sink alone was asked for
  if (params.dtype == DType::kFloat) {
    built_switch<kBuiltFp32HeadDims>(plan.columns, [&](auto columns) {
      launch_bwd_sm80_large<DType::kFloat, columns()>(plan, params, device, stream);
    });
    if (plan.columns > 0) return;
    built_switch<kBuiltFp32BwdHeadDims>(plan.head_dim, [&](auto head_dim) {
      mask_switch(params.mask, [&](auto mask) {
        launch_bwd_sm80<DType::kFloat, head_dim(), mask()>(plan, params, device, stream);
      });
    });
    return;
  }
  built_switch<kBuiltBwdColumns>(plan.columns, [&](auto columns) {
    built_switch<kBuiltHalfDtypes>(params.dtype, [&](auto dtype) {
      launch_bwd_sm80_large<dtype(), columns()>(plan, params, device, stream);
    });
  });
  built_switch<kBuiltHeadDims>(plan.head_dim, [&](auto head_dim) {
    built_switch<kBuiltHalfDtypes>(params.dtype, [&](auto dtype) {
      mask_switch(params.mask, [&](auto mask) {
        if (plan.arch == Arch::kSm80) {
          launch_bwd_sm80<dtype(), head_dim(), mask()>(plan, params, device, stream);
        } else if constexpr (kSm90IsBuilt) {
          launch_bwd_sm90<dtype(), head_dim(), mask()>(plan, params, device, stream);
        }
      });
      if (params.dbias.data) {
        launch_bias_gradient_sm80<dtype(), head_dim()>(plan, params, device, stream);
      }
    });
  });
}

}  // namespace flash_cute
