// The second kernel of split-KV, launched while the first one runs.
#pragma once

#include "combine/kernel.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <DType kDType>
struct OverlappingCombineKernel : CombineKernel<kDType> {
  using typename CombineKernel<kDType>::Arguments;
  using typename CombineKernel<kDType>::Traits;

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    hopper::wait_for_kernel_before();
    CombineKernel<kDType>::run(arguments, smem);
  }
};

}  // namespace flash_cute::sm90
