// The tile table of the SM90 forward. Beside an entry is its speed as a multiple of cuDNN's: H200,
// bf16, B x N = 16384, full and causal where it serves both. What else was tried is in
// notes/sm90_forward.md. Python reads the table through the op `build_info`.
#pragma once

#include <algorithm>

#include "host/band.h"

namespace flash_cute {

// One tile: `consumers` warpgroups of 128 threads hold kConsumerRows query rows each. A producer
// warpgroup beside them loads. Large head dims: O of a consumer's rows fills more than one
// warpgroup's registers. `column_groups` of them share it, and one more computes S and P.
struct FwdConfigSm90 {
  int head_dim;    // bucket of Q and K: serves head dims up to this one
  int head_dim_v;  // bucket of V and O
  int consumers;
  int block_n;
  int stages;      // key blocks in shared memory; large head dims: chunks of K
  int q_stages;    // query tiles in shared memory: with 2, the next one loads during this one
  bool ping_pong;  // consumers issue their products in turns (FlashAttention-3)
  int column_groups = 1;

  static constexpr int kConsumerRows = 64;  // rows of a warpgroup's product
  // Of large head dims: blocks of P, and chunks of a column group of V in shared memory.
  static constexpr int kPStages = 2, kVStages = 2;

  constexpr bool is_large() const { return column_groups > 1; }
  // Columns of the chunks in which they have Q, K and V: those of one product of 128 or 192.
  constexpr int chunk_columns() const {
    const int columns = head_dim_v / column_groups;
    return columns > 192 ? columns / 2 : columns;
  }
  constexpr int block_m() const { return consumers * kConsumerRows; }
  constexpr int threads() const { return (is_large() ? column_groups + 2 : consumers + 1) * 128; }
  // Registers of a thread: at the launch (the register file over the threads), and once the
  // warpgroups know their roles.
  constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }
  constexpr int producer_registers() const { return is_large() || consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const {
    if (is_large()) return 160;
    return (launch_registers() * (consumers + 1) - producer_registers()) / consumers / 8 * 8;
  }
  // Of the warpgroup that has S, and half of Q: what the others leave.
  constexpr int scores_registers() const {
    return launch_registers() * (column_groups + 2) - producer_registers() -
           column_groups * consumer_registers();
  }
  // Shared memory holds tiles as strips of so many columns: 128 or 64 bytes of 2-byte elements.
  static constexpr int strip(int columns) { return columns % 64 == 0 ? 64 : 32; }
  // Strips of O in shared memory on their way out: as many as there is room for.
  constexpr int out_strips(int element_bytes) const {
    const int room = kSmemPerCta - bytes_without_out(element_bytes);
    const int columns = head_dim_v / column_groups;
    return std::min(columns / strip(columns), room / out_strip_bytes(element_bytes));
  }
  constexpr int smem_bytes(int element_bytes) const {
    return bytes_without_out(element_bytes) +
           out_strips(element_bytes) * out_strip_bytes(element_bytes);
  }

 private:
  static constexpr int kSmemPerCta = 227 * 1024;  // of compute capability 9.0
  constexpr int out_strip_bytes(int element_bytes) const {
    return block_m() * column_groups * strip(head_dim_v / column_groups) * element_bytes;
  }
  // Q, K and V, and 1 KB for barriers and work tiles.
  constexpr int bytes_without_out(int element_bytes) const {
    if (is_large()) {  // chunks of Q, K and V; and P
      const int q_chunks = head_dim / column_groups / chunk_columns();
      const int chunks = q_chunks + stages + column_groups * kVStages;
      const int kv = chunks * block_n * chunk_columns();
      return (kv + kPStages * block_m() * block_n) * element_bytes + 1024;
    }
    const int q = block_m() * q_stages * head_dim, kv = stages * block_n * (head_dim + head_dim_v);
    return (q + kv) * element_bytes + 1024;
  }
};

struct TileEntrySm90 {
  FwdConfigSm90 config;
  bool full;              // serves MaskKind::kFull
  bool banded;            // serves MaskKind::kBanded
  int row_cost = 100;     // time of a query row, in per cent of that in the head dim's first entry
  bool split_kv = false;  // serves split-KV, of any mask; one entry of a head dim

