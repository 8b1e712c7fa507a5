// What lies between the binding and the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "params.h"

namespace flash_cute {

// Launches the forward on `stream` of `device`, which is the current device. `arch` names the
// kernels, 80 or 90; where it is 0, those that are the device's by default run if they can read the
// call. The SM80 tile is chosen as if the device lent `smem_limit` bytes of shared memory to a
// block, or by what it really lends where `smem_limit` is 0. Throws std::runtime_error if this
// build cannot serve the call or CUDA refuses it.
void launch_fwd(const FwdParams& params, DType dtype, MaskKind mask, int64_t smem_limit,
                int64_t arch, int device, cudaStream_t stream);

// JSON for Python: what was built, and the rows of the tile table that a device with that limit
// gets.
std::string build_info();
std::string tiles_for(int64_t smem_limit);

// One instantiation for each generated file; defined in smXX/launch.h.
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm80(const FwdParams& params, int config_index, int device, cudaStream_t stream);
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm90(const FwdParams& params, int config_index, int device, cudaStream_t stream);

}  // namespace flash_cute
