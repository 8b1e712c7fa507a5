// PyTorch's flash attention ops on ours, for `flash_cute.register(torch=True)`. hooks/aten.py
// checks that this torch's ops have the schemas which stand here, and keeps the kernels that were
// there: a call that is not served goes to the op of flash_cute that has the same name, which calls
// them.
//
// SDPA's ops take (B, H, N, D), the others (B, N, H, D), or (T, H, D) with cum_seq_*. All align
// causal masks to the bottom right corner; SDPA calls them only where Nq = Nk.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "generated/variants.inc"
#include "host/built.h"
#include "torch/ops.h"
#include "torch/tensors.h"

// New in torch 2.13.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

// Not in the stable ABI: weak, and called only if this torch exports both. Otherwise an op in
// Python answers, which takes 3 us (no file).
namespace at {
struct Context {
  __attribute__((weak)) bool deterministicAlgorithms() const;
};
__attribute__((weak)) Context& globalContext();
}  // namespace at

namespace flash_cute {
namespace {

namespace stable = torch::stable::detail;
using OptionalTensor = std::optional<Tensor>;

// Calls an op through the dispatcher. All results must be of one type: torch_call_dispatcher takes
// them by the types in reverse order, up to torch 2.13.
template <class... Results, class... Args>
std::tuple<Results...> call(const char* op, const Args&... args) {
  StableIValue stack[std::max(sizeof...(Results), sizeof...(Args))] = {stable::from(args)...};
  const bool failed = torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS;
  STD_TORCH_CHECK(!failed, torch_exception_get_what_without_backtrace
                               ? torch_exception_get_what_without_backtrace()
                               : "PyTorch has written to stderr why its kernel failed");
  return stable::unbox_to_tuple<Results...>(stack);
}

// Calls fwd or bwd: on CUDA without the dispatcher, which takes microseconds.
template <class... Results, class... Params>
std::tuple<Results...> run(std::tuple<Results...> (*op)(Params...), const char* name, bool is_cuda,
                           const std::type_identity_t<Params>&... args) {
  return is_cuda ? op(args...) : call<Results...>(name, args...);
}

bool is_deterministic() {
  constexpr bool (at::Context::*flag)() const = &at::Context::deterministicAlgorithms;
  if (&at::globalContext && flag) return at::globalContext().deterministicAlgorithms();
  return std::get<0>(call<bool>("flash_cute::deterministic"));
}

// The greatest head dim that was built.
constexpr int kHeadDim = kBuiltHeadDims.empty() ? 0 : kBuiltHeadDims.back();

// As PyTorch's flash backend, of what this build has: no fp32, and one head dim. Out is as q in the
// ops' shape functions, and SDPA takes other backends where v's differs.
bool serves(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p) {
  const int64_t last = q.dim() - 1, head_dim = q.size(last);
  const int32_t dtype = dtype_of(q);
  const std::optional<DType> known = dtype_from(dtype);
  const bool is_served =
      known && *known != DType::kFloat && (is_built(*known) || !q.is_cuda());  // the CPU has all
  return dropout_p == 0 && is_served && dtype_of(k) == dtype && dtype_of(v) == dtype &&
         0 < head_dim && head_dim == v.size(last) && head_dim <= kHeadDim;
}

// (B, N, H, D) as (B, H, N, D), and back, for the CPU. A view without the dispatcher; autograd does
// not see it.
Tensor transposed(const Tensor& t) {
  int64_t sizes[4], strides[4];
  std::copy_n(t.sizes().data(), 4, sizes);
  std::copy_n(t.strides().data(), 4, strides);
  std::swap(sizes[1], sizes[2]);
  std::swap(strides[1], strides[2]);
  AtenTensorHandle view;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), 4, sizes, strides, 0, &view));
  return Tensor(view);
}

bool is_expanded(const Tensor& t) {
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    if (t.size(dim) > 1 && t.stride(dim) == 0) return true;
  }
  return false;
}

