// The ops' implementations on CUDA (library.cpp has their schemas). kRowsFirst: dense tensors are
// (B, N, H, D), as PyTorch's op has them, and so are the results but for the log-sum-exp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace flash_cute {

template <bool kRowsFirst>
std::tuple<torch::stable::Tensor, torch::stable::Tensor> fwd(
    torch::stable::Tensor q, torch::stable::Tensor k, torch::stable::Tensor v,
    std::optional<torch::stable::Tensor> learnable_sink,
    std::optional<torch::stable::Tensor> alibi_slopes, std::optional<torch::stable::Tensor> bias,
    std::optional<torch::stable::Tensor> cu_seqlens_q,
    std::optional<torch::stable::Tensor> cu_seqlens_k,
    std::optional<torch::stable::Tensor> seqused_q, std::optional<torch::stable::Tensor> seqused_k,
    std::optional<torch::stable::Tensor> key_start, std::optional<double> softmax_scale,
    int64_t window_left, int64_t window_right, std::optional<int64_t> diagonal_offset,
    double softcap, std::optional<bool> deterministic, std::optional<std::string> tuning);

template <bool kRowsFirst>
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor,
           torch::stable::Tensor, torch::stable::Tensor>
bwd(std::optional<torch::stable::Tensor> dout, torch::stable::Tensor q, torch::stable::Tensor k,
    torch::stable::Tensor v, torch::stable::Tensor out, torch::stable::Tensor softmax_lse,
    std::optional<torch::stable::Tensor> dlse, std::optional<torch::stable::Tensor> learnable_sink,
    std::optional<torch::stable::Tensor> alibi_slopes, std::optional<torch::stable::Tensor> bias,
    std::optional<torch::stable::Tensor> cu_seqlens_q,
    std::optional<torch::stable::Tensor> cu_seqlens_k,
    std::optional<torch::stable::Tensor> seqused_q, std::optional<torch::stable::Tensor> seqused_k,
    std::optional<torch::stable::Tensor> key_start, std::optional<double> softmax_scale,
    int64_t window_left, int64_t window_right, std::optional<int64_t> diagonal_offset,
    double softcap, bool deterministic, bool bias_grad, std::optional<std::string> tuning);

// An op of PyTorch's flash attention on these, for a dispatch key; and none any longer.
void override_aten(std::string name, std::string key);
void restore_aten();

}  // namespace flash_cute
