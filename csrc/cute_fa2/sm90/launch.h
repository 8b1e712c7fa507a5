// From parameters to a running SM90 kernel. Included by the generated instantiation files alone.
#pragma once

#include <cuda_runtime.h>

#include "config.h"
#include "dispatch.h"
#include "sm90/arguments.h"
#include "sm90/fwd_kernel.h"
#include "sm90/tensor_map.h"

namespace flash_cute {
namespace sm90 {

#ifdef __CUDACC__
template <class Kernel>
__global__ void __launch_bounds__(Kernel::Traits::kThreads, 1)
    fwd_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Traits::SharedMemory*>(smem));
}
#endif

template <class Kernel>
void launch(const FwdParams& params, DType dtype, MaskKind mask, int device, cudaStream_t stream) {
  using Traits = typename Kernel::Traits;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedMemory);
  // Not more than if each head had its own.
  check_grid(static_cast<int64_t>((params.len_q + Traits::kBlockM - 1) / Traits::kBlockM) *
             params.heads_q * params.batch);
  // A consumer's rows are one box, in which an expanded dimension cannot be.
  const QueryRows rows =
      QueryRows::make(params, Traits::kBlockM, params.q.stride_head != 0 ? Traits::kRows : 1);
  const int heads_kv = params.heads_q / params.heads_per_kv_head;
  auto map_keys = [&](const TensorView<const void*>& view) {
    return make_tensor_map(view, dtype, params.batch, heads_kv, 1, params.len_k, params.head_dim, 1,
                           Traits::kBlockN, Traits::kStrip);
  };
  const Arguments arguments = {
      make_tensor_map(params.q, dtype, params.batch, params.heads_q, rows.group(), params.len_q,
                      params.head_dim, rows.rows_of_query(), Traits::kRows / rows.rows_of_query(),
                      Traits::kStrip),
      map_keys(params.k),
      map_keys(params.v),
      params,
      rows,
      Schedule::make(params, rows, mask, Traits::kBlockM, multiprocessors_of(device)),
  };
#ifndef __CUDACC__
  auto kernel = [](const void* arguments, void* smem) {
    Kernel::run(*static_cast<const Arguments*>(arguments),
                *static_cast<typename Traits::SharedMemory*>(smem));
  };
  emulator::run_grid(arguments.schedule.blocks(), Traits::kThreads, kSmemBytes, kernel, &arguments,
                     sizeof arguments);
#else
  static DeviceFlags asked_for;
  if (!asked_for.test(device)) {  // more than 48 KB has to be asked for, once for each device
    check_cuda(cudaFuncSetAttribute(fwd_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kSmemBytes));
    asked_for.set(device);
  }
  fwd_kernel<Kernel>
      <<<arguments.schedule.blocks(), Traits::kThreads, kSmemBytes, stream>>>(arguments);
  check_cuda(cudaGetLastError());
#endif
}

}  // namespace sm90

template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm90(const FwdParams& params, int config_index, int device, cudaStream_t stream) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    (
        [&] {
          if constexpr (kFwdSm90[I].config.head_dim == kHeadDim && kFwdSm90[I].serves(kMask)) {
            if (config_index == I) {
              sm90::launch<sm90::FwdKernel<sm90::FwdTraits<kDType, kFwdSm90[I].config>, kMask>>(
                  params, kDType, kMask, device, stream);
            }
          }
        }(),
        ...);
  }(std::make_index_sequence<std::size(kFwdSm90)>{});
}

}  // namespace flash_cute
