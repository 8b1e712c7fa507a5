// Tensors of torch as the kernels take them. The files of this folder alone see torch, through
// libtorch's stable ABI: one binary for every torch from 2.10 on. With no Python in it, it serves
// every Python. They check what memory safety needs (torch.ops can be called directly); the
// messages for people are in flash_cute/checks.py.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <optional>

#include "host/device.h"
#include "host/params.h"

// The one function that a CPU-only torch does not have: weak, so that the library loads there too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_cute {

using torch::stable::Tensor;

// The shape and strides of a tensor, asked for once, as each question is a call into libtorch.
// Packed sequences (T, H, D) are seen as one entry of a batch, (1, H, T, D); and with `rows_first`
// (B, N, H, D) as (B, H, N, D).
struct Geometry {
  int64_t sizes[4];
  int64_t strides[4];

  explicit Geometry(const Tensor& t, bool rows_first = false) {
    const int64_t* const of_t = t.sizes().data();
    const int64_t* const steps = t.strides().data();
    const bool is_packed = t.dim() == 3;
    for (int dim = 0; dim < 4; ++dim) {
      const int swapped = dim == 1 || dim == 2 ? 3 - dim : dim;
      const int from = is_packed ? (dim == 3 ? 2 : 2 - dim) : rows_first ? swapped : dim;
      sizes[dim] = is_packed && dim == 0 ? 1 : of_t[from];
      strides[dim] = is_packed && dim == 0 ? 0 : steps[from];
    }
  }

  // How a dimension's elements lie apart; where there is at most one, the stride says nothing.
  int64_t step(int dim) const { return sizes[dim] > 1 ? strides[dim] : 0; }
};

// The kernels read and write rows in chunks of 16 bytes, 8 elements.
inline bool has_rows_of_16_bytes(const Geometry& g, const void* data) {
  return g.sizes[3] % 8 == 0 && g.step(3) == 1 && g.step(0) % 8 == 0 && g.step(1) % 8 == 0 &&
         g.step(2) % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <class Pointer>
TensorView<Pointer> view_of(const Geometry& g, void* data) {
  return {data, g.step(0), g.step(1), g.step(2)};
}

// A dense tensor of like's shape, but with rows of whole chunks.
inline Tensor new_padded(const Tensor& like) {
  const int64_t* sizes = like.sizes().data();
  return like.dim() == 3
             ? torch::stable::new_empty(like, {sizes[0], sizes[1], whole_chunks(sizes[2])})
             : torch::stable::new_empty(like,
                                        {sizes[0], sizes[1], sizes[2], whole_chunks(sizes[3])});
}

// `t` as the kernels read it. If its rows have no chunks of 16 bytes, `copy` keeps a dense copy,
// with zeros up to the next multiple of 8.
inline TensorView<const void*> readable(Tensor& t, std::optional<Tensor>& copy, bool rows_first) {
  const Geometry g(t, rows_first);
  void* data = t.data_ptr();
  if (has_rows_of_16_bytes(g, data)) return view_of<const void*>(g, data);
  copy = new_padded(t);
  if (g.sizes[3] % 8 != 0) torch::stable::zero_(*copy);
  Tensor columns = torch::stable::narrow(*copy, t.dim() - 1, 0, g.sizes[3]);
  torch::stable::copy_(columns, t);
  return view_of<const void*>(Geometry(*copy, rows_first), copy->data_ptr());
}

inline Tensor empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                            int32_t dtype, int32_t device) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, dtype,
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

// torch.empty_like, without the detour through the dispatcher for the tensors that people have:
// dense, in any order of the dimensions.
inline Tensor new_like(const Tensor& t, int32_t dtype, int32_t device) {
  const int64_t dims = t.dim();
  const int64_t* const sizes = t.sizes().data();
  const int64_t* const strides = t.strides().data();
  int order[4] = {0, 1, 2, 3};
  std::sort(order, order + dims, [&](int a, int b) { return strides[a] < strides[b]; });
  int64_t dense_stride = 1;
  for (int i = 0; i < dims; ++i) {
    const int dim = order[i];
    if (sizes[dim] == 1) continue;
    if (strides[dim] != dense_stride) return torch::stable::empty_like(t);
    dense_stride *= sizes[dim];
  }
  return empty_strided(dims, sizes, strides, dtype, device);
}

