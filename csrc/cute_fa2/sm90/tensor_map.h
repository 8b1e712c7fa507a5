// Tensor maps: how the copy engine knows a tensor.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <exception>
#include <stdexcept>
#include <string>

#include "device.h"
#include "params.h"

namespace flash_cute::sm90 {

// A function of the driver, asked for by name, so that nothing links to libcuda.
template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
#else
  check_cuda(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    throw std::runtime_error(std::string("flash_cute: the NVIDIA driver has no ") + name);
  }
  return reinterpret_cast<Function*>(found);
}

// The driver's functions need a context. The runtime's bind that of the device to a new thread by
// themselves, but none may have been called there yet. Another that the caller has bound stays.
inline void bind_context(int device) {
  static const auto get_current = driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  if (get_current(&context) != CUDA_SUCCESS || context == nullptr) {
    check_cuda(cudaSetDevice(device));
  }
}

// The driver does not take what its documentation seems to allow. Nothing has been launched yet.
struct TensorMapRefused : std::exception {
  const char* what() const noexcept override { return "the driver refused a tensor map"; }
};

// Boxes of `box_rows` rows and a strip of the columns of a (batch, heads, rows, head_dim) tensor of
// 2-byte elements, permuted in shared memory as wgmma reads them. The map's dimensions are
// (head_dim, heads of a group, rows, groups, batch), and a box has `box_group` heads; without
// groups (1), the heads are the fourth. An expanded dimension counts once. Of a dimension that has
// one step the stride means nothing: it is that of the one before, because the driver's
// documentation wants strides that are multiples of those before, as they are for dense tensors.
template <class Pointer>
CUtensorMap make_tensor_map(const TensorView<Pointer>& view, DType dtype, int batch, int heads,
                            int group, int rows, int head_dim, int box_group, int box_rows,
                            int strip) {
  struct Dimension {
    int64_t stride;
    int size;
    int box;
  };
  const Dimension dimensions[5] = {{1, head_dim, strip},
                                   {view.stride_head, group, box_group},
                                   {view.stride_row, rows, box_rows},
                                   {view.stride_head * group, heads / group, 1},
                                   {view.stride_batch, batch, 1}};
  cuuint64_t sizes[5], strides[5];  // strides in bytes
  cuuint32_t box[5];
  for (int i = 0; i < 5; ++i) {
    const auto [stride, size, box_size] = dimensions[i];
    const bool one_step = stride == 0 || size == 1;
    sizes[i] = one_step ? 1 : size;
    strides[i] = !one_step ? 2 * stride : i <= 1 ? 2 * head_dim : strides[i - 1];
    box[i] = box_size;
  }
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  static const auto encode =
      driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  CUtensorMap map;
  const CUresult result = encode(
      &map,
      dtype == DType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
      const_cast<void*>(view.data), sizes, strides + 1, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      strip == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_ERROR_INVALID_VALUE) throw TensorMapRefused();
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("flash_cute: the driver makes no tensor map (CUDA driver error " +
                             std::to_string(static_cast<int>(result)) + ")");
  }
  return map;
}

}  // namespace flash_cute::sm90