// The random state of no dropout, which PyTorch's kernel leaves unwritten, too, and the matrix of
// no debugging. Seed and offset are one allocation.
std::tuple<Tensor, Tensor, Tensor> no_random(const Tensor& q) {
  int32_t device_type, device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(q.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(q.get(), &device));
  const auto empty = [&](int64_t size, int32_t dtype) {
    const int64_t stride = 1;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(1, &size, &stride, dtype, device_type, device, &handle));
    return Tensor(handle);
  };
  const Tensor both = empty(4, aoti_torch_dtype_uint64());  // 16 bytes each, as Inductor asks
  const auto part = [&](int64_t dims, int64_t offset) {
    const int64_t size = 2, stride = 1;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(both.get(), dims, &size, &stride, offset, &handle));
    return Tensor(handle);
  };
  return {part(1, 0), part(0, 2), empty(0, dtype_of(q))};
}

// Where the log-sum-exp of PyTorch's kernel stands in its storage, in elements, after a call whose
// arguments for the backward are those of one of ours. They do not say alibi_slopes or num_splits;
// of the forward's results varlen_attn passes on this one and out. 112 bytes keep 16-byte
// alignment.
constexpr int64_t kMark = 28;

Tensor marked(const Tensor& lse) {
  Tensor storage = torch::stable::new_empty(lse, {kMark + lse.numel()});
  const Tensor behind = torch::stable::narrow(storage, 0, kMark, lse.numel());
  Tensor copy = torch::stable::view(behind, lse.sizes());
  return torch::stable::copy_(copy, lse);
}

// A copy of the log-sum-exp, as hooks for saved tensors make, has no mark: its backward is ours.
// The size of the storage tells a mark from most slices of ours.
bool is_marked(const Tensor& lse) {
  int64_t bytes;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(lse.get(), &bytes));
  return lse.storage_offset() == kMark &&
         bytes == (kMark + lse.numel()) * static_cast<int64_t>(sizeof(float));
}

// What fwd and bwd take beside the tensors.
struct Options {
  OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_k;
  std::optional<double> scale;
  int64_t window_left, window_right;

  Options(std::optional<double> scale, bool is_causal, std::optional<int64_t> left = {},
          std::optional<int64_t> right = {})
      : scale(scale),
        window_left(std::max<int64_t>(left.value_or(-1), -1)),
        window_right(is_causal ? 0 : std::max<int64_t>(right.value_or(-1), -1)) {}

  // Without `k`, the keys lie as the queries do.
  void set_lengths(const OptionalTensor& q, const OptionalTensor& k) {
    if (!is_given(q)) return;
    cu_seqlens_q = q;
    cu_seqlens_k = is_given(k) ? k : q;
  }
  bool is_packed() const { return cu_seqlens_q.has_value(); }

 private:
  // The backward's are no options, but may be undefined.
  static bool is_given(const OptionalTensor& t) { return t && t->defined(); }
};

template <bool kRowsFirst = false>
std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Options& o) {
  return run(&fwd<kRowsFirst>, "flash_cute::fwd", q.is_cuda(), q, k, v, {}, {}, {}, o.cu_seqlens_q,
             o.cu_seqlens_k, {}, o.seqused_k, {}, o.scale, o.window_left, o.window_right, {}, 0, {},
             {});
}

