// What a launch needs to know, as plain structs: no torch, no CuTe, no inheritance.
#pragma once

#include <cstdint>

namespace flash_cute {

enum class DType { kHalf, kBFloat16 };

// Which keys a query may see. Every mask is an interval of keys per query row (common/mask.h); `kFull` is the interval
// [0, len_k), which needs no test but the one at the tensor's edge.
enum class MaskKind { kFull, kBanded };

// A (batch, heads, rows, head_dim) tensor. Strides count elements; rows are contiguous, 16-byte aligned, and a stride may
// be 0 (expanded dimension).
template <class Pointer>
struct TensorView {
  Pointer data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;
};

struct FwdParams {
  TensorView<const void*> q;  // (batch, heads_q, len_q, head_dim)
  TensorView<const void*> k;  // (batch, heads_q / heads_per_kv_head, len_k, head_dim)
  TensorView<const void*> v;  // as k
  TensorView<void*> out;      // as q
  float* lse;                 // (batch, heads_q, len_q), contiguous, natural logarithm

  int batch;
  int heads_q;
  int heads_per_kv_head;
  int len_q;
  int len_k;
  int head_dim;  // a multiple of 8, at most the head dim of the tile

  // Query row i sees the keys [max(0, i + band_begin), min(len_k, i + band_end)). Ignored by MaskKind::kFull.
  int band_begin;
  int band_end;

  // softmax_scale in three parts, so that the main loop only ever meets a positive, finite factor:
  float q_factor;           // sign of softmax_scale (-1, 0 or 1), multiplied into Q once
  float scale_log2;         // |softmax_scale| * log2(e), as exponentials are taken in base 2
  bool subtract_max_first;  // the scale is so large that score * scale could overflow: see online_softmax.h
};

}  // namespace flash_cute
