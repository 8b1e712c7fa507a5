// The op `bwd` on CUDA.
#include <algorithm>
#include <string>
#include <tuple>

#include "host/launch_bwd.h"
#include "host/plan_bwd.h"
#include "sm90/tensor_map.h"
#include "torch/ops.h"
#include "torch/tensors.h"

namespace flash_cute {
namespace {

bool has_sizes(const Tensor& t, const int64_t* sizes, int64_t dims) {
  return t.dim() == dims && std::equal(sizes, sizes + dims, t.sizes().data());
}

// What memory safety needs of a forward's results and their gradients. q and v have been checked.
void check_results(const Tensor& q, const Tensor& v, const Tensor& out, const Tensor& lse,
                   const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse,
                   int32_t dtype, int32_t device, bool rows_first) {
  const int64_t dims = q.dim();
  int64_t sizes[4];
  std::copy_n(q.sizes().data(), dims, sizes);
  sizes[dims - 1] = v.sizes()[dims - 1];
  const Geometry g(q, rows_first);
  const int64_t* const rows = g.sizes + (dims == 3);  // heads first
  const auto check = [&](const char* name, const Tensor& t, bool has_columns, int32_t wanted) {
    STD_TORCH_CHECK(has_sizes(t, has_columns ? sizes : rows, has_columns ? dims : dims - 1), name,
                    " must have q's shape",
                    has_columns ? " with v's head dim"
                                : " without the head dim, and of packed ones heads first");
    STD_TORCH_CHECK(dtype_of(t) == wanted, name, " must be ",
                    has_columns ? "of q's dtype" : "float32");
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, name, " must be on q's device");
  };
  const int32_t fp32 = aoti_torch_dtype_float32();
  check("out", out, true, dtype);
  if (dout) check("dout", *dout, true, dtype);
  check("softmax_lse", lse, false, fp32);
  if (dlse) check("dlse", *dlse, false, fp32);
}

// (batch, heads, rows), or (heads, rows) of packed sequences.
TensorView<const float*> rows_of(const Tensor& t) {
  const int64_t first = t.dim() - 3;
  const auto step = [&](int64_t dim) {
    return first + dim >= 0 && t.sizes()[first + dim] > 1 ? t.strides()[first + dim] : 0;
  };
  return {static_cast<const float*>(t.data_ptr()), step(0), step(1), step(2)};
}

}  // namespace

template <bool kRowsFirst>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(
    std::optional<Tensor> dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
    std::optional<Tensor> dlse, std::optional<Tensor> learnable_sink,
    std::optional<Tensor> alibi_slopes, std::optional<Tensor> bias,
    std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
    std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
    std::optional<Tensor> key_start, std::optional<double> softmax_scale, int64_t window_left,
    int64_t window_right, std::optional<int64_t> diagonal_offset, double softcap,
    bool deterministic, bool bias_grad, std::optional<std::string> tuning) {
  const BwdOverrides overrides = parse_bwd_overrides(tuning.value_or(""));
  const int32_t device = q.get_device_index();
  const int32_t dtype = dtype_of(q);
  const bool is_packed = Sequences::is_packed(cu_seqlens_q, cu_seqlens_k);
  check_inputs(q, k, v, dtype, device, is_packed, kRowsFirst, softmax_scale);
  check_results(q, v, out, softmax_lse, dout, dlse, dtype, device, kRowsFirst);
  const CurrentStream stream(device);

  const Geometry gq(q, kRowsFirst), gk(k, kRowsFirst), gv(v, kRowsFirst);
  const int64_t heads_q = gq.sizes[1], stride = 1;
  const int32_t fp32 = aoti_torch_dtype_float32();
  const Sequences sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, key_start,
                            gq.sizes[0], device);
  const Changes changes(alibi_slopes, bias, softcap, dtype, device);
  const Numbers sink("learnable_sink", learnable_sink, heads_q, fp32, device);
  Tensor dq = new_like(q, dtype, device);
  Tensor dk = new_like(k, dtype, device);
  Tensor dv = new_like(v, dtype, device);
  const int64_t of_sink = learnable_sink ? heads_q : 0, none = 0;
  Tensor dsink = empty_strided(1, &of_sink, &stride, learnable_sink ? fp32 : dtype, device);
  STD_TORCH_CHECK(bias || !bias_grad, "bias_grad is asked for without a bias");
  Tensor dbias = bias_grad ? new_like(*bias, dtype_of(*bias), device)
                           : empty_strided(1, &none, &stride, dtype, device);
  const auto results = [&] {
    if (learnable_sink && dtype_of(*learnable_sink) != fp32) {
      Tensor rounded = empty_strided(1, &of_sink, &stride, dtype_of(*learnable_sink), device);
      torch::stable::copy_(rounded, dsink);
      return std::tuple(dq, dk, dv, rounded, dbias);
    }
    return std::tuple(dq, dk, dv, dsink, dbias);
  };
  const int64_t rows = gq.sizes[0] * heads_q * gq.sizes[2];
  const bool has_keys = gk.sizes[2] > 0, has_gradient = dout || dlse;
  const bool is_empty = rows == 0 || sequences.count() == 0 || !has_gradient;
  if (is_empty || !has_keys) {
    for (Tensor* gradient : {&dq, &dk, &dv, &dbias}) torch::stable::zero_(*gradient);
    if (is_empty) torch::stable::zero_(dsink);
    if (is_empty || !learnable_sink) return results();
  }

  std::optional<Tensor> q_copy, k_copy, v_copy, out_copy, dout_copy, no_dout;
  if (!dout) {  // a row of zeros, which all rows share
    no_dout = torch::stable::new_empty(q, {1, 1, 1, whole_chunks(gv.sizes[3])});
    torch::stable::zero_(*no_dout);
  }
  Writable written_q(dq, kRowsFirst), written_k(dk, kRowsFirst), written_v(dv, kRowsFirst);
  BwdParams params{};
  set_attention(params, gq, gk, gv, dtype, softmax_scale, window_left, window_right,
                diagonal_offset);
  sequences.set(params, window_left, window_right, diagonal_offset);
  changes.set(params, window_left, window_right, diagonal_offset);
  params.sink = sink.data<const float>();
  if (learnable_sink) params.dsink = static_cast<float*>(dsink.data_ptr());
  if (bias_grad) params.dbias = gradient_of_bias(params, dbias);
  params.q = readable(q, q_copy, kRowsFirst);
  params.k = readable(k, k_copy, kRowsFirst);
  params.v = readable(v, v_copy, kRowsFirst);
  params.out = readable(out, out_copy, kRowsFirst);
  params.dout = readable(dout ? *dout : *no_dout, dout_copy, kRowsFirst);
  params.lse = rows_of(softmax_lse);
  if (dlse) params.dlse = rows_of(*dlse);
  params.dq = written_q.view();
  params.dk = written_k.view();
  params.dv = written_v.view();
  params.deterministic = deterministic;

  const BwdPlan plan = plan_bwd(params, overrides, properties_of(device), sm90::encode_bwd_maps);
  const Workspace workspace(plan.workspace_bytes, device);
  launch_bwd(plan, params, workspace.data(), device, stream.get());
  if (has_keys) {
    for (Writable* gradient : {&written_q, &written_k, &written_v}) gradient->finish();
  }
  return results();
}

template decltype(bwd<false>) bwd<false>;
template decltype(bwd<true>) bwd<true>;

}  // namespace flash_cute
