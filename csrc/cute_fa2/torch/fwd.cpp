// The ops, on libtorch's stable ABI: one binary for every torch from 2.10 and, with no Python in
// it, for every Python. This is the only file that sees torch. It checks what memory safety needs
// (torch.ops can be called directly); the messages for people are in flash_cute/checks.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "host/band.h"
#include "host/build_info.h"
#include "host/device.h"
#include "host/launch_fwd.h"
#include "host/plan_fwd.h"
#include "host/scale.h"
#include "sm90/tensor_map.h"

using torch::stable::Tensor;

// The one function that a CPU-only torch does not have: weak, so that the library loads there too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_cute {
namespace {

// The shape and strides of a tensor, asked for once, as each question is a call into libtorch.
struct Geometry {
  const int64_t* sizes;
  const int64_t* strides;

  explicit Geometry(const Tensor& t) : sizes(t.sizes().data()), strides(t.strides().data()) {}

  // How a dimension's elements lie apart; where there is at most one, the stride says nothing.
  int64_t step(int dim) const { return sizes[dim] > 1 ? strides[dim] : 0; }
};

// The kernels read and write rows in chunks of 16 bytes, 8 elements.
bool has_rows_of_16_bytes(const Geometry& g, const void* data) {
  return g.sizes[3] % 8 == 0 && g.step(3) == 1 && g.step(0) % 8 == 0 && g.step(1) % 8 == 0 &&
         g.step(2) % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <class Pointer>
TensorView<Pointer> view_of(const Geometry& g, void* data) {
  return {data, g.step(0), g.step(1), g.step(2)};
}

// A dense tensor of like's batch, heads and rows, with rows of whole chunks.
Tensor new_padded(const Tensor& like) {
  const int64_t* sizes = Geometry(like).sizes;
  return torch::stable::new_empty(like, {sizes[0], sizes[1], sizes[2], whole_chunks(sizes[3])});
}

// `t` as the kernels read it. If its rows have no chunks of 16 bytes, `copy` keeps a dense copy,
// with zeros up to the next multiple of 8.
TensorView<const void*> readable(Tensor& t, std::optional<Tensor>& copy) {
  const Geometry g(t);
  void* data = t.data_ptr();
  if (has_rows_of_16_bytes(g, data)) return view_of<const void*>(g, data);
  copy = new_padded(t);
  if (g.sizes[3] % 8 != 0) torch::stable::zero_(*copy);
  Tensor columns = torch::stable::narrow(*copy, 3, 0, g.sizes[3]);
  torch::stable::copy_(columns, t);
  return view_of<const void*>(Geometry(*copy), copy->data_ptr());
}

Tensor empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                     int32_t device) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, dtype,
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

// torch.empty_like, without the detour through the dispatcher for the tensors that people have:
// dense, in any order of the dimensions.
Tensor new_like(const Tensor& t, const Geometry& g, int32_t dtype, int32_t device) {
  int order[4] = {0, 1, 2, 3};
  std::sort(order, order + 4, [&](int a, int b) { return g.strides[a] < g.strides[b]; });
  int64_t dense_stride = 1;
  for (int dim : order) {
    if (g.sizes[dim] == 1) continue;
    if (g.strides[dim] != dense_stride) return torch::stable::empty_like(t);
    dense_stride *= g.sizes[dim];
  }
  return empty_strided(4, g.sizes, g.strides, dtype, device);
}

int32_t dtype_of(const Tensor& t) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

std::optional<DType> dtype_from(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float16()) return DType::kHalf;
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  return {};
}

