// What the host asks of CUDA and of the device, and its refusals as sentences.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace flash_cute {

constexpr int kMaxDevices = 64;  // about any further one, nothing is remembered

struct DeviceProperties {
  int compute_capability_major;
  int multiprocessors;
  int l2_bytes;
  int smem_per_cta;  // what the device lends to one CTA at most
};

DeviceProperties properties_of(int device);

// Throw std::runtime_error with a sentence that says what to do.
void check_cuda(cudaError_t status);
void check_driver();

// A flag for each device. Setting one twice does no harm, so nothing is locked.
class DeviceFlags {
 public:
  bool test(int device) const {
    return device < kMaxDevices && (bits_.load(std::memory_order_acquire) >> device & 1);
  }
  void set(int device) {
    if (device < kMaxDevices) bits_.fetch_or(uint64_t{1} << device, std::memory_order_release);
  }

 private:
  std::atomic<uint64_t> bits_{0};
  static_assert(kMaxDevices <= 64);
};

}  // namespace flash_cute
