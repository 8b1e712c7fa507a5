#include "host/launch_fwd.h"

#include "generated/variants.inc"
#include "host/split_kv.h"
#include "static_switch.h"

namespace flash_cute {

void launch_fwd(const FwdPlan& plan, FwdParams params, void* workspace, int device,
                cudaStream_t stream) {
  params.splits = plan.splits;
  const bool is_split = plan.splits.count > 1;
  if (is_split) place_splits(params.splits, params, workspace);
  head_dim_switch<kBuiltHeadDims>(plan.head_dim, [&](auto head_dim) {
    dtype_switch(params.dtype, [&](auto dtype) {
      mask_switch(params.mask, [&](auto mask) {
        if (plan.arch == Arch::kSm80) {
          launch_fwd_sm80<dtype(), head_dim(), mask()>(plan, params, device, stream);
        } else if constexpr (kSm90IsBuilt) {
          // The kernels for splits serve any mask.
          if (is_split) {
            launch_fwd_sm90<dtype(), head_dim(), MaskKind::kBanded, true>(plan, params, device,
                                                                          stream);
          } else {
            launch_fwd_sm90<dtype(), head_dim(), mask(), false>(plan, params, device, stream);
          }
        }
      });
    });
  });
  if (is_split) launch_combine(params, device, stream);
}

}  // namespace flash_cute
