#include "sm90/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "host/device.h"
#include "tiles/bwd_sm90.h"
#include "tiles/fwd_sm90.h"

namespace flash_cute::sm90 {
namespace {

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

// The driver's functions need a context. The runtime's bind the device's to a new thread by
// themselves, but none may have been called there yet. A context that the caller has bound stays.
void bind_context() {
  static const auto get_current = driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  if (get_current(&context) == CUDA_SUCCESS && context != nullptr) return;
  int device = 0;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaSetDevice(device));
}

CUtensorMapDataType data_type_of(DType dtype) {
  switch (dtype) {
    case DType::kHalf:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
  __builtin_unreachable();
}

// A (batch, heads, rows, columns) tensor and the boxes in which TMA moves it.
template <class Pointer>
struct Tiling {
  TensorView<Pointer> view;
  int heads;
  int group;  // heads that are rows of one tile (GqaLayout); 1 without packing
  int rows;
  int columns;
  int strip;      // columns of a box
  int box_group;  // heads of a box

  int box_rows;
  bool is_ragged = false;
};

// The map's dimensions are (columns, heads of a group, rows, groups, batch). A box is a strip of
// the columns by box_group x box_rows, swizzled in shared memory as wgmma reads it. An expanded
// dimension counts once. The stride of a dimension of one step means nothing, and is that of the
// dimension before. The driver's documentation wants strides that are multiples of those before.
//
// A ragged map ends where a sequence does. Its second dimension goes along the rows, too. Row r of
// a sequence of n rows, the last of which is ahead of the tensor's row `end`, has the coordinates
// (end, rows - n + r): from r = n on it lies outside. The map begins so many rows ahead of the
// tensor.
template <class Pointer>
CUresult encode(const Tiling<Pointer>& t, DType dtype, int batch, CUtensorMap& map) {
  struct Dimension {
    int64_t stride;
    int size;
    int box;
  };
  Dimension dimensions[5] = {{1, t.columns, t.strip},
                             {t.view.stride_head, t.group, t.box_group},
                             {t.view.stride_row, t.rows, t.box_rows},
                             {t.view.stride_head * t.group, t.heads / t.group, 1},
                             {t.view.stride_batch, batch, 1}};
  const char* data = static_cast<const char*>(static_cast<const void*>(t.view.data));
  const int bytes = bytes_of(dtype);
  if (t.is_ragged) {
    // One row has no stride, and any will do.
    const int64_t stride = t.rows > 1 ? t.view.stride_row : t.columns;
    dimensions[1] = {stride, t.rows + 1, 1};
    data -= bytes * t.rows * stride;
  }
  cuuint64_t sizes[5], strides[5];  // strides in bytes
  cuuint32_t box[5];
  for (int i = 0; i < 5; ++i) {
    const auto [stride, size, box_size] = dimensions[i];
    const bool one_step = stride == 0 || size == 1;
    sizes[i] = one_step ? 1 : size;
    strides[i] = !one_step ? bytes * stride : i <= 1 ? bytes * t.columns : strides[i - 1];
    box[i] = box_size;
  }
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  static const auto encode_tiled =
      driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  // A miss fetches a line of L2. With 256 bytes it would fetch the next line, too, which is asked
  // for anyway (notes/split_kv.md).
  return encode_tiled(
      &map, data_type_of(dtype), 5, const_cast<char*>(data), sizes, strides + 1, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      t.strip * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Encodes maps one after the other, up to the first that the driver refuses.
class Encoder {
 public:
  explicit Encoder(const AttentionParams& params) : dtype_(params.dtype), batch_(params.batch) {
    bind_context();
  }
  template <class Pointer>
  void add(CUtensorMap& map, const Tiling<Pointer>& tiling) {
    if (result_ == CUDA_SUCCESS) result_ = encode(tiling, dtype_, batch_, map);
  }
  // Why it refused one, or nothing. It does not take all that its documentation seems to allow.
  std::string refusal() const {
    if (result_ == CUDA_ERROR_INVALID_VALUE) return "the driver refused a tensor map";
    if (result_ != CUDA_SUCCESS) {
      throw std::runtime_error("flash_cute: the driver makes no tensor map (CUDA driver error " +
                               std::to_string(static_cast<int>(result_)) + ")");
    }
    return {};
  }

 private:
  DType dtype_;
  int batch_;
  CUresult result_ = CUDA_SUCCESS;
};

}  // namespace

std::string encode_fwd_maps(const FwdParams& params, const FwdPlan& plan, TensorMaps& maps) {
  constexpr int kWarpRows = FwdConfigSm90::kConsumerRows / 4;
  const FwdConfigSm90& config = kFwdTilesSm90[plan.tile].config;
  const int groups = config.column_groups;
  const int strip = config.strip(config.head_dim / groups);
  const int strip_v = config.strip(config.head_dim_v / groups);
  const auto queries = [&](const auto& view, int columns, int strip, int box_rows) {
    const int box_group = std::min(plan.gqa.rows_per_query(), box_rows);
    return Tiling{view,  params.heads_q, plan.gqa.packed_heads, params.len_q, columns,
                  strip, box_group,      box_rows / box_group};
  };
  const auto keys = [&](const auto& view, int columns, int strip, bool is_ragged = false) {
    return Tiling{view, params.heads_kv(), 1,        params.len_k, columns, strip,
                  1,    config.block_n,    is_ragged};
  };

  Encoder encoder(params);
  encoder.add(maps.q, queries(params.q, params.head_dim, strip, FwdConfigSm90::kConsumerRows));
  encoder.add(maps.k, keys(params.k, params.head_dim, strip));
  encoder.add(maps.v, keys(params.v, params.head_dim_v, strip_v, params.is_packed()));
  // Splits store fp32 from registers.
  if (plan.splits.count == 1) {
    encoder.add(maps.out, queries(params.out, params.head_dim_v, strip_v, kWarpRows));
  }
  return encoder.refusal();
}

std::string encode_bwd_maps(const BwdParams& params, const BwdPlan& plan, BwdTensorMaps& maps) {
  const auto rows = [](const auto& view, int heads, int rows, int columns, int tile_columns,
                       int box_rows = BwdTensorMaps::kRows) {
    const int strip = FwdConfigSm90::strip(tile_columns);
    return Tiling{view, heads, 1, rows, columns, strip, 1, box_rows};
  };
  const BwdConfigSm90& config = kBwdTilesSm90[plan.tile].keys;
  const int head_dim = config.head_dim, head_dim_v = config.head_dim_v;
  Encoder encoder(params);
  const auto add = [&](CUtensorMap& map, CUtensorMap& ragged, auto tiling) {
    encoder.add(map, tiling);
    tiling.is_ragged = true;
    if (params.is_packed()) encoder.add(ragged, tiling);
  };
  const int heads_q = params.heads_q, heads_kv = params.heads_kv();
  add(maps.q, maps.ragged_q, rows(params.q, heads_q, params.len_q, params.head_dim, head_dim));
  add(maps.dout, maps.ragged_dout,
      rows(params.dout, heads_q, params.len_q, params.head_dim_v, head_dim_v));
  add(maps.k, maps.ragged_k, rows(params.k, heads_kv, params.len_k, params.head_dim, head_dim));
  add(maps.v, maps.ragged_v, rows(params.v, heads_kv, params.len_k, params.head_dim_v, head_dim_v));
  if (config.is_one_pass() && plan.head_splits == 1) {
    constexpr int kWarpRows = BwdTensorMaps::kWarpRows;
    encoder.add(maps.dk,
                rows(params.dk, heads_kv, params.len_k, params.head_dim, head_dim, kWarpRows));
    encoder.add(maps.dv,
                rows(params.dv, heads_kv, params.len_k, params.head_dim_v, head_dim_v, kWarpRows));
  }
  return encoder.refusal();
}

}  // namespace flash_cute::sm90
