// The op `fwd` on CUDA.
#include <string>
#include <tuple>

#include "host/launch_fwd.h"
#include "host/plan_fwd.h"
#include "sm90/tensor_map.h"
#include "torch/ops.h"
#include "torch/tensors.h"

namespace flash_cute {

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> learnable_sink,
                               std::optional<Tensor> alibi_slopes, std::optional<Tensor> bias,
                               std::optional<Tensor> cu_seqlens_q,
                               std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_q,
                               std::optional<Tensor> seqused_k, std::optional<Tensor> key_start,
                               std::optional<double> softmax_scale, int64_t window_left,
                               int64_t window_right, std::optional<int64_t> diagonal_offset,
                               double softcap,
                               std::optional<bool> /*deterministic: for the backward*/,
                               std::optional<std::string> tuning) {
  check_served(learnable_sink, alibi_slopes, bias, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
               key_start, softcap);
  const FwdOverrides overrides = parse_overrides(tuning.value_or(""));
  const int32_t device = q.get_device_index();
  const int32_t dtype = dtype_of(q);
  check_inputs(q, k, v, dtype, device, softmax_scale);
  const CurrentStream stream(device);

  const Geometry gq(q), gk(k);
  const int64_t batch = gq.sizes[0], heads_q = gq.sizes[1], len_q = gq.sizes[2];
  const int64_t lse_strides[3] = {heads_q * len_q, len_q, 1};
  Tensor out = new_like(q, gq, dtype, device);
  Tensor lse = empty_strided(3, gq.sizes, lse_strides, aoti_torch_dtype_float32(), device);
  if (batch * heads_q * len_q == 0) return {out, lse};

  std::optional<Tensor> q_copy, k_copy, v_copy;
  Writable written(out);
  FwdParams params{};
  set_attention(params, gq, gk, dtype, softmax_scale, window_left, window_right, diagonal_offset);
  params.q = readable(q, q_copy);
  params.k = readable(k, k_copy);
  params.v = readable(v, v_copy);
  params.out = written.view();
  params.lse = {static_cast<float*>(lse.data_ptr()), lse_strides[0], lse_strides[1],
                lse_strides[2]};

  const FwdPlan plan = plan_fwd(params, overrides, properties_of(device), sm90::encode_fwd_maps);
  const Workspace workspace(plan.workspace_bytes, device);
  launch_fwd(plan, params, workspace.data(), device, stream.get());
  written.finish();
  return {out, lse};
}

}  // namespace flash_cute