// An output for the queries `q`: in q's order of dimensions, with `columns` columns, which lie
// innermost where q has another number of them (flash_cute/checks.py: empty_out).
inline Tensor new_out(const Tensor& q, int64_t columns, int32_t dtype, int32_t device) {
  const int64_t last = q.dim() - 1;
  if (q.sizes()[last] == columns) return new_like(q, dtype, device);
  int64_t sizes[4], strides[4];
  std::copy_n(q.sizes().data(), last + 1, sizes);
  std::copy_n(q.strides().data(), last + 1, strides);
  sizes[last] = columns;
  if (std::count(sizes, sizes + last + 1, 0) > 0) {  // there is no order
    int64_t step = 1;
    for (int64_t dim = last; dim >= 0; --dim) {
      strides[dim] = step;
      step *= std::max<int64_t>(sizes[dim], 1);
    }
    return empty_strided(last + 1, sizes, strides, dtype, device);
  }
  strides[last] = 0;
  AtenTensorHandle expanded;
  TORCH_ERROR_CODE_CHECK(aoti_torch_as_strided(q.get(), sizes, strides, &expanded));
  return torch::stable::empty_like(Tensor(expanded));
}

inline int32_t dtype_of(const Tensor& t) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

inline std::optional<DType> dtype_from(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float16()) return DType::kHalf;
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (dtype == aoti_torch_dtype_float32()) return DType::kFloat;
  return {};
}

// What memory safety needs. `device` is q's.
inline void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, int32_t dtype,
                         int32_t device, bool is_packed, bool rows_first,
                         std::optional<double> softmax_scale) {
  STD_TORCH_CHECK(q.dim() == (is_packed ? 3 : 4) && k.dim() == q.dim() && v.dim() == q.dim(),
                  "q, k and v must have ", is_packed ? 3 : 4, " dimensions");
  STD_TORCH_CHECK(q.is_cuda() && k.is_cuda() && v.is_cuda() && k.get_device_index() == device &&
                      v.get_device_index() == device,
                  "q, k and v must be on the same CUDA device");
  STD_TORCH_CHECK(dtype_from(dtype) && dtype_of(k) == dtype && dtype_of(v) == dtype,
                  "q, k and v must be all float16, all bfloat16 or all float32");
  const Geometry gq(q, rows_first), gk(k, rows_first), gv(v, rows_first);
  const int64_t *size_q = gq.sizes, *size_k = gk.sizes, *size_v = gv.sizes;
  const int max_head_dim = dtype_from(dtype) == DType::kFloat ? kMaxHeadDimFp32 : kMaxHeadDim;
  STD_TORCH_CHECK(1 <= size_q[3] && size_q[3] <= max_head_dim && size_k[3] == size_q[3],
                  "q and k must have the same head dim, from 1 to ", max_head_dim);
  STD_TORCH_CHECK(1 <= size_v[3] && size_v[3] <= max_head_dim, "v's head dim must be 1 to ",
                  max_head_dim);
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

// Numbers that kernels read as they are: of `dtype`, one behind the other.
class Numbers {
 public:
  Numbers(const char* name, const std::optional<Tensor>& given, int64_t count, int32_t dtype,
          int32_t device) {
    if (!given) return;
    STD_TORCH_CHECK(given->dim() == 1 && given->sizes()[0] == count, name, " must have ", count,
                    " elements");
    STD_TORCH_CHECK(given->is_cuda() && given->get_device_index() == device, name,
                    " must be on q's device");
    numbers_ = *given;
    if (dtype_of(*given) == dtype && (count <= 1 || given->strides()[0] == 1)) return;
    const int64_t stride = 1;
    numbers_ = empty_strided(1, &count, &stride, dtype, device);
    torch::stable::copy_(*numbers_, *given);
  }
  template <class T>
  T* data() const {
    return numbers_ ? static_cast<T*>(numbers_->data_ptr()) : nullptr;
  }

 private:
  std::optional<Tensor> numbers_;
};

// The sequences of a call, where they have lengths and places of their own.
class Sequences {
 public:
  Sequences(const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
            const std::optional<Tensor>& seqused_q, const std::optional<Tensor>& seqused_k,
            const std::optional<Tensor>& key_start, int64_t batch, int32_t device)
      : is_packed_(is_packed(cu_seqlens_q, cu_seqlens_k)),
        count_(is_packed_ ? count_of(*cu_seqlens_q) : batch),
        exist_(is_packed_ || seqused_q || seqused_k || key_start),
        cu_seqlens_q_("cu_seqlens_q", cu_seqlens_q, count_ + 1, int32(), device),
        cu_seqlens_k_("cu_seqlens_k", cu_seqlens_k, count_ + 1, int32(), device),
        seqused_q_("seqused_q", seqused_q, count_, int32(), device),
        seqused_k_("seqused_k", seqused_k, count_, int32(), device),
        key_start_("key_start", key_start, count_, int32(), device) {}

  static bool is_packed(const std::optional<Tensor>& cu_seqlens_q,
                        const std::optional<Tensor>& cu_seqlens_k) {
    STD_TORCH_CHECK(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                    "cu_seqlens_q and cu_seqlens_k must be given together");
    return cu_seqlens_q.has_value();
  }

  int64_t count() const { return count_; }
  // Tells `params` of them, if there are any.
  void set(AttentionParams& params, int64_t window_left, int64_t window_right,
           std::optional<int64_t> diagonal_offset) const {
    if (!exist_) return;
    STD_TORCH_CHECK(!diagonal_offset, "diagonal_offset does not go with lengths of sequences");
    params.batch = static_cast<int>(count_);
    params.mask = MaskKind::kPacked;
    params.band = band_of_packed(window_left, window_right);
    params.sequences = {cu_seqlens_q_.data<const int>(), cu_seqlens_k_.data<const int>(),
                        seqused_q_.data<const int>(), seqused_k_.data<const int>(),
                        key_start_.data<const int>()};
  }

 private:
  static int32_t int32() { return aoti_torch_dtype_int32(); }
  static int64_t count_of(const Tensor& cu_seqlens) {
    STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.sizes()[0] > 0,
                    "cu_seqlens_q must have one dimension, and an element");
    return cu_seqlens.sizes()[0] - 1;
  }

  bool is_packed_;
  int64_t count_;
  bool exist_;
  Numbers cu_seqlens_q_, cu_seqlens_k_, seqused_q_, seqused_k_, key_start_;
};

