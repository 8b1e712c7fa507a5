// What a launch needs to know, as plain structs, and how a call's scale and window become part of
// it: no torch, no CuTe, no inheritance.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace flash_cute {

// Rows and keys are counted in 32 bits, sums of two lengths included.
constexpr int64_t kMaxLength = int64_t{1} << 30;

enum class DType { kHalf, kBFloat16 };

// Which keys a query may see. Every mask is an interval of keys per query row (common/mask.h); that
// of `kFull` has all keys, or those of a part of them (SplitKV), and needs no test but at its
// end.
enum class MaskKind { kFull, kBanded };

// A (batch, heads, rows, head_dim) tensor. Strides count elements; rows are contiguous, of inputs
// and output 16-byte aligned, and a stride may be 0 (expanded dimension).
template <class Pointer>
struct TensorView {
  Pointer data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;
};

// What the softmax knows of a row once its keys are through (common/online_softmax.h).
struct alignas(8) RowStats {
  float limit;
  float sum;
};

// Keys in parts of equal length, but for the last, each of which thread blocks of its own work on:
// so that all of the GPU has work where there are few tiles, as in decoding (splits.h). What comes
// of the parts is combined afterwards. By default the keys are one part, and no results stand here.
struct SplitKV {
  static constexpr int kMost = 1024;
  int count = 1;
  int keys = kMaxLength;  // of a part; whole blocks of the tile
  // Of each part: the output in fp32, as (count * batch, heads_q, len_q, head_dim), with part i of
  // batch b at i * batch + b, and (count * batch, heads_q, len_q, 1) stats.
  TensorView<float*> out{};
  TensorView<RowStats*> rows{};
};

struct FwdParams {
  TensorView<const void*> q;  // (batch, heads_q, len_q, head_dim)
  TensorView<const void*> k;  // (batch, heads_kv(), len_k, head_dim)
  TensorView<const void*> v;  // as k
  TensorView<void*> out;      // as q
  TensorView<float*> lse;     // (batch, heads_q, len_q, 1), natural logarithm
  SplitKV splits;

  int batch;
  int heads_q;
  int group_size;
  int len_q;
  int len_k;
  int head_dim;  // a multiple of 8, at most the head dim of the tile

  // Query row i sees the keys [max(0, i + band_begin), min(len_k, i + band_end)). Ignored by
  // MaskKind::kFull.
  int band_begin;
  int band_end;

  // softmax_scale in three parts, so that the main loop only ever meets a positive, finite factor:
  float q_factor;           // sign of softmax_scale (-1, 0 or 1), multiplied into Q once
  float scale_log2;         // |softmax_scale| * log2(e), as exponentials are taken in base 2
  bool subtract_max_first;  // the scale is so large that score * scale could overflow: see
                            // online_softmax.h
  float slack;              // by how much a score may exceed the maximum before the running softmax
                            // follows it: kSlackLog2 / scale_log2, but 0 with subtract_max_first

  int heads_kv() const { return heads_q / group_size; }
  // Of MaskKind::kBanded, whether rows have a first key as well as a last.
  bool is_window() const { return band_begin > 1 - len_q; }
  // Of MaskKind::kBanded, whether the keys that rows see are about a triangle: causal, with about
  // as many keys as queries. The last tile has twice the keys of the mean then.
  bool is_triangle() const { return !is_window() && len_k < 2 * int64_t{len_q}; }

  // Weights up to 2^8 lose nothing: fp16 reaches to 2^16, and sums are in fp32.
  static constexpr float kSlackLog2 = 8.f;
};

constexpr double kLog2e = 1.4426950408889634;
// Beyond this an ordinary score times the scale may be more than fp32 can subtract exactly.
constexpr double kLargeScale = 256 / kLog2e;

// softmax_scale as the kernels take it.
inline void set_scale(FwdParams& params, double softmax_scale) {
  // These keep the factor a normal number: -inf x factor is -inf, (s - max) x factor not NaN.
  constexpr double kMin = std::numeric_limits<float>::min();
  constexpr double kMax = std::numeric_limits<float>::max();
  params.q_factor = softmax_scale > 0 ? 1.f : softmax_scale < 0 ? -1.f : 0.f;
  params.scale_log2 =
      softmax_scale == 0
          ? 1.f
          : static_cast<float>(std::clamp(std::abs(softmax_scale) * kLog2e, kMin, kMax));
  params.subtract_max_first = std::abs(softmax_scale) > kLargeScale;
  // A quarter of what there is leaves room to add it to a score.
  params.slack = params.subtract_max_first
                     ? 0.f
                     : static_cast<float>(
                           std::min(double{FwdParams::kSlackLog2} / params.scale_log2, kMax / 4));
}

// The window as the band that the kernels take; returns whether it leaves anything out.
inline MaskKind set_band(FwdParams& params, int64_t window_left, int64_t window_right,
                         int64_t diagonal_offset) {
  const int64_t len_q = params.len_q, len_k = params.len_k;
  // Past -len_q and len_k a bound changes nothing more. The sums may pass 64 bits.
  auto bound = [&](__int128 shift) {
    return static_cast<int>(std::clamp<__int128>(shift, -len_q, len_k));
  };
  params.band_begin = static_cast<int>(-len_q);
  params.band_end = static_cast<int>(len_k);
  if (window_left >= 0) params.band_begin = bound(__int128{diagonal_offset} - window_left);
  if (window_right >= 0) params.band_end = bound(__int128{diagonal_offset} + window_right + 1);
  const bool everything = params.band_begin + len_q - 1 <= 0 && params.band_end >= len_k;
  return everything ? MaskKind::kFull : MaskKind::kBanded;
}

}  // namespace flash_cute
