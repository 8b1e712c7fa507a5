// From the plan of a backward to running kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "host/params.h"
#include "host/plan_bwd.h"

namespace flash_cute {

// Launches the plan of `params` on `stream` of `device`, which is the current device. `workspace`
// is 16-byte aligned memory of the device, of plan.workspace_bytes, for these kernels alone.
void launch_bwd(const BwdPlan& plan, BwdParams params, void* workspace, int device,
                cudaStream_t stream);

// Runs ahead of the tiles: statistics, and sums and counters that begin as 0
// (preprocess/launch.cu).
void launch_preprocess(const BwdParams& params, const BwdPlan& plan, int device,
                       cudaStream_t stream);

// The gradient of a sink, of what the former has found (sink_gradient/launch.cu).
void launch_sink_gradient(const BwdParams& params, const BwdPlan& plan, int device,
                          cudaStream_t stream);

// Instantiated in the generated files; defined in smXX/bwd/launch.h and sm80/bwd/large/launch.h.
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_bwd_sm80(const BwdPlan& plan, const BwdParams& params, int device, cudaStream_t stream);
// The gradient of a bias, behind the kernels of either arch.
template <DType kDType, int kHeadDim>
void launch_bias_gradient_sm80(const BwdPlan& plan, const BwdParams& params, int device,
                               cudaStream_t stream);
template <DType kDType, int kColumns>
void launch_bwd_sm80_large(const BwdPlan& plan, const BwdParams& params, int device,
                           cudaStream_t stream);
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_bwd_sm90(const BwdPlan& plan, const BwdParams& params, int device, cudaStream_t stream);

}  // namespace flash_cute
