// The host side of csrc/cute_fa2/common/grid.h: the same name, on the emulated machine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "machine.h"

namespace flash_cute {

template <class Kernel>
void run_grid(const typename Kernel::Arguments& arguments, int64_t ctas, int, cudaStream_t,
              bool = false) {
  using Traits = typename Kernel::Traits;
  using SharedMemory = typename Traits::SharedMemory;
  auto run = [](const void* arguments, void* smem) {
    Kernel::run(*static_cast<const typename Kernel::Arguments*>(arguments),
                *static_cast<SharedMemory*>(smem));
  };
  emulator::run_grid(ctas, Traits::kThreads, sizeof(SharedMemory), run, &arguments,
                     sizeof arguments);
}

}  // namespace flash_cute
