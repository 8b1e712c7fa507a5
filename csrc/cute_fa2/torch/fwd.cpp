// The op `fwd` on CUDA.
#include <cmath>
#include <string>
#include <tuple>

#include "host/launch_fwd.h"
#include "host/plan_fwd.h"
#include "sm90/tensor_map.h"
#include "torch/ops.h"
#include "torch/tensors.h"

namespace flash_cute {

template <bool kRowsFirst>
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
  const FwdOverrides overrides = parse_overrides(tuning.value_or(""));
  const int32_t device = q.get_device_index();
  const int32_t dtype = dtype_of(q);
  const bool is_packed = Sequences::is_packed(cu_seqlens_q, cu_seqlens_k);
  check_inputs(q, k, v, dtype, device, is_packed, kRowsFirst, softmax_scale);
  const CurrentStream stream(device);

  const Geometry gq(q, kRowsFirst), gk(k, kRowsFirst), gv(v, kRowsFirst);
  const int64_t batch = gq.sizes[0], heads_q = gq.sizes[1], len_q = gq.sizes[2];
  const int32_t fp32 = aoti_torch_dtype_float32();
  const Sequences sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, key_start, batch,
                            device);
  const Changes changes(alibi_slopes, bias, softcap, dtype, device);
  const Numbers sink("learnable_sink", learnable_sink, heads_q, fp32, device);
  const int64_t lse_strides[3] = {heads_q * len_q, len_q, 1};
  Tensor out = new_out(q, gv.sizes[3], dtype, device);
  // (batch, heads, rows), or (heads, rows) of packed sequences
  Tensor lse =
      empty_strided(is_packed ? 2 : 3, gq.sizes + is_packed, lse_strides + is_packed, fp32, device);
  if (batch * heads_q * len_q == 0) return {out, lse};
  if (sequences.count() == 0) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
    return {out, lse};
  }

  std::optional<Tensor> q_copy, k_copy, v_copy;
  Writable written(out, kRowsFirst);
  FwdParams params{};
  set_attention(params, gq, gk, gv, dtype, softmax_scale, window_left, window_right,
                diagonal_offset);
  sequences.set(params, window_left, window_right, diagonal_offset);
  changes.set(params, window_left, window_right, diagonal_offset);
  params.sink = sink.data<const float>();
  params.q = readable(q, q_copy, kRowsFirst);
  params.k = readable(k, k_copy, kRowsFirst);
  params.v = readable(v, v_copy, kRowsFirst);
  params.out = written.view();
  params.lse = {static_cast<float*>(lse.data_ptr()), is_packed ? 0 : lse_strides[0], lse_strides[1],
                lse_strides[2]};

  const FwdPlan plan = plan_fwd(params, overrides, properties_of(device), sm90::encode_fwd_maps);
  const Workspace workspace(plan.workspace_bytes, device);
  launch_fwd(plan, params, workspace.data(), device, stream.get());
  written.finish();
  return {out, lse};
}

template decltype(fwd<false>) fwd<false>;
template decltype(fwd<true>) fwd<true>;

}  // namespace flash_cute
