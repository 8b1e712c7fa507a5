// From a plan to running kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "host/params.h"
#include "host/plan_fwd.h"

namespace flash_cute {

// Launches the plan of `params` on `stream` of `device`, which is the current device. `workspace`
// is 16-byte aligned memory of the device, of plan.workspace_bytes, for these kernels alone.
void launch_fwd(const FwdPlan& plan, FwdParams params, void* workspace, int device,
                cudaStream_t stream);

// Runs on the results of splits (combine/launch.cu).
void launch_combine(const FwdParams& params, int device, cudaStream_t stream);

// Instantiated in the generated files; defined in smXX/fwd/launch.h.
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm80(const FwdPlan& plan, const FwdParams& params, int device, cudaStream_t stream);
template <DType kDType, int kHeadDim, MaskKind kMask, bool kSplitKV>
void launch_fwd_sm90(const FwdPlan& plan, const FwdParams& params, int device, cudaStream_t stream);

}  // namespace flash_cute
