// From parameters to a running SM80 kernel. Included by the generated instantiation files alone.
#pragma once

#include <cuda_runtime.h>

#include "config.h"
#include "dispatch.h"
#include "sm80/arguments.h"
#include "sm80/fwd_kernel.h"

namespace flash_cute {
namespace sm80 {

#ifdef __CUDACC__
template <class Kernel>
__global__ void __launch_bounds__(Kernel::Traits::kThreads)
    fwd_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(128) unsigned char smem[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Traits::SharedMemory*>(smem));
}
#endif

template <class Kernel>
void launch(const FwdParams& params, int device, cudaStream_t stream) {
  using Traits = typename Kernel::Traits;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedMemory);
  const Arguments arguments = {params, QueryRows::make(params, Traits::kBlockM, Traits::kBlockM)};
  const int64_t blocks = Kernel::Schedule::grid_size(params, arguments.rows, Traits::kBlockM);
  check_grid(blocks);
#ifndef __CUDACC__
  auto kernel = [](const void* arguments, void* smem) {
    Kernel::run(*static_cast<const Arguments*>(arguments),
                *static_cast<typename Traits::SharedMemory*>(smem));
  };
  emulator::run_grid(blocks, Traits::kThreads, kSmemBytes, kernel, &arguments, sizeof arguments);
#else
  if constexpr (kSmemBytes >
                48 * 1024) {  // more than 48 KB has to be asked for, once for each device
    static DeviceFlags asked_for;
    if (!asked_for.test(device)) {
      check_cuda(cudaFuncSetAttribute(fwd_kernel<Kernel>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
      asked_for.set(device);
    }
  }
  fwd_kernel<Kernel>
      <<<static_cast<unsigned>(blocks), Traits::kThreads, kSmemBytes, stream>>>(arguments);
  check_cuda(cudaGetLastError());
#endif
}

}  // namespace sm80

template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm80(const FwdParams& params, int config_index, int device, cudaStream_t stream) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    (
        [&] {
          if constexpr (kFwdSm80[I].config.head_dim == kHeadDim) {
            if (config_index == I) {
              sm80::launch<sm80::FwdKernel<sm80::FwdTraits<kDType, kFwdSm80[I].config>, kMask>>(
                  params, device, stream);
            }
          }
        }(),
        ...);
  }(std::make_index_sequence<std::size(kFwdSm80)>{});
}

}  // namespace flash_cute
