// The tile table of the SM90 backward. What else was tried is in notes/sm90_backward.md.
#pragma once

#include "tiles/fwd_sm90.h"

namespace flash_cute {

// One tile: `consumers` warpgroups keep kConsumerKeys keys each and their gradients, and walk over
// the query rows, kBlockM at a time. A producer warpgroup beside them loads.
struct BwdConfigSm90 {
  int head_dim;    // bucket of Q and K: serves head dims up to this one
  int head_dim_v;  // bucket of V and O
  int consumers;
  int stages;  // blocks of Q and dO in shared memory

  static constexpr int kBlockM = 64;        // rows of dQ's product
  static constexpr int kConsumerKeys = 64;  // rows of a warpgroup's other products
  static constexpr int kDsStages = 2;       // blocks of dS in shared memory

  constexpr int block_n() const { return consumers * kConsumerKeys; }

  constexpr int threads() const { return (consumers + 1) * 128; }
  // As FwdConfigSm90's.
  constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const {
    return (launch_registers() * (consumers + 1) - producer_registers()) / consumers / 8 * 8;
  }
  // Where one block has all keys, dQ is whole in a tile: it can be stored at once.
  constexpr bool stores_dq() const { return true; }
  // K, V, Q and dO, dS, each consumer's dQ; the rows' statistics, barriers and the ticket, in whole
  // KB.
  constexpr int smem_bytes(int element_bytes) const {
    const int kv = block_n() * (head_dim + head_dim_v);
    const int q_and_dout = stages * kBlockM * (head_dim + head_dim_v);
    const int ds = kDsStages * kBlockM * block_n();
    const int rest = stages * kBlockM * 8 + 128;
    const int dq = consumers * kBlockM * head_dim * 4;
    return dq + (kv + q_and_dout + ds) * element_bytes + (rest + 1023) / 1024 * 1024;
  }
};

// A call gets the entry of its head dim. Those without one run on sm80's kernels.
inline constexpr BwdConfigSm90 kBwdTilesSm90[] = {
    // head_dim, head_dim_v, consumers, stages
    {32, 32, 3, 2},
    {64, 64, 3, 2},
    {96, 96, 2, 2},
    {128, 128, 2, 2},
};

// The index of the entry that serves `head_dim` (a bucket), or -1.
constexpr int select_bwd_sm90(int head_dim) {
  int index = 0;
  for (const BwdConfigSm90& config : kBwdTilesSm90) {
    if (config.head_dim == head_dim) return index;
    ++index;
  }
  return -1;
}

}  // namespace flash_cute