template <bool kRowsFirst = false>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                            const Tensor& v, const Tensor& out, const Tensor& lse,
                                            const Options& o) {
  const auto [dq, dk, dv, dsink, dbias] =
      run(&bwd<kRowsFirst>, "flash_cute::bwd", q.is_cuda(), dout, q, k, v, out, lse, {}, {}, {}, {},
          o.cu_seqlens_q, o.cu_seqlens_k, {}, {}, {}, o.scale, o.window_left, o.window_right, {}, 0,
          is_deterministic(), false, {});
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>
_scaled_dot_product_flash_attention(Tensor q, Tensor k, Tensor v, double dropout_p, bool is_causal,
                                    bool return_debug_mask, std::optional<double> scale) {
  const auto with_lengths = [&](Tensor out, Tensor lse, Tensor cum_seq_q, Tensor cum_seq_k,
                                auto... random) {
    return std::tuple(out, lse, cum_seq_q, cum_seq_k, q.size(2), k.size(2), random...);
  };
  if (return_debug_mask || !serves(q, k, v, dropout_p)) {
    return std::apply(with_lengths, call<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
                                        "flash_cute::_scaled_dot_product_flash_attention", q, k, v,
                                        dropout_p, is_causal, return_debug_mask, scale));
  }
  const auto results = forward(q, k, v, {scale, is_causal});
  const std::tuple<Tensor, Tensor> no_lengths;  // both undefined
  return std::apply(with_lengths, std::tuple_cat(results, no_lengths, no_random(q)));
}

std::tuple<Tensor, Tensor, Tensor> _scaled_dot_product_flash_attention_backward(
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cum_seq_q,
    Tensor cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p, bool is_causal, Tensor seed,
    Tensor offset, std::optional<double> scale) {
  if (!serves(q, k, v, dropout_p)) {
    return call<Tensor, Tensor, Tensor>("flash_cute::_scaled_dot_product_flash_attention_backward",
                                        dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k,
                                        dropout_p, is_causal, seed, offset, scale);
  }
  return backward(dout, q, k, v, out, lse, {scale, is_causal});
}

// out and the log-sum-exp of _flash_attention_forward; nothing for a call that is not served.
std::optional<std::tuple<Tensor, Tensor>> flash_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cum_seq_q,
    const OptionalTensor& cum_seq_k, double dropout_p, bool is_causal, std::optional<double> scale,
    std::optional<int64_t> left, std::optional<int64_t> right, const OptionalTensor& seqused_k) {
  if (!serves(q, k, v, dropout_p)) return {};
  Options options(scale, is_causal, left, right);
  options.set_lengths(cum_seq_q, cum_seq_k);
  options.seqused_k = seqused_k;
  if (options.is_packed()) return forward(q, k, v, options);
  if (q.is_cuda()) return forward<true>(q, k, v, options);
  const auto [heads_first, lse] = forward(transposed(q), transposed(k), transposed(v), options);
  const Tensor out = transposed(heads_first);
  if (!is_expanded(q)) return std::tuple(out, lse);
  // Of an expanded q out would be dense with its heads first. PyTorch's has the order of the sizes.
  Tensor like_q = torch::stable::empty_like(q);
  return std::tuple(torch::stable::copy_(like_q, out), lse);
}

// `More` are the arguments that torch 2.13 added: block_table and num_splits, which asks for bits
// that do not depend on the batch.
template <class... More>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> _flash_attention_forward(
    Tensor q, Tensor k, Tensor v, OptionalTensor cum_seq_q, OptionalTensor cum_seq_k, int64_t max_q,
    int64_t max_k, double dropout_p, bool is_causal, bool return_debug_mask,
    std::optional<double> scale, std::optional<int64_t> left, std::optional<int64_t> right,
    OptionalTensor seqused_k, OptionalTensor alibi_slopes, More... more) {
  if (!return_debug_mask && !alibi_slopes && !(more || ... || false)) {
    if (const auto results = flash_forward(q, k, v, cum_seq_q, cum_seq_k, dropout_p, is_causal,
                                           scale, left, right, seqused_k)) {
      return std::tuple_cat(*results, no_random(q));
    }
  }
  auto results = call<Tensor, Tensor, Tensor, Tensor, Tensor>(
      "flash_cute::_flash_attention_forward", q, k, v, cum_seq_q, cum_seq_k, max_q, max_k,
      dropout_p, is_causal, return_debug_mask, scale, left, right, seqused_k, alibi_slopes,
      more...);
  if (serves(q, k, v, dropout_p)) std::get<1>(results) = marked(std::get<1>(results));
  return results;
}

