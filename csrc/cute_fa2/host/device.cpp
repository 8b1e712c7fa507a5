#include "host/device.h"

#include <stdexcept>
#include <string>

#ifndef FLASH_CUTE_ARCHS
#error "FLASH_CUTE_ARCHS names the built architectures, separated by spaces"
#endif

namespace flash_cute {
DeviceProperties properties_of(int device) {
  static DeviceProperties known[kMaxDevices];
  static DeviceFlags is_known;
  if (is_known.test(device)) return known[device];
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  const DeviceProperties found = {
      attribute(cudaDevAttrComputeCapabilityMajor), attribute(cudaDevAttrMultiProcessorCount),
      attribute(cudaDevAttrL2CacheSize), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
  if (device < kMaxDevices) {
    known[device] = found;  // the same by any thread
    is_known.set(device);
  }
  return found;
}

void check_cuda(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps an error until it is asked: the next call starts clean
  if (status == cudaErrorNoKernelImageForDevice) {
    throw std::runtime_error(
        "flash_cute: this build has no machine code for the GPU (it has " FLASH_CUTE_ARCHS
        "); build from source with FLASH_CUTE_ARCHS naming its compute capability");
  }
  throw std::runtime_error(std::string("flash_cute: CUDA error: ") + cudaGetErrorString(status));
}

void check_driver() {
  static std::atomic<bool> good{false};
  if (good.load(std::memory_order_relaxed)) return;
  int driver = 0;
  check_cuda(cudaDriverGetVersion(&driver));
  if (driver / 1000 < CUDART_VERSION / 1000) {
    auto version = [](int v) {
      return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
    };
    throw std::runtime_error(
        "flash_cute: this build carries the runtime of CUDA " + version(CUDART_VERSION) +
        ", but the NVIDIA driver supports CUDA " + version(driver) +
        " at most; update the driver (CUDA 13 needs 580 or newer) or build flash_cute from source "
        "with a CUDA " +
        std::to_string(driver / 1000) + " toolkit (12.4 or newer)");
  }
  good.store(true, std::memory_order_relaxed);
}

}  // namespace flash_cute
