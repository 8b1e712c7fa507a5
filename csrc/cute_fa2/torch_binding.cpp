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
#include <string>
#include <tuple>

#include "dispatch.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The one function that a CPU-only torch does not have: weak, so that the library loads there too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_cute {
namespace {

constexpr int64_t kMaxHeadDim = 256;

// How a dimension's elements lie apart; where there is at most one, the recorded stride says
// nothing.
int64_t stride_of(const Tensor& t, int dim) { return t.size(dim) > 1 ? t.stride(dim) : 0; }

// The kernels read and write rows in chunks of 16 bytes, 8 elements.
bool has_rows_of_16_bytes(const Tensor& t) {
  return t.size(3) % 8 == 0 && stride_of(t, 3) == 1 && stride_of(t, 0) % 8 == 0 &&
         stride_of(t, 1) % 8 == 0 && stride_of(t, 2) % 8 == 0 &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

Tensor new_dense(const Tensor& like, const int64_t (&sizes)[4]) {
  return torch::stable::new_empty(like, {sizes[0], sizes[1], sizes[2], sizes[3]});
}

// `t` itself where its rows can be read in chunks of 16 bytes, else a dense copy with zeros up to
// the next multiple of 8.
Tensor readable_rows(const Tensor& t) {
  if (has_rows_of_16_bytes(t)) return t;
  const int64_t head_dim = t.size(3);
  const int64_t padded = (head_dim + 7) / 8 * 8;
  Tensor copy = new_dense(t, {t.size(0), t.size(1), t.size(2), padded});
  if (padded == head_dim) {
    torch::stable::copy_(copy, t);
  } else {
    torch::stable::zero_(copy);
    Tensor columns = torch::stable::narrow(copy, 3, 0, head_dim);
    torch::stable::copy_(columns, t);
  }
  return copy;
}

// torch.empty_like, without the detour through the dispatcher for the tensors that people have:
// dense, in any order of the dimensions.
Tensor new_like(const Tensor& t) {
  int order[4] = {0, 1, 2, 3};
  std::sort(order, order + 4, [&](int a, int b) { return t.stride(a) < t.stride(b); });
  int64_t dense_stride = 1;
  bool dense = t.numel() > 0;
  for (int dim : order) {
    if (t.size(dim) == 1) continue;
    dense = dense && t.stride(dim) == dense_stride;
    dense_stride *= t.size(dim);
  }
  if (!dense) return torch::stable::empty_like(t);
  int32_t dtype, device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(4, t.sizes().data(), t.strides().data(), dtype,
                                                  device_type, t.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor new_lse(const Tensor& q) {
  const int64_t sizes[3] = {q.size(0), q.size(1), q.size(2)};
  const int64_t strides[3] = {sizes[1] * sizes[2], sizes[2], 1};
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(q.get(), &device_type));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(3, sizes, strides, aoti_torch_dtype_float32(),
                                                  device_type, q.get_device_index(), &handle));
  return Tensor(handle);
}

template <class Pointer>
TensorView<Pointer> view_of(const Tensor& t) {
  return {t.data_ptr(), stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
}

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                  "q, k and v must have 4 dimensions");
  STD_TORCH_CHECK(q.is_cuda() && k.is_cuda() && v.is_cuda() &&
                      k.get_device_index() == q.get_device_index() &&
                      v.get_device_index() == q.get_device_index(),
                  "q, k and v must be on the same CUDA device");
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK((dtype == ScalarType::Half || dtype == ScalarType::BFloat16) &&
                      k.scalar_type() == dtype && v.scalar_type() == dtype,
                  "q, k and v must be all float16 or all bfloat16");
  const int64_t heads_q = q.size(1), heads_kv = k.size(1), head_dim = q.size(3);
  STD_TORCH_CHECK(
      1 <= head_dim && head_dim <= kMaxHeadDim && k.size(3) == head_dim && v.size(3) == head_dim,
      "q, k and v must have the same head dim, from 1 to 256");
  STD_TORCH_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0),
                  "q, k and v must have the same batch size");
  STD_TORCH_CHECK(v.size(1) == heads_kv && v.size(2) == k.size(2),
                  "k and v must have the same heads and length");
  STD_TORCH_CHECK(heads_q == heads_kv || (heads_kv > 0 && heads_q % heads_kv == 0),
                  "the heads of q must be a multiple of those of k and v");
  STD_TORCH_CHECK(q.size(2) <= kMaxLength && k.size(2) <= kMaxLength,
                  "lengths must be at most 2^30");
  STD_TORCH_CHECK(q.size(0) <= INT32_MAX && heads_q <= INT32_MAX,
                  "batch and heads must be below 2^31");
  STD_TORCH_CHECK(std::isfinite(softmax_scale), "softmax_scale must be finite");
}

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, double softmax_scale,
                               int64_t window_left, int64_t window_right, int64_t diagonal_offset,
                               int64_t smem_limit) {
  check_inputs(q, k, v, softmax_scale);
  check_driver();
  const int device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));

  Tensor out = new_like(q);
  Tensor lse = new_lse(q);
  if (lse.numel() == 0) return {out, lse};

  const Tensor q_rows = readable_rows(q), k_rows = readable_rows(k), v_rows = readable_rows(v);
  Tensor out_rows = has_rows_of_16_bytes(out)
                        ? out
                        : new_dense(q, {q.size(0), q.size(1), q.size(2), q_rows.size(3)});

  FwdParams params;
  params.q = view_of<const void*>(q_rows);
  params.k = view_of<const void*>(k_rows);
  params.v = view_of<const void*>(v_rows);
  params.out = view_of<void*>(out_rows);
  params.lse = static_cast<float*>(lse.data_ptr());
  params.batch = static_cast<int>(q.size(0));
  params.heads_q = static_cast<int>(q.size(1));
  params.heads_per_kv_head = static_cast<int>(q.size(1) / k.size(1));
  params.len_q = static_cast<int>(q.size(2));
  params.len_k = static_cast<int>(k.size(2));
  params.head_dim = static_cast<int>(q_rows.size(3));
  set_scale(params, softmax_scale);
  const MaskKind mask = set_band(params, window_left, window_right, diagonal_offset);
  const DType dtype = q.scalar_type() == ScalarType::Half ? DType::kHalf : DType::kBFloat16;
  launch_fwd(params, dtype, mask, smem_limit, device, static_cast<cudaStream_t>(stream));

  if (out_rows.get() != out.get())
    torch::stable::copy_(out, torch::stable::narrow(out_rows, 3, 0, q.size(3)));
  return {out, lse};
}

}  // namespace
}  // namespace flash_cute

STABLE_TORCH_LIBRARY(flash_cute, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, SymInt window_left=-1, SymInt "
      "window_right=-1, "
      "SymInt diagonal_offset=0, SymInt smem_limit=0) -> (Tensor out, Tensor softmax_lse)");
  m.def("build_info() -> str");
  m.def("tiles_for(int smem_limit) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) { m.impl("fwd", TORCH_BOX(&flash_cute::fwd)); }

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&flash_cute::build_info));
  m.impl("tiles_for", TORCH_BOX(&flash_cute::tiles_for));
}
