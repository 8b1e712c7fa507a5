// Runs a kernel on a grid of CTAs. Included by what launches kernels alone.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include "emulated_grid.h"  // the same name for the CPU: tests/emulator
#else

#include <cuda_runtime.h>

#include "host/device.h"

namespace flash_cute {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Traits::kThreads, Kernel::Traits::kMinCtas)
    flash_cute_kernel(const __grid_constant__ typename Kernel::Arguments arguments) {
  // The widest swizzle wants this alignment.
  extern __shared__ __align__(1024) unsigned char smem[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Traits::SharedMemory*>(smem));
}

// Runs Kernel::run(arguments, shared memory) in each thread of `ctas` CTAs. `overlaps`: its CTAs
// may begin once all those of the kernel before have called platform::let_next_begin or ended, so
// its launch costs less. Each calls platform::wait_for_kernel_before, ahead of what it reads of it,
// or at its end. Code from PTX older than sm_90's cannot wait: then nothing overlaps.
template <class Kernel>
void run_grid(const typename Kernel::Arguments& arguments, int64_t ctas, int device,
              cudaStream_t stream, bool overlaps = false) {
  using Traits = typename Kernel::Traits;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedMemory);
  static DeviceFlags is_known, can_wait;
  bool waits = can_wait.test(device);
  if (!is_known.test(device)) {
    cudaFuncAttributes code{};
    check_cuda(cudaFuncGetAttributes(&code, flash_cute_kernel<Kernel>));
    waits = code.ptxVersion >= 90;
    if (waits) can_wait.set(device);
    if constexpr (kSmemBytes > 48 * 1024) {  // CUDA wants to be asked
      check_cuda(cudaFuncSetAttribute(flash_cute_kernel<Kernel>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
    }
    is_known.set(device);
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(ctas);
  config.blockDim = Traits::kThreads;
  config.dynamicSmemBytes = kSmemBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps && waits ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, flash_cute_kernel<Kernel>, arguments));
}

}  // namespace flash_cute

#endif  // __CUDACC__
