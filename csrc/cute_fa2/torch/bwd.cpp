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
  return t.dim() == dims && std::equal(sizes, sizes + dims, Geometry(t).sizes);
}

// What memory safety needs of a forward's results and their gradients. `q` has been checked.
void check_results(const Tensor& q, const Tensor& out, const Tensor& lse,
                   const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse,
                   int32_t dtype, int32_t device) {
  const int64_t* sizes = Geometry(q).sizes;
  const auto check = [&](const char* name, const Tensor& t, int64_t dims, int32_t wanted) {
    STD_TORCH_CHECK(has_sizes(t, sizes, dims), name, " must have q's shape",
                    dims == 4 ? "" : " without the head dim");
    STD_TORCH_CHECK(dtype_of(t) == wanted, name, " must be ",
                    dims == 4 ? "of q's dtype" : "float32");
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, name, " must be on q's device");
  };
  const int32_t fp32 = aoti_torch_dtype_float32();
  check("out", out, 4, dtype);
  if (dout) check("dout", *dout, 4, dtype);
  check("softmax_lse", lse, 3, fp32);
  if (dlse) check("dlse", *dlse, 3, fp32);
}

TensorView<const float*> rows_of(const Tensor& t) {
  const Geometry g(t);
  return {static_cast<const float*>(t.data_ptr()), g.step(0), g.step(1), g.step(2)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(
    std::optional<Tensor> dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
    std::optional<Tensor> dlse, std::optional<Tensor> learnable_sink,
    std::optional<Tensor> alibi_slopes, std::optional<Tensor> bias,
    std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
    std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
    std::optional<Tensor> key_start, std::optional<double> softmax_scale, int64_t window_left,
    int64_t window_right, std::optional<int64_t> diagonal_offset, double softcap,
    bool deterministic, bool /*bias_grad*/, std::optional<std::string> tuning) {
  check_served(learnable_sink, alibi_slopes, bias, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
               key_start, softcap);
  const BwdOverrides overrides = parse_bwd_overrides(tuning.value_or(""));
  const int32_t device = q.get_device_index();
  const int32_t dtype = dtype_of(q);
  check_inputs(q, k, v, dtype, device, softmax_scale);
  check_results(q, out, softmax_lse, dout, dlse, dtype, device);
  const CurrentStream stream(device);

  const Geometry gq(q), gk(k), gv(v);
  Tensor dq = new_like(q, gq, dtype, device);
  Tensor dk = new_like(k, gk, dtype, device);
  Tensor dv = new_like(v, gv, dtype, device);
  Tensor dsink = torch::stable::new_empty(q, {0});
  Tensor dbias = torch::stable::new_empty(q, {0});
  const int64_t rows = gq.sizes[0] * gq.sizes[1] * gq.sizes[2];
  if (rows == 0 || gk.sizes[2] == 0 || (!dout && !dlse)) {
    for (Tensor* gradient : {&dq, &dk, &dv}) torch::stable::zero_(*gradient);
    return {dq, dk, dv, dsink, dbias};
  }

  std::optional<Tensor> q_copy, k_copy, v_copy, out_copy, dout_copy, no_dout;
  if (!dout) {  // a row of zeros, which all rows share
    no_dout = torch::stable::new_empty(q, {1, 1, 1, whole_chunks(gq.sizes[3])});
    torch::stable::zero_(*no_dout);
  }
  Writable written_q(dq), written_k(dk), written_v(dv);
  BwdParams params{};
  set_attention(params, gq, gk, dtype, softmax_scale, window_left, window_right, diagonal_offset);
  params.q = readable(q, q_copy);
  params.k = readable(k, k_copy);
  params.v = readable(v, v_copy);
  params.out = readable(out, out_copy);
  params.dout = readable(dout ? *dout : *no_dout, dout_copy);
  params.lse = rows_of(softmax_lse);
  if (dlse) params.dlse = rows_of(*dlse);
  params.dq = written_q.view();
  params.dk = written_k.view();
  params.dv = written_v.view();
  params.deterministic = deterministic;

  const BwdPlan plan = plan_bwd(params, overrides, properties_of(device), sm90::encode_bwd_maps);
  const Workspace workspace(plan.workspace_bytes, device);
  launch_bwd(plan, params, workspace.data(), device, stream.get());
  for (Writable* gradient : {&written_q, &written_k, &written_v}) gradient->finish();
  return {dq, dk, dv, dsink, dbias};
}

}  // namespace flash_cute
