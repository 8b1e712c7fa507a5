// Picks the architecture, the row of the tile table and the variant for a call, and tells Python
// what there is to pick from.
#include "dispatch.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "config.h"
#include "generated/variants.inc"
#include "static_switch.h"

#ifndef FLASH_CUTE_ARCHS
#error "FLASH_CUTE_ARCHS names the built architectures, separated by spaces"
#endif

namespace flash_cute {
namespace {

constexpr int kMaxDevices = 64;

// What `device` lends a block at most; asked of the driver once.
int smem_limit_of(int device) {
  static std::atomic<int> known[kMaxDevices];
  int limit = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (limit == 0) {
    check_cuda(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (device < kMaxDevices) known[device].store(limit, std::memory_order_relaxed);
  }
  return limit;
}

std::string row_as_json(const FwdRow& row) {
  const FwdConfig& config = row.config;
  auto field = [](const char* name, int value) {
    return ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  return "{\"arch\": \"sm80\", \"op\": \"fwd\"" + field("head_dim", config.head_dim) +
         field("block_m", config.block_m) + field("block_n", config.block_n) +
         field("warps", config.warps) + field("smem_bytes", config.smem_bytes()) +
         field("stages", config.stages) + field("blocks_per_sm", row.blocks_per_sm) +
         field("max_registers", row.max_registers()) + "}";
}

bool is_built(int head_dim) {
  for (int built : kBuiltHeadDims) {
    if (built == head_dim) return true;
  }
  return false;
}

std::string in_brackets(const std::string& items) { return "[" + items + "]"; }

void append(std::string& items, const std::string& item) {
  items += items.empty() ? item : ", " + item;
}

}  // namespace

void launch_fwd(const FwdParams& params, DType dtype, MaskKind mask, int64_t smem_limit, int device,
                cudaStream_t stream) {
  const int limit = smem_limit > 0
                        ? static_cast<int>(std::min<int64_t>(smem_limit, smem_limit_of(device)))
                        : smem_limit_of(device);
  head_dim_switch<kBuiltHeadDims>(params.head_dim, [&](auto head_dim) {
    const int config_index = select_fwd_sm80(head_dim, limit);
    if (config_index < 0) {
      throw std::runtime_error("flash_cute: no tile for head dim " +
                               std::to_string(params.head_dim) + " fits " + std::to_string(limit) +
                               " bytes of shared memory");
    }
    dtype_switch(dtype, [&](auto dtype_constant) {
      mask_switch(mask, [&](auto mask_constant) {
        launch_fwd_sm80<dtype_constant(), head_dim(), mask_constant()>(params, config_index, device,
                                                                       stream);
      });
    });
  });
}

std::string build_info() {
  std::string archs, head_dims, tiles;
  const std::string names = FLASH_CUTE_ARCHS;
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(' ', begin), names.size());
    append(archs, "\"" + names.substr(begin, end - begin) + "\"");
    begin = end + 1;
  }
  for (int head_dim : kBuiltHeadDims) append(head_dims, std::to_string(head_dim));
  for (const FwdRow& row : kFwdSm80) {
    if (is_built(row.config.head_dim)) append(tiles, row_as_json(row));
  }
  return "{\"cuda_runtime\": " + std::to_string(CUDART_VERSION) +
         ", \"archs\": " + in_brackets(archs) + ", \"head_dims\": " + in_brackets(head_dims) +
         ", \"tiles\": " + in_brackets(tiles) + "}";
}

std::string tiles_for(int64_t smem_limit) {
  if (smem_limit < 0) {
    throw std::runtime_error("flash_cute: smem_limit is " + std::to_string(smem_limit) +
                             ": it must be a number of bytes");
  }
  std::string tiles;
  for (int head_dim : kBuiltHeadDims) {
    const int index =
        select_fwd_sm80(head_dim, static_cast<int>(std::min<int64_t>(smem_limit, INT32_MAX)));
    if (index >= 0) append(tiles, row_as_json(kFwdSm80[index]));
  }
  return in_brackets(tiles);
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

void check_grid(int64_t blocks) {
  if (blocks > INT32_MAX) {
    throw std::runtime_error(
        "flash_cute: batch x heads x query blocks is " + std::to_string(blocks) +
        ", more than the 2^31 - 1 blocks that one launch can have; split the batch");
  }
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
