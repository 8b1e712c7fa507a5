// The tile table of the SM80 forward. Beside an entry: its speed as a multiple of
// FlashAttention-2's on an H200, bf16, B x N = 16384, full and causal. What else was tried is in
// notes/sm80_forward.md. Python reads the table through the op `build_info`.
#pragma once

#include <span>

#include "host/band.h"

namespace flash_cute {

// One tile: a CTA keeps `block_m` query rows and walks over the keys, `block_n` at a time. A
// structural type, so that it can be a template argument.
struct FwdConfigSm80 {
  int head_dim;    // bucket of Q and K: serves head dims up to this one
  int head_dim_v;  // bucket of V and O
  int block_m;
  int block_n;
  int row_warps;  // warps along the query rows
  // S of the next key block is computed under the softmax of this one, from Q in registers. Takes
  // two key blocks in shared memory.
  bool pipelined_qk;
  int column_warps = 1;         // warps that share rows: each computes some columns of S and of O
  bool q_in_registers = false;  // read once; V then comes to where Q was in shared memory
  // Large head dims have K and V of a block in chunks, so many in shared memory: of K all keys and
  // `k_columns` of the columns, of V `v_keys` x `v_columns`. 0: whole blocks.
  int chunk_stages = 0;
  int k_columns = 0;
  int v_keys = 0;
  int v_columns = 0;

  constexpr int threads() const { return row_warps * column_warps * 32; }
  constexpr bool is_chunked() const { return chunk_stages > 0; }
  // Key blocks in shared memory, or chunks.
  constexpr int stages() const { return is_chunked() ? chunk_stages : pipelined_qk ? 2 : 1; }
  constexpr int chunk_elements() const {
    const int k = block_n * k_columns, v = v_keys * v_columns;
    return k > v ? k : v;
  }
  // Q, K and V; O goes through Q's space. Warps that share rows exchange P, and a word for each
  // row and warp. With Q in registers: Q and K, and in the same space V and O.
  constexpr int smem_bytes(int element_bytes) const {
    const int columns = head_dim > head_dim_v ? head_dim : head_dim_v;
    if (q_in_registers) return (block_m + block_n) * columns * element_bytes;
    const int q = block_m * columns;
    const int kv = stages() * (is_chunked() ? chunk_elements() : block_n * (head_dim + head_dim_v));
    const int exchange = block_m * (block_n * element_bytes + column_warps * 4);
    return (q + kv) * element_bytes + (column_warps == 1 ? 0 : exchange);
  }
};

struct TileEntrySm80 {
  FwdConfigSm80 config;
  int ctas_per_sm;  // CTAs that must fit an SM together for the entry to be chosen
  // Not for MaskKind::kPacked and kScored: their kernels of this tile would spill.
  bool dense_only = false;

  constexpr bool serves(MaskKind mask) const { return !(dense_only && has_sequences(mask)); }
  // `smem_per_cta` is what the device lends to one CTA. An SM has 1 KB more, and reserves 1 KB for
  // each CTA.
  constexpr bool fits(int smem_per_cta, int element_bytes) const {
    return ctas_per_sm * (config.smem_bytes(element_bytes) + 1024) <= smem_per_cta + 1024;
  }
  // What the register file (65,536 on every chip served) leaves to a thread.
  constexpr int max_registers() const {
    const int registers = 65536 / (ctas_per_sm * config.threads()) / 8 * 8;
    return registers < 255 ? registers : 255;
  }
};

// For each head dim best first: a call gets the first entry that fits and has columns enough for V.
// A CTA may have 227 KB on sm_90 and sm_100, 163 KB on sm_80, and 99 KB on sm_86, sm_89 and sm_120.
// The last entry of each pair of head dims fits 99 KB.
inline constexpr TileEntrySm80 kFwdTilesSm80[] = {
    // head_dim, head_dim_v, block_m, block_n, row_warps, pipelined_qk, column_warps; ctas_per_sm
    {{32, 32, 128, 128, 4, true}, 2},            // 1.31, N 512 and 4096
    {{64, 64, 128, 64, 4, true}, 2},             // 1.20, N 512 to 16384
    {{96, 96, 128, 64, 4, false}, 2},            // 1.13, N 512 and 4096
    {{128, 128, 128, 64, 4, false}, 2},          // 1.18, N 512 to 16384
    {{128, 128, 128, 32, 4, false}, 2},          // 1.09, N 512 and 4096
    {{192, 128, 64, 64, 2, false, 2}, 2},        // not timed
    {{192, 128, 128, 64, 8, false}, 1},          // not timed
    {{192, 192, 64, 64, 2, false, 2}, 2},        // 1.12, N 512 and 4096
    {{192, 192, 64, 64, 4, false, 1, true}, 2},  // 1.14, N 512 and 4096
    {{256, 256, 64, 64, 2, false, 2}, 2},        // 1.13, N 512 to 16384
    {{256, 256, 128, 64, 4, false, 2}, 1},       // not timed
    {{256, 256, 64, 64, 4, false}, 1},           // 1.08, N 512 and 4096
    // ..., column_warps, q_in_registers, chunk_stages, k_columns, v_keys, v_columns; ctas_per_sm
    {{384, 384, 64, 128, 2, false, 4, false, 4, 64, 32, 384}, 1},
    {{384, 384, 64, 64, 2, false, 4, false, 3, 64, 16, 384}, 1},
    {{512, 512, 64, 128, 2, false, 4, false, 5, 64, 16, 512}, 1},
    {{512, 512, 64, 64, 2, false, 4, false, 3, 64, 16, 256}, 1},
    {{768, 768, 32, 256, 1, false, 8, false, 4, 32, 16, 768}, 1},
    {{768, 768, 32, 128, 1, false, 8, false, 5, 32, 16, 256}, 1},
    {{1024, 1024, 32, 256, 1, false, 8, false, 5, 32, 16, 512}, 1},
    {{1024, 1024, 32, 128, 1, false, 8, false, 3, 32, 16, 256}, 1},
};

// Of fp32, with fewer buckets (bench/results/fp32_h100.json).
inline constexpr TileEntrySm80 kFwdTilesFp32[] = {
    {{64, 64, 128, 32, 4, false}, 2},          // 48 KB
    {{128, 128, 128, 32, 4, false}, 2, true},  // 96 KB
    {{128, 128, 128, 32, 8, false}, 1},        // 96 KB
    {{256, 256, 64, 16, 4, false}, 2},         // 96 KB
    {{256, 256, 64, 16, 4, false}, 1},
};

constexpr std::span<const TileEntrySm80> fwd_tiles_sm80(int element_bytes) {
  if (element_bytes == 4) return kFwdTilesFp32;
  return kFwdTilesSm80;
}

// The index of the entry that serves `head_dim` (a bucket) with V of `head_dim_v` columns, or -1.
constexpr int select_fwd_sm80(int head_dim, int head_dim_v, MaskKind mask, int smem_per_cta,
                              int element_bytes) {
  int index = 0;
  for (const TileEntrySm80& entry : fwd_tiles_sm80(element_bytes)) {
    if (entry.config.head_dim == head_dim && entry.config.head_dim_v >= head_dim_v &&
        entry.serves(mask) && entry.fits(smem_per_cta, element_bytes)) {
      return index;
    }
    ++index;
  }
  return -1;
}

}  // namespace flash_cute
