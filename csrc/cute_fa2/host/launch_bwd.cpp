#include "host/launch_bwd.h"

#include "generated/variants.inc"
#include "static_switch.h"

namespace flash_cute {

void launch_bwd(const BwdPlan& plan, BwdParams params, void* workspace, int device,
                cudaStream_t stream) {
  params.m_blocks = plan.m_blocks;
  params.n_blocks = plan.n_blocks;
  params.head_splits = plan.head_splits;
  params.workspace = place_workspace(plan, params, workspace);
  launch_preprocess(params, plan, device, stream);
  head_dim_switch<kBuiltHeadDims>(plan.head_dim, [&](auto head_dim) {
    dtype_switch(params.dtype, [&](auto dtype) {
      mask_switch(params.mask, [&](auto mask) {
        if (plan.arch == Arch::kSm80) {
          launch_bwd_sm80<dtype(), head_dim(), mask()>(plan, params, device, stream);
        } else if constexpr (kSm90IsBuilt) {
          launch_bwd_sm90<dtype(), head_dim(), mask()>(plan, params, device, stream);
        }
      });
    });
  });
}

}  // namespace flash_cute
