// The tile table of the SM80 backward. Beside an entry: its speed as a multiple of
// FlashAttention-2's on an H200, bf16, B x N = 16384, full and causal
// (bench/results/bwd_h200.json). What else was tried, and the entries for 99 KB, are in
// notes/sm80_backward.md.
#pragma once

#include <span>

namespace flash_cute {

// How `rows` x `columns` warps share a product.
struct WarpGrid {
  int rows;
  int columns;
  constexpr int count() const { return rows * columns; }
};

// One tile: a CTA keeps `block_n` keys and their gradients, and walks over the query rows,
// `block_m` at a time.
struct BwdConfigSm80 {
  int head_dim;    // bucket of Q and K: serves head dims up to this one
  int head_dim_v;  // bucket of V and O
  int block_m;
  int block_n;
  int stages;          // blocks of Q and dO in shared memory
  WarpGrid s_warps;    // of S and dP, block_m x block_n
  WarpGrid dkv_warps;  // of dK and dV, block_n x head_dim
  WarpGrid dq_warps;   // of dQ, block_m x head_dim

  constexpr int threads() const { return s_warps.count() * 32; }
  // Where one block has all keys, dQ is whole in a tile: it can be stored at once. At head dim 256
  // that would take registers which are not there.
  constexpr bool stores_dq() const { return head_dim <= 192; }
  // K, V, Q and dO, P and dS, and the rows' statistics; a CTA's ticket.
  constexpr int smem_bytes(int element_bytes) const {
    const int kv = block_n * (head_dim + head_dim_v);
    const int q_and_dout = stages * block_m * (head_dim + head_dim_v);
    const int p_and_ds = 2 * block_m * block_n;
    return (kv + q_and_dout + p_and_ds) * element_bytes + stages * block_m * 8 + 128;
  }
};

struct BwdEntrySm80 {
  BwdConfigSm80 config;
  int ctas_per_sm;  // CTAs that must fit an SM together for the entry to be chosen

  // As TileEntrySm80::fits.
  constexpr bool fits(int smem_per_cta, int element_bytes) const {
    return ctas_per_sm * (config.smem_bytes(element_bytes) + 1024) <= smem_per_cta + 1024;
  }
  constexpr int max_registers() const {
    const int registers = 65536 / (ctas_per_sm * config.threads()) / 8 * 8;
    return registers < 255 ? registers : 255;
  }
};

// For each head dim best first: a call gets the first entry that fits, as of kFwdTilesSm80. The
// last entry of each head dim fits 99 KB.
inline constexpr BwdEntrySm80 kBwdTilesSm80[] = {
    // head_dim, head_dim_v, block_m, block_n, stages; warps of S, dK and dV, dQ; ctas_per_sm
    {{32, 32, 128, 128, 2, {4, 2}, {4, 2}, {8, 1}}, 1},  // 1.05, N 4096
    {{32, 32, 64, 128, 2, {2, 4}, {4, 2}, {4, 2}}, 1},
    {{64, 64, 128, 128, 2, {4, 2}, {4, 2}, {4, 2}}, 1},  // 1.16, N 512 to 16384
    {{64, 64, 64, 128, 2, {2, 4}, {4, 2}, {2, 4}}, 1},
    {{96, 96, 64, 128, 2, {2, 4}, {4, 2}, {4, 2}}, 1},  // 1.17, N 4096
    {{96, 96, 64, 64, 2, {4, 2}, {4, 2}, {4, 2}}, 1},
    {{128, 128, 64, 128, 2, {2, 4}, {4, 2}, {2, 4}}, 1},  // 1.19, N 512 to 16384
    {{128, 128, 64, 64, 1, {4, 2}, {2, 4}, {2, 4}}, 1},
    {{192, 192, 64, 64, 2, {4, 2}, {2, 4}, {2, 4}}, 1},  // 1.02, N 4096
    {{192, 192, 64, 32, 1, {4, 2}, {2, 4}, {2, 4}}, 1},
    {{256, 256, 64, 64, 2, {4, 2}, {2, 4}, {2, 4}}, 1},  // 1.06, N 4096
    {{256, 256, 64, 64, 1, {4, 2}, {2, 4}, {2, 4}}, 1},
    {{256, 256, 32, 32, 1, {2, 2}, {2, 2}, {2, 2}}, 1},
};

// Of fp32, up to head dim 128 (bench/results/fp32_h100.json). Above, and where none fits, those of
// bwd_sm80_large.h serve.
inline constexpr BwdEntrySm80 kBwdTilesFp32[] = {
    {{64, 64, 64, 64, 1, {2, 2}, {2, 2}, {2, 2}}, 2},
    {{64, 64, 64, 64, 1, {4, 2}, {4, 2}, {4, 2}}, 1},
    {{128, 128, 64, 64, 1, {2, 4}, {2, 4}, {2, 4}}, 1},
};

constexpr std::span<const BwdEntrySm80> bwd_tiles_sm80(int element_bytes) {
  if (element_bytes == 4) return kBwdTilesFp32;
  return kBwdTilesSm80;
}

// The index of the entry that serves `head_dim` (a bucket), or -1.
constexpr int select_bwd_sm80(int head_dim, int smem_per_cta, int element_bytes) {
  int index = 0;
  for (const BwdEntrySm80& entry : bwd_tiles_sm80(element_bytes)) {
    if (entry.config.head_dim == head_dim && entry.fits(smem_per_cta, element_bytes)) return index;
    ++index;
  }
  return -1;
}

}  // namespace flash_cute
