// The ops' implementations on CUDA (library.cpp has their schemas).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace flash_cute {

std::tuple<torch::stable::Tensor, torch::stable::Tensor> fwd(
    torch::stable::Tensor q, torch::stable::Tensor k, torch::stable::Tensor v,
    std::optional<double> softmax_scale, int64_t window_left, int64_t window_right,
    std::optional<int64_t> diagonal_offset, std::optional<bool> deterministic,
    std::optional<std::string> tuning);

std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> bwd(
    std::optional<torch::stable::Tensor> dout, torch::stable::Tensor q, torch::stable::Tensor k,
    torch::stable::Tensor v, torch::stable::Tensor out, torch::stable::Tensor softmax_lse,
    std::optional<torch::stable::Tensor> dlse, std::optional<double> softmax_scale,
    int64_t window_left, int64_t window_right, std::optional<int64_t> diagonal_offset,
    bool deterministic, std::optional<std::string> tuning);

}  // namespace flash_cute