// Writes to `out`, and returns the log-sum-exp.
Tensor _flash_attention_forward_no_dropout_inplace(
    Tensor out, Tensor q, Tensor k, Tensor v, OptionalTensor cum_seq_q, OptionalTensor cum_seq_k,
    int64_t max_q, int64_t max_k, double dropout_p, bool is_causal, bool return_debug_mask,
    std::optional<double> scale, std::optional<int64_t> left, std::optional<int64_t> right,
    OptionalTensor seqused_k, OptionalTensor alibi_slopes, OptionalTensor block_table,
    std::optional<int64_t> num_splits) {
  if (!return_debug_mask && !alibi_slopes && !block_table && !num_splits) {
    if (const auto results = flash_forward(q, k, v, cum_seq_q, cum_seq_k, dropout_p, is_causal,
                                           scale, left, right, seqused_k)) {
      torch::stable::copy_(out, std::get<0>(*results));
      return std::get<1>(*results);
    }
  }
  return std::get<0>(call<Tensor>("flash_cute::_flash_attention_forward_no_dropout_inplace", out, q,
                                  k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                                  return_debug_mask, scale, left, right, seqused_k, alibi_slopes,
                                  block_table, num_splits));
}

std::tuple<Tensor, Tensor, Tensor> _flash_attention_backward(
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cum_seq_q,
    Tensor cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
    Tensor rng_state, Tensor unused, std::optional<double> scale, std::optional<int64_t> left,
    std::optional<int64_t> right) {
  if (!serves(q, k, v, dropout_p) || is_marked(lse)) {
    return call<Tensor, Tensor, Tensor>("flash_cute::_flash_attention_backward", dout, q, k, v, out,
                                        lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                                        is_causal, rng_state, unused, scale, left, right);
  }
  Options options(scale, is_causal, left, right);
  options.set_lengths(cum_seq_q, cum_seq_k);
  if (options.is_packed()) return backward(dout, q, k, v, out, lse, options);
  if (q.is_cuda()) return backward<true>(dout, q, k, v, out, lse, options);
  const auto [dq, dk, dv] = backward(transposed(dout), transposed(q), transposed(k), transposed(v),
                                     transposed(out), lse, options);
  return {transposed(dq), transposed(dk), transposed(dv)};
}

// The number of arguments tells the version of torch.
void flash_attention_forward(StableIValue* stack, uint64_t inputs, uint64_t results) {
  constexpr auto* of_2_10 = &_flash_attention_forward<>;
  constexpr auto* of_2_13 = &_flash_attention_forward<OptionalTensor, std::optional<int64_t>>;
  (inputs == 15 ? TORCH_BOX(of_2_10) : TORCH_BOX(of_2_13))(stack, inputs, results);
}

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

const std::map<std::string, Boxed> kernels = {
    {"_scaled_dot_product_flash_attention", TORCH_BOX(&_scaled_dot_product_flash_attention)},
    {"_scaled_dot_product_flash_attention_backward",
     TORCH_BOX(&_scaled_dot_product_flash_attention_backward)},
    {"_flash_attention_forward", flash_attention_forward},
    {"_flash_attention_backward", TORCH_BOX(&_flash_attention_backward)},
    {"_flash_attention_forward_no_dropout_inplace",
     TORCH_BOX(&_flash_attention_forward_no_dropout_inplace)},
};

// Never destroyed: at the end of the process torch's dispatcher may be gone before.
auto& overrides = *new std::vector<std::unique_ptr<stable::StableLibrary>>;

}  // namespace

void override_aten(std::string name, std::string key) {
  using Library = stable::StableLibrary;
  auto library =
      std::make_unique<Library>(Library::Kind::IMPL, "aten", key.c_str(), __FILE__, __LINE__);
  library->impl(name.c_str(), kernels.at(name));
  overrides.push_back(std::move(library));
}

void restore_aten() { overrides.clear(); }

}  // namespace flash_cute