// What changes scores ahead of the mask.
class Changes {
 public:
  Changes(const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& bias,
          double softcap, int32_t dtype, int32_t device)
      : slopes_(alibi_slopes), bias_(bias), softcap_(softcap) {
    STD_TORCH_CHECK(softcap == 0 || (FLT_MIN <= softcap && softcap <= FLT_MAX),
                    "softcap must be finite in float32, and 0 or more");
    const int32_t fp32 = aoti_torch_dtype_float32();
    if (slopes_) {
      STD_TORCH_CHECK(dtype_of(*slopes_) == fp32, "alibi_slopes must be float32");
      check_device("alibi_slopes", *slopes_, device);
    }
    if (bias_) {
      STD_TORCH_CHECK(dtype_of(*bias_) == fp32 || dtype_of(*bias_) == dtype,
                      "bias must be float32 or of q's dtype");
      check_device("bias", *bias_, device);
      const int64_t* const sizes = bias_->sizes().data();
      if (bias_->dim() == 4 && sizes[3] > 1 && bias_->strides()[3] != 1) {  // keys lie apart
        Tensor dense = torch::stable::new_empty(*bias_, {sizes[0], sizes[1], sizes[2], sizes[3]});
        bias_ = torch::stable::copy_(dense, *bias_);
      }
    }
  }

  // Tells `params` of them, if there are any, behind the sequences.
  void set(AttentionParams& params, int64_t window_left, int64_t window_right,
           std::optional<int64_t> diagonal_offset) const {
    if (!slopes_ && !bias_ && softcap_ == 0) return;
    if (!params.is_packed()) {
      STD_TORCH_CHECK(!diagonal_offset, "diagonal_offset does not go with changes of scores");
      params.band = band_of_packed(window_left, window_right);
    }
    ScoreChanges changes{.softcap = static_cast<float>(softcap_)};
    if (slopes_) {
      const int64_t dims = slopes_->dim();
      STD_TORCH_CHECK((dims == 1 || (dims == 2 && slopes_->sizes()[0] == params.batch)) &&
                          slopes_->sizes()[dims - 1] == params.heads_q,
                      "alibi_slopes must have an element for each head, or each sequence and head");
      changes.slopes = {static_cast<const float*>(slopes_->data_ptr()),
                        dims == 2 ? slopes_->strides()[0] : 0, slopes_->strides()[dims - 1]};
    }
    if (bias_) {
      STD_TORCH_CHECK(!params.sequences.cu_seqlens_q, "packed sequences have no bias");
      STD_TORCH_CHECK(bias_->dim() == 4, "bias must have 4 dimensions");
      const int64_t whole[4] = {params.batch, params.heads_q, params.len_q, params.len_k};
      int64_t steps[4];
      for (int dim = 0; dim < 4; ++dim) {
        const int64_t size = bias_->sizes()[dim];
        STD_TORCH_CHECK(size == 1 || size == whole[dim], "bias must broadcast to the scores");
        steps[dim] = size > 1 ? bias_->strides()[dim] : 0;
      }
      changes.bias = {bias_->data_ptr(), steps[0],
                      steps[1],          steps[2],
                      steps[3] != 0,     dtype_of(*bias_) == aoti_torch_dtype_float32()};
    }
    set_changes(params, changes);
  }

