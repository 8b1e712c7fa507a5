// The tile table of the SM90 backward. What else was tried is in notes/sm90_backward.md.
#pragma once

#include "tiles/fwd_sm90.h"

namespace flash_cute {

// The threads and registers of a CTA of consumers and a producer, as FwdConfigSm90's.
struct WarpgroupRoles {
  int consumers;
  constexpr int threads() const { return (consumers + 1) * 128; }
  constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const {
    return (launch_registers() * (consumers + 1) - producer_registers()) / consumers / 8 * 8;
  }
};

// A tile of keys, for dK and dV. It walks over the query rows, kBlockM at a time. Up to head dim
// 128 each consumer has kConsumerKeys keys of its own, and the tile's part of dQ comes along (one
// pass). Above, dK and dV of kConsumerKeys keys fill the registers of two consumers: one has dV,
// the other dK (by roles), and dQ has a kernel of its own.
struct BwdConfigSm90 {
  int head_dim;    // bucket of Q and K: serves head dims up to this one
  int head_dim_v;  // bucket of V and O
  int consumers;
  int stages;  // blocks of Q and dO in shared memory

  static constexpr int kBlockM = 64;        // rows of dQ's product
  static constexpr int kConsumerKeys = 64;  // rows of a warpgroup's other products
  static constexpr int kDsStages = 2;       // one pass: blocks of dS in shared memory
  static constexpr int kWeightsStages = 2;  // by roles: blocks of P

  constexpr bool is_one_pass() const { return head_dim <= 128; }
  constexpr int block_n() const {
    return is_one_pass() ? consumers * kConsumerKeys : kConsumerKeys;
  }
  constexpr WarpgroupRoles roles() const { return {consumers}; }
  // Whether tiles side by side begin at other rows (StaggeredWalk). It pays where dQ's sums keep L2
  // busy; not for a dense call's band, whose tiles have different rows (notes/sm90_backward.md).
  constexpr bool staggers(MaskKind mask) const {
    return is_one_pass() && head_dim > 64 && (mask == MaskKind::kFull || mask == MaskKind::kPacked);
  }
  // K, V, Q and dO; one pass: dS, each consumer's dQ; by roles: P; the rows' statistics and
  // barriers, in whole KB.
  constexpr int smem_bytes(int element_bytes) const {
    const int kv = block_n() * (head_dim + head_dim_v);
    const int q_and_dout = stages * kBlockM * (head_dim + head_dim_v);
    const int ds = kDsStages * kBlockM * block_n();
    const int rest = (stages * kBlockM * 8 + 256 + 1023) / 1024 * 1024;
    const int inputs = (kv + q_and_dout) * element_bytes;
    if (!is_one_pass()) return inputs + kWeightsStages * kBlockM * kConsumerKeys * 4 + rest;
    return inputs + ds * element_bytes + consumers * kBlockM * head_dim * 4 + rest;
  }
};

// A tile of query rows, for dQ. It walks over the keys, block_n at a time. Each consumer has
// kConsumerRows rows of its own.
struct DqConfigSm90 {
  int head_dim;
  int head_dim_v;
  int consumers;
  int block_n;
  int k_stages;  // blocks of K in shared memory, and
  int v_stages;  // of V

  static constexpr int kConsumerRows = 64;

  constexpr int block_m() const { return consumers * kConsumerRows; }
  constexpr WarpgroupRoles roles() const { return {consumers}; }
  // Q, dO, K and V, and 1 KB for barriers.
  constexpr int smem_bytes(int element_bytes) const {
    const int of_rows = block_m() * (head_dim + head_dim_v);
    const int of_keys = block_n * (k_stages * head_dim + v_stages * head_dim_v);
    return (of_rows + of_keys) * element_bytes + 1024;
  }
};

// A stretch of the diagonal under a narrow window: rows with all their keys (sm90/bwd/window/).
struct WindowConfigSm90 {
  int head_dim;  // of all tensors

  static constexpr int kBlock = 64;  // rows or keys
  static constexpr int kSpan = 3;    // blocks of keys that a block of rows sees
  static constexpr int kConsumers = 2;
  static constexpr int kKStages = 4;  // blocks of K in shared memory; of V a consumer has one
  static constexpr int kStages = 2;   // blocks of Q and dO, and of dS with all that they see

  constexpr WarpgroupRoles roles() const { return {kConsumers}; }
  // K, V, Q, dO, dS; statistics and barriers in 2 KB.
  constexpr int smem_bytes(int element_bytes) const {
    const int tiles = kKStages + kConsumers + 2 * kStages;
    const int ds = kStages * kSpan * kBlock * kBlock;
    return (tiles * kBlock * head_dim + ds) * element_bytes + 2048;
  }
};

struct BwdEntrySm90 {
  BwdConfigSm90 keys;
  DqConfigSm90 rows;
  bool bias = false;  // its kernels read a bias; others would spill

  constexpr int head_dim() const { return keys.head_dim; }
  constexpr WindowConfigSm90 window() const { return {head_dim()}; }
  // Whether it has kernels for narrow windows.
  constexpr bool has_window(MaskKind mask) const {
    return keys.is_one_pass() && keys.head_dim == keys.head_dim_v &&
           (mask == MaskKind::kBanded || mask == MaskKind::kPacked);
  }
};

// Of several entries for a head dim, with columns enough for V, a call gets the first.
inline constexpr BwdEntrySm90 kBwdTilesSm90[] = {
    // keys: head_dim, head_dim_v, consumers, stages
    // rows: head_dim, head_dim_v, consumers, block_n, k_stages, v_stages
    {{32, 32, 3, 2}, {32, 32, 3, 64, 4, 4}, true},
    {{64, 64, 3, 2}, {64, 64, 3, 64, 4, 4}, true},
    {{96, 96, 2, 2}, {96, 96, 3, 64, 3, 3}},
    {{128, 128, 2, 2}, {128, 128, 2, 64, 4, 4}, true},
    {{192, 128, 2, 3}, {192, 128, 2, 64, 3, 3}, true},
    {{192, 192, 2, 3}, {192, 192, 2, 64, 2, 2}, true},
    {{256, 256, 2, 2}, {256, 256, 2, 64, 2, 1}},
};

// The index of the entry that serves `head_dim` (a bucket) and `head_dim_v`, or -1.
constexpr int select_bwd_sm90(int head_dim, int head_dim_v) {
  int index = 0;
  for (const BwdEntrySm90& entry : kBwdTilesSm90) {
    if (entry.head_dim() == head_dim && entry.keys.head_dim_v >= head_dim_v) return index;
    ++index;
  }
  return -1;
}

}  // namespace flash_cute
