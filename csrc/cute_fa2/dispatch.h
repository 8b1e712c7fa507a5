// What lies between the binding and the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

#include "params.h"

namespace flash_cute {

// How a call is served, where that is not left open by a 0.
struct Choices {
  int64_t arch = 0;        // whose kernels: 80 or 90
  int64_t smem_limit = 0;  // by how many bytes of shared memory, lent to a block, the SM80 tile is
                           // chosen, if the device lends as many
  int64_t splits = 0;      // into at most how many parts the keys are split
};

// Gives `bytes` of the device's memory, 16-byte aligned, that nothing else may use until the
// kernels which this call launches are done.
using Allocate = std::function<void*(int64_t bytes)>;

// Launches the forward on `stream` of `device`, which is the current device. Where no architecture
// is chosen, the kernels run that are the device's by default, if they can read the call. Throws
// std::runtime_error if this build cannot serve the call or CUDA refuses it.
void launch_fwd(const FwdParams& params, DType dtype, MaskKind mask, const Choices& choices,
                int device, cudaStream_t stream, const Allocate& allocate);

// JSON for Python: what was built, and the rows of the tile table that a device with that limit
// gets.
std::string build_info();
std::string tiles_for(int64_t smem_limit);

// One instantiation for each generated file; defined in smXX/launch.h.
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm80(const FwdParams& params, int config_index, int device, cudaStream_t stream);
template <DType kDType, int kHeadDim, MaskKind kMask, bool kSplits>
void launch_fwd_sm90(const FwdParams& params, int config_index, int device, cudaStream_t stream);

}  // namespace flash_cute