 private:
  static void check_device(const char* name, const Tensor& t, int32_t device) {
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, name, " must be on q's device");
  }

  std::optional<Tensor> slopes_, bias_;
  double softcap_;
};

inline BiasGradient gradient_of_bias(const AttentionParams& params, const Tensor& dbias) {
  const Geometry g(dbias);
  const int64_t whole[4] = {params.batch, params.heads_q, params.len_q, params.len_k};
  const auto has = [&](int dim) { return g.sizes[dim] == whole[dim]; };
  return {dbias.data_ptr(), g.step(0),
          g.step(1),        g.step(2),
          g.step(3),        has(0),
          has(1),           has(2),
          has(3),           dtype_of(dbias) == aoti_torch_dtype_float32(),
          dbias.numel()};
}

// Memory of the device for kernels alone, if they want any. It comes from torch's allocator, in the
// stream's order, and goes back there.
class Workspace {
 public:
  Workspace(int64_t bytes, int32_t device) {
    const int64_t stride = 1;
    if (bytes > 0) {
      memory_ = empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(), device);
    }
  }
  void* data() const { return memory_ ? memory_->data_ptr() : nullptr; }

 private:
  std::optional<Tensor> memory_;
};

// The current stream of `device`, which is the current device as long as this lives.
class CurrentStream {
 public:
  explicit CurrentStream(int32_t device) {
    check_driver();
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard_.emplace(device);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream_));
  }
  cudaStream_t get() const { return static_cast<cudaStream_t>(stream_); }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  void* stream_ = nullptr;
};

// A tensor that kernels write: it, or where its rows have no chunks of 16 bytes a padded copy that
// `finish` takes over.
class Writable {
 public:
  Writable(const Tensor& result, bool rows_first) : result_(result), rows_first_(rows_first) {
    const Geometry g(result, rows_first);
    if (!has_rows_of_16_bytes(g, result.data_ptr())) copy_ = new_padded(result);
  }
  TensorView<void*> view() const {
    const Tensor& written = copy_ ? *copy_ : result_;
    return view_of<void*>(Geometry(written, rows_first_), written.data_ptr());
  }
  void finish() {
    if (!copy_) return;
    torch::stable::copy_(
        result_, torch::stable::narrow(*copy_, result_.dim() - 1, 0, Geometry(result_).sizes[3]));
  }

 private:
  Tensor result_;
  bool rows_first_;
  std::optional<Tensor> copy_;
};

// What a forward and its backward are called with, but for the addresses.
inline void set_attention(AttentionParams& params, const Geometry& q, const Geometry& k,
                          const Geometry& v, int32_t dtype, std::optional<double> softmax_scale,
                          int64_t window_left, int64_t window_right,
                          std::optional<int64_t> diagonal_offset) {
  const int64_t len_q = q.sizes[2], len_k = k.sizes[2], head_dim = q.sizes[3];
  params.batch = static_cast<int>(q.sizes[0]);
  params.heads_q = static_cast<int>(q.sizes[1]);
  params.group_size = static_cast<int>(q.sizes[1] / k.sizes[1]);
  params.len_q = static_cast<int>(len_q);
  params.len_k = static_cast<int>(len_k);
  params.head_dim = static_cast<int>(whole_chunks(head_dim));
  params.head_dim_v = static_cast<int>(whole_chunks(v.sizes[3]));
  params.dtype = *dtype_from(dtype);
  params.mask = set_band(params.band, len_q, len_k, window_left, window_right,
                         diagonal_offset.value_or(len_k - len_q));
  params.scale = make_softmax_scale(softmax_scale.value_or(1 / std::sqrt(double(head_dim))));
}

}  // namespace flash_cute