  // Serves MaskKind::kPacked. And kScored, if V's head dim is Q's: else it would spill.
  bool packed = false;
  bool bias = false;  // serves kScored, and reads a bias there; others would spill

  constexpr bool serves(MaskKind mask) const {
    switch (mask) {
      case MaskKind::kFull:
        return full;
      case MaskKind::kBanded:
        return banded;
      case MaskKind::kPacked:
        return packed;
      case MaskKind::kScored:
        return (packed || bias) && config.head_dim == config.head_dim_v;
    }
    __builtin_unreachable();
  }
};

// Of several entries for a head dim and mask, with columns enough for V, a call gets the one that
// takes an SM the least time (host/plan_fwd.cpp).
inline constexpr TileEntrySm90 kFwdTilesSm90[] = {
    // head_dim, head_dim_v, consumers, block_n, stages, q_stages, ping_pong;
    // full, banded, row_cost, split_kv, packed, bias
    {{32, 32, 4, 64, 4, 2, false}, true, true, 100, false, true},          // 1.43, N 512 and 4096
    {{32, 32, 2, 128, 4, 2, true}, false, false, 100, true, false, true},  // not timed
    {{64, 64, 4, 64, 6, 2, false}, true, true, 100, false, true},          // 1.25, N 512 and 4096
    {{64, 64, 2, 128, 4, 2, true}, true, true, 140, true, false, true},    // 1.20 of it, few tiles
    {{96, 96, 3, 96, 3, 2, true}, true, false},                            // 1.40, N 4096
    {{96, 96, 4, 48, 4, 2, true}, true, false, 110},                       // 1.22, N 512
    {{96, 96, 3, 64, 4, 2, false}, false, true, 100, false, true, true},   // 1.36, N 512 and 4096
    {{96, 96, 2, 128, 2, 2, true}, false, false, 100, true},               // not timed
    {{128, 128, 3, 64, 2, 2, false}, true, true, 100, false, true},        // 1.21, N 4096
    {{128, 128, 2, 128, 2, 2, true}, true, true, 106, true, true, true},   // 1.06, N 512
    {{192, 192, 2, 64, 2, 2, true}, true, true, 100, true, true, true},    // 1.18, N 512 and 4096
    {{192, 128, 2, 128, 2, 1, true}, true, true, 80, false, true},         // 1.24, N 4096, H100
    {{256, 256, 2, 64, 2, 1, true}, true, true, 100, true, true},          // 1.17, N 512 and 4096
    // ..., ping_pong, column_groups; of dense calls alone (notes/sm90_large_head_dims.md)
    {{384, 384, 1, 64, 3, 2, false, 2}, true, true},
    {{512, 512, 1, 64, 6, 2, false, 2}, true, true},
};

// The index of the entry of heads of `head_dim` (a bucket) that has `property`, or -1.
constexpr int select_fwd_sm90(int head_dim, bool TileEntrySm90::* property) {
  int index = 0;
  for (const TileEntrySm90& entry : kFwdTilesSm90) {
    if (entry.config.head_dim == head_dim && entry.*property) return index;
    ++index;
  }
  return -1;
}
// Whether an entry of heads of `head_dim` (a bucket) serves the mask.
constexpr bool has_fwd_sm90(int head_dim, MaskKind mask) {
  for (const TileEntrySm90& entry : kFwdTilesSm90) {
    if (entry.config.head_dim == head_dim && entry.serves(mask)) return true;
  }
  return false;
}
// Whether one of them reads a bias.
constexpr bool reads_bias_sm90(int head_dim) {
  return select_fwd_sm90(head_dim, &TileEntrySm90::bias) >= 0;
}
constexpr int select_split_kv_sm90(int head_dim) {
  return select_fwd_sm90(head_dim, &TileEntrySm90::split_kv);
}

}  // namespace flash_cute