// What memory safety needs. `device` is q's.
void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, int32_t dtype, int32_t device,
                  std::optional<double> softmax_scale) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                  "q, k and v must have 4 dimensions");
  STD_TORCH_CHECK(q.is_cuda() && k.is_cuda() && v.is_cuda() && k.get_device_index() == device &&
                      v.get_device_index() == device,
                  "q, k and v must be on the same CUDA device");
  STD_TORCH_CHECK(dtype_from(dtype) && dtype_of(k) == dtype && dtype_of(v) == dtype,
                  "q, k and v must be all float16 or all bfloat16");
  const int64_t* size_q = Geometry(q).sizes;
  const int64_t* size_k = Geometry(k).sizes;
  const int64_t* size_v = Geometry(v).sizes;
  STD_TORCH_CHECK(1 <= size_q[3] && size_q[3] <= kMaxHeadDim && size_k[3] == size_q[3] &&
                      size_v[3] == size_q[3],
                  "q, k and v must have the same head dim, from 1 to 256");
  STD_TORCH_CHECK(size_k[0] == size_q[0] && size_v[0] == size_q[0],
                  "q, k and v must have the same batch size");
  STD_TORCH_CHECK(size_v[1] == size_k[1] && size_v[2] == size_k[2],
                  "k and v must have the same heads and length");
  STD_TORCH_CHECK(size_k[1] > 0 ? size_q[1] % size_k[1] == 0 : size_q[1] == 0,
                  "the heads of q must be a multiple of those of k and v");
  STD_TORCH_CHECK(size_q[2] <= kMaxLength && size_k[2] <= kMaxLength,
                  "lengths must be at most 2^30 - 2^12");
  STD_TORCH_CHECK(size_q[0] <= INT32_MAX && size_q[1] <= INT32_MAX,
                  "batch and heads must be below 2^31");
  STD_TORCH_CHECK(std::isfinite(softmax_scale.value_or(1)), "softmax_scale must be finite");
}

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, std::optional<double> softmax_scale,
                               int64_t window_left, int64_t window_right,
                               std::optional<int64_t> diagonal_offset,
                               std::optional<bool> /*deterministic: for the backward*/,
                               std::optional<std::string> tuning) {
  const FwdOverrides overrides = parse_overrides(tuning.value_or(""));
  const int32_t device = q.get_device_index();
  const int32_t dtype = dtype_of(q);
  check_inputs(q, k, v, dtype, device, softmax_scale);
  check_driver();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));

  const Geometry gq(q), gk(k);
  const int64_t batch = gq.sizes[0], heads_q = gq.sizes[1], len_q = gq.sizes[2];
  const int64_t len_k = gk.sizes[2], head_dim = gq.sizes[3];
  const int64_t lse_strides[3] = {heads_q * len_q, len_q, 1};
  Tensor out = new_like(q, gq, dtype, device);
  Tensor lse = empty_strided(3, gq.sizes, lse_strides, aoti_torch_dtype_float32(), device);
  if (batch * heads_q * len_q == 0) return {out, lse};

  std::optional<Tensor> q_copy, k_copy, v_copy, out_copy;
  void* out_data = out.data_ptr();
  Geometry g_out(out);
  if (!has_rows_of_16_bytes(g_out, out_data)) {
    out_copy = new_padded(q);
    out_data = out_copy->data_ptr();
    g_out = Geometry(*out_copy);
  }

  FwdParams params{};
  params.q = readable(q, q_copy);
  params.k = readable(k, k_copy);
  params.v = readable(v, v_copy);
  params.out = view_of<void*>(g_out, out_data);
  params.lse = {static_cast<float*>(lse.data_ptr()), lse_strides[0], lse_strides[1],
                lse_strides[2]};
  params.batch = static_cast<int>(batch);
  params.heads_q = static_cast<int>(heads_q);
  params.group_size = static_cast<int>(heads_q / gk.sizes[1]);
  params.len_q = static_cast<int>(len_q);
  params.len_k = static_cast<int>(len_k);
  params.head_dim = params.head_dim_v = static_cast<int>(whole_chunks(head_dim));
  params.dtype = *dtype_from(dtype);
  params.mask = set_band(params.band, len_q, len_k, window_left, window_right,
                         diagonal_offset.value_or(len_k - len_q));
  params.scale = make_softmax_scale(softmax_scale.value_or(1 / std::sqrt(double(head_dim))));

  const FwdPlan plan = plan_fwd(params, overrides, properties_of(device), sm90::encode_fwd_maps);
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    const int64_t stride = 1;
    workspace = empty_strided(1, &plan.workspace_bytes, &stride, aoti_torch_dtype_uint8(), device);
  }
  launch_fwd(plan, params, workspace ? workspace->data_ptr() : nullptr, device,
             static_cast<cudaStream_t>(stream));

  if (out_copy) {
    torch::stable::copy_(out, torch::stable::narrow(*out_copy, 3, 0, head_dim));
  }
  return {out, lse};
}

}  // namespace
}  // namespace flash_cute

STABLE_TORCH_LIBRARY(flash_cute, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, *, float? softmax_scale=None, SymInt window_left=-1, "
      "SymInt window_right=-1, SymInt? diagonal_offset=None, bool? deterministic=None, str? "
      "tuning=None) -> (Tensor out, Tensor softmax_lse)");
  // fwd's gradients. A dout or dlse that is None counts as zeros. The CPU alone has them so far
  // (flash_cute/cpu.py); for CUDA flash_cute/transforms.py raises.
  m.def(
      "bwd(Tensor? dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? "
      "dlse=None, *, float? softmax_scale=None, SymInt window_left=-1, SymInt window_right=-1, "
      "SymInt? diagonal_offset=None, bool deterministic=False, str? tuning=None) -> (Tensor dq, "
      "Tensor dk, Tensor dv)");
  m.def("build_info() -> str");
  m.def("tiles_for(int smem_per_cta) -> str");
  m.def("plan(str request, str tuning=\"\") -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) { m.impl("fwd", TORCH_BOX(&flash_cute::fwd)); }

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&flash_cute::build_info));
  m.impl("tiles_for", TORCH_BOX(&flash_cute::tiles_for));
  m.impl("plan", TORCH_BOX(&flash_cute::plan));
}
