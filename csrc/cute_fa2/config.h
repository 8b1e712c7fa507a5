// The tile table: one row per (architecture, direction, head dim), and what was measured beside it. Every tile size in the
// project comes from here; Python reads the table through the op `build_info`.
#pragma once

namespace flash_cute {

// One tile of the forward: `block_m` query rows stay with a thread block while it walks over the keys, `block_n` at a time.
// A structural type, so that a row is itself a template argument.
struct FwdConfig {
  int head_dim;     // bucket: serves head dims up to this one
  int block_m;      // query rows of a tile
  int block_n;      // keys of a tile
  int warps;        // along the query rows; each works on block_m / warps of them
  bool q_in_registers;  // Q's fragments are loaded from shared memory once, not once per key block

  constexpr int threads() const { return warps * 32; }
  // Q, K and V tiles of 2-byte elements; O goes through Q's space.
  constexpr int smem_bytes() const { return (block_m + 2 * block_n) * head_dim * 2; }
  // What the hardware allows a thread of the launch when one such block is resident on a multiprocessor.
  constexpr int max_registers() const { return 65536 / threads() < 255 ? 65536 / threads() : 255; }
};

// For each head dim, best first: the launch takes the first row that fits the shared memory which the device lends to a block
// (99 KB on sm_86, sm_89 and sm_120; 163 KB on sm_80; 227 KB on sm_90 and sm_100), so the last one fits 99 KB.
inline constexpr FwdConfig kFwdSm80[] = {
    // head_dim, block_m, block_n, warps, q_in_registers
    {32, 128, 128, 4, true},
    {64, 128, 64, 4, true},
    {96, 128, 64, 4, false},
    {128, 128, 64, 4, false},
    {192, 128, 64, 8, false},
    {256, 64, 64, 4, false},
};

// The index of the row that serves `head_dim` (a bucket) within `smem_limit` bytes, or -1.
constexpr int select_fwd_sm80(int head_dim, int smem_limit) {
  int index = 0;
  for (const FwdConfig& config : kFwdSm80) {
    if (config.head_dim == head_dim && config.smem_bytes() <= smem_limit) return index;
    ++index;
  }
  return -1;
}

}  // namespace flash_cute
