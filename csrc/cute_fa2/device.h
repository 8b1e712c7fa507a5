// What the launch code asks of CUDA and of the device, and its refusals as sentences.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace flash_cute {

constexpr int kMaxDevices = 64;  // about any further one, nothing is remembered

// Throw std::runtime_error with a sentence that says what to do.
void check_cuda(cudaError_t status);
void check_grid(int64_t blocks);
void check_driver();

// What `device` has: the major number of its compute capability, multiprocessors, bytes of L2, and
// the bytes of shared memory that it lends to a block at most.
int compute_capability_major_of(int device);
int multiprocessors_of(int device);
int l2_bytes_of(int device);
int smem_limit_of(int device);

// A flag for each device. Setting one twice does no harm, so nothing is locked.
class DeviceFlags {
 public:
  bool test(int device) const {
    return device < kMaxDevices && (bits_.load(std::memory_order_relaxed) >> device & 1);
  }
  void set(int device) {
    if (device < kMaxDevices) bits_.fetch_or(uint64_t{1} << device, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> bits_{0};
  static_assert(kMaxDevices <= 64);
};

}  // namespace flash_cute
