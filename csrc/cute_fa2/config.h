// The tile table: for each architecture and head dim one row or several, best first, and what was
// measured beside it. Every tile size in the project comes from here; Python reads the table
// through the op `build_info`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "params.h"

namespace flash_cute {

// One tile of the forward: `block_m` query rows stay with a thread block while it walks over the
// keys, `block_n` at a time. A structural type, so that it is itself a template argument.
struct FwdConfigSm80 {
  int head_dim;   // bucket: serves head dims up to this one
  int block_m;    // query rows of a tile
  int block_n;    // keys of a tile
  int row_warps;  // along the query rows; each works on block_m / row_warps of them
  // S of the next key block is computed while this one's softmax is done, from Q in registers;
  // takes two key blocks in shared memory.
  bool pipelined_qk;
  int column_warps = 1;  // that share rows: each computes a part of the columns of S, and of O

  constexpr int threads() const { return row_warps * column_warps * 32; }
  constexpr int stages() const { return pipelined_qk ? 2 : 1; }  // key blocks in shared memory
  // Q, K and V tiles of 2-byte elements; O goes through Q's space. Of shared rows also P, and a
  // word for each row from each warp that has it.
  constexpr int smem_bytes() const {
    const int tiles = (block_m + 2 * stages() * block_n) * head_dim * 2;
    return column_warps == 1 ? tiles : tiles + block_m * (block_n * 2 + column_warps * 4);
  }
};

struct TileEntrySm80 {
  FwdConfigSm80 config;
  int ctas_per_sm;  // thread blocks that must fit a multiprocessor together for the row to be
                    // chosen

  // `smem_limit` is what the device lends to one block; a multiprocessor has 1 KB more, and keeps 1
  // KB of each block for itself.
  constexpr bool fits(int smem_limit) const {
    return ctas_per_sm * (config.smem_bytes() + 1024) <= smem_limit + 1024;
  }
  // What the register file (65,536 on every chip served) leaves to a thread.
  constexpr int max_registers() const {
    const int registers = 65536 / (ctas_per_sm * config.threads()) / 8 * 8;
    return registers < 255 ? registers : 255;
  }
};

// For each head dim, best first: the launch takes the first row that fits. The limit is 227 KB on
// sm_90 and sm_100, 163 KB on sm_80, and 99 KB on sm_86, sm_89 and sm_120, so that the last row of
// each head dim fits 99 KB.
//
// Beside a row: its speed on an H200 as a multiple of FlashAttention-2's (PyTorch's SDPA, same run;
// bf16, B x N = 16384), as it was when last timed while tuning: "12" is the geometric mean of N 512
// to 16384, full and causal, "4" that of N 512 and 4096; bench/results/train.json and tuning.json
// have the speed of each head dim's first row as it is. What else was tried, as block_n, key blocks
// in shared memory: speed, is the mean of N 512, 2048 and 8192 from before most of what README.md
// lists, when the first rows of head dims 64, 96 and 128 had 1.03, 0.97 and 1.06. (Two key blocks
// without scores ahead, their barriers fewer by one a step, is a form that the main loop no longer
// has.)
inline constexpr TileEntrySm80 kFwdTilesSm80[] = {
    // head_dim, block_m, block_n, row_warps, pipelined_qk (, column_warps), ctas_per_sm
    {{32, 128, 128, 4, true}, 2},      // 4: 1.30. 64, 2: 1.05 where 128, 2 was 1.13
    {{64, 128, 64, 4, true}, 2},       // 12: 1.21. 64, 1: 1.00; 80, 2: 1.01; 96, 2: 1.02
    {{96, 128, 64, 4, false}, 2},      // 4: 1.12. 64, 2: 0.93
    {{128, 128, 64, 4, false}, 2},     // 12: 1.20. 64, 2: 1.06, too large for sm_80; 48, 2: 0.98
    {{128, 128, 32, 4, false}, 2},     // 0.90 then
    {{192, 64, 64, 2, false, 2}, 2},   // 4: 1.11. In 4 warps of 16 rows: 1.04; with 48, 2 so 0.97
    {{192, 128, 64, 8, false}, 1},     // 0.93 then
    {{256, 64, 64, 2, false, 2}, 2},   // 12: 1.15. In 4 x 1 warps: 1.09 where it was 1.11
    {{256, 128, 64, 4, false, 2}, 1},  // not timed. In 8 warps of 16 rows: 0.93 then
    {{256, 64, 64, 4, false}, 1},      // not timed with one block on a multiprocessor
};

// The index of the row that serves `head_dim` (a bucket) within `smem_limit` bytes, or -1.
constexpr int select_fwd_sm80(int head_dim, int smem_limit) {
  int index = 0;
  for (const TileEntrySm80& row : kFwdTilesSm80) {
    if (row.config.head_dim == head_dim && row.fits(smem_limit)) return index;
    ++index;
  }
  return -1;
}

// One tile of the Hopper forward: `consumers` warpgroups of 128 threads hold kConsumerRows query
// rows each; a producer warpgroup beside them loads.
struct FwdConfigSm90 {
  int head_dim;   // bucket: serves head dims up to this one
  int consumers;  // warpgroups that compute
  int block_n;    // keys of a tile
  int stages;     // key blocks in shared memory
  int q_stages;  // query tiles in shared memory: with 2, the next one comes before this one is done
  bool ping_pong;  // consumers issue the products of a step one after the other, so that one's
                   // softmax meets another's products

  static constexpr int kConsumerRows = 64;  // of a consumer: what a product of a warpgroup has

  constexpr int block_m() const { return consumers * kConsumerRows; }
  constexpr int threads() const { return (consumers + 1) * 128; }
  // Registers of a thread: what ptxas may use (the register file over the threads, as the launch
  // gives them out), and what the warpgroups make of it once they know their roles.
  constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const {
    return (launch_registers() * (consumers + 1) - producer_registers()) / consumers / 8 * 8;
  }
  // Tiles are cut into strips of so many columns: 128 or 64 bytes.
  constexpr int strip() const { return head_dim % 64 == 0 ? 64 : 32; }
  // Strips of O in shared memory on their way out: as many as there is room for.
  constexpr int out_strips() const {
    const int room = kSmemLimit - without_out_bytes();
    return std::min(head_dim / strip(), room / (block_m() * strip() * 2));
  }
  constexpr int smem_bytes() const {
    return without_out_bytes() + out_strips() * block_m() * strip() * 2;
  }

 private:
  static constexpr int kSmemLimit = 227 * 1024;  // what a GPU of compute capability 9.0 lends
  // Q, K and V tiles of 2-byte elements, and 1 KB for barriers and what consumers are told.
  constexpr int without_out_bytes() const {
    return (block_m() * q_stages + 2 * stages * block_n) * head_dim * 2 + 1024;
  }
};

struct TileEntrySm90 {
  FwdConfigSm90 config;
  bool full;            // serves MaskKind::kFull
  bool banded;          // serves MaskKind::kBanded
  int row_cost = 100;   // time of a query row, in per cent of that in the head dim's first tile
  bool splits = false;  // serves keys in parts (SplitKV), of any mask; one row of a head dim

  constexpr bool serves(MaskKind mask) const { return mask == MaskKind::kFull ? full : banded; }
};

// Beside a head dim: its speed on an H200 as a multiple of cuDNN's (PyTorch's SDPA, same run; bf16,
// B x N = 16384): of N 512 full, N 512 causal, N 4096 full, N 4096 causal, as it was when the row
// was chosen; bench/results/tuning.json has the speed as it is. Then what else was tried, as
// consumers, block_n, stages, turns ("products": ping_pong; "none"; "softmax": at the exponentials,
// which the main loop no longer has), from other runs, of which there is no file. "O from
// registers" is how an epilogue before this one stored it: up to 6% slower at N 512 (csrc README).
inline constexpr TileEntrySm90 kFwdTilesSm90[] = {
    // head_dim, consumers, block_n, stages, q_stages, ping_pong, full, banded, row_cost, splits
    // 1.46 1.35 1.44 1.43. 3, 128, 3, products: 1.27 1.07 1.44 1.37. 4 x 96 and 4 x 128 spill
    {{32, 4, 64, 4, 2, false}, true, true},
    // For parts of the keys, of which tiles with few rows are enough. Not timed beside others.
    {{32, 2, 128, 4, 2, true}, false, false, 100, true},
    // 1.22 1.22 1.27 1.29. 4, 64, 4, none: 1.21 1.20 1.24 1.26; products: 1.23 1.16 1.23 1.28;
    // softmax: 1.10 1.10 1.03 1.08. 3, 64, 4, none: 1.04 1.08 1.10 1.16. 3, 128, 3, none: 1.06 1.04
    // 1.21 1.26. O from registers: 2, 128, 4, products: 0.95 0.90 0.96 1.03; 2, 192, 3, products:
    // 0.81 0.85 0.98 1.03
    {{64, 4, 64, 6, 2, false}, true, true},
    // For few tiles, with fewer rows each: README.md, Ideas for sm90. With many of 192 to 1152
    // queries it took 1.05 to 1.63 times as long as the one above, and this cost never chooses it
    // there; of 128 queries, where it does, 0.95 full and 1.07 causal.
    {{64, 2, 128, 4, 2, true}, true, true, 140, true},
    // 1.14 at N 512; at N 4096, where it serves, 1.44. In another run 1.08 1.16 1.34 1.53; none:
    // 1.10 1.12 1.29 1.48; softmax: 1.10 1.11 1.19 1.39. 2, 128, 2, products: 1.09 1.08 1.17 1.31.
    // 3 x 128 and 4 x 64 spill
    {{96, 3, 96, 3, 2, true}, true, false},
    // For N 512, of whose keys blocks of 96 waste an eighth: 1.22 1.14 1.30 1.37; none, in the same
    // run, 1.21 1.17 at N 512
    {{96, 4, 48, 4, 2, true}, true, false, 110},
    // 1.19 1.23 1.38 1.48, all in one run with the two above. 5 stages: 1.20 1.25 1.37 1.46. In
    // turns at products, from another run: 1.20 1.20 1.38 1.43, where these had 1.19 1.23 1.40
    // 1.46. 3, 80, 3, none: 1.12 1.11 1.36 1.46
    {{96, 3, 64, 4, 2, false}, false, true},
    // For parts of the keys; not timed beside others.
    {{96, 2, 128, 2, 2, true}, false, false, 100, true},
    // At N 4096, where it serves: 1.13 1.26. In another run, at both: 0.94 0.98 1.16 1.30; in turns
    // at products: 0.95 0.98 1.13 1.26. 3, 64, 3 and one stage of Q, none: 0.96 0.99 1.09 1.31. 3,
    // 80, 2, products: 0.94 0.94 1.12 1.29. 3 x 96 spills
    {{128, 3, 64, 2, 2, false}, true, true},
    // At N 512, where it serves: 1.06 1.04. In another run, at both: 1.06 1.04 1.09 1.24; softmax:
    // 0.99 1.04 1.06 1.17. 2, 64, 4, none: 1.04 1.05 1.04 1.17; products: 1.02 1.05 1.00 1.16,
    // where these had 1.06 1.03 and the former 1.22 1.28. 176 keys and one stage of Q,
    // products (O from registers): 0.96 0.80 1.05 1.18
    {{128, 2, 128, 2, 2, true}, true, true, 106, true},
    // 1.14 1.04 1.25 1.27; none: 1.13 1.05 1.22 1.26; softmax: 1.10 1.05 1.16 1.24. With one stage
    // of Q: 64, 3, products: 1.11 1.03 1.17 1.25; 96, 2, softmax full and products causal: 1.07
    // 0.99 1.22 1.26. O from registers: 112 keys, products 1.09 0.92 1.23 1.28. 3 x 48 and 3 x 64
    // spill
    {{192, 2, 64, 2, 2, true}, true, true, 100, true},
    // 1.15 1.09 1.16 1.33. Under a mask at N 512 to 16384 1.09 1.15 1.24 1.33 1.38 1.37, where
    // softmax had 1.09 1.14 1.23 1.32 1.35 1.35 in the same runs. O from registers: products 1.12
    // 1.02 1.14 1.31, softmax 1.10 1.02 1.16 1.35, none 1.10 1.01 1.16 1.29; 80 keys, products 1.07
    // 0.97 1.14 1.31. Two stages of Q leave room for 32 keys, 2 stages: products 0.97 0.93
    // 0.98 1.12
    {{256, 2, 64, 2, 1, true}, true, true, 100, true},
};

// How many rows a query may be in the SM90 kernels, where heads share K and V: a consumer's rows
// are one box of the copy engine, in which an expanded dimension cannot be.
inline int most_rows_of_query_sm90(const FwdParams& params) {
  return params.q.stride_head != 0 ? FwdConfigSm90::kConsumerRows : 1;
}

// How a call's tiles are dealt out to `places` thread blocks: whole ones first, and where those
// behind them are too few for all blocks, in parts, each with the rows of some of the consumers.
// Each part's block reads all of the tile's keys, but takes about the mean of the time of the whole
// tile and the part's share of it. README.md, Tiles of a block, has what was measured.
struct TailSplit {
  int64_t whole;
  int64_t cut;    // tiles that are dealt out in
  int parts;      // so many parts each, of
  int part_rows;  // so many rows, but for the last

  // Without a mask the last round is cut; under one only tiles that are fewer than the places, as
  // the last ones of many are short. (Where sections begin anew, Schedule cuts none.)
  static constexpr TailSplit make(int block_m, MaskKind mask, bool is_triangle, int64_t tiles,
                                  int64_t places) {
    TailSplit dealt{};
    dealt.cut = mask == MaskKind::kFull || tiles < places ? tiles % places : 0;
    dealt.whole = tiles - dealt.cut;
    // As small as leaves a place for each. Of a triangle two parts of a tile may need a second
    // round, as who has a long one there has a short one, too.
    do {
      dealt.part_rows += FwdConfigSm90::kConsumerRows;
      dealt.parts = (block_m - 1) / dealt.part_rows + 1;
    } while (dealt.parts > (is_triangle ? 2 : 1) && dealt.parts * dealt.cut > places);
    return dealt;
  }

  // What the busiest block takes for them, as rows of a whole tile by all keys. Of a triangle only
  // the longest tile has all, the mean half of them, and short ones fill the gaps.
  constexpr double time(int block_m, bool is_triangle, int64_t places) const {
    const double of_part = 0.5 * (block_m + part_rows);
    if (is_triangle) {
      const double all = whole * block_m + cut * parts * of_part;
      return std::max(cut > 0 ? of_part : block_m, all / places / 2);
    }
    const int64_t rounds = (whole + places - 1) / places;
    return rounds * block_m + (cut > 0 ? of_part : 0);
  }
};

// The index of the row that serves keys in parts of heads of `head_dim` (a bucket), or -1.
constexpr int select_splits_sm90(int head_dim) {
  int index = 0;
  for (const TileEntrySm90& row : kFwdTilesSm90) {
    if (row.config.head_dim == head_dim && row.splits) return index;
    ++index;
  }
  return -1;
}

// The index of the row that serves `head_dim` (a bucket) under `mask`, or -1. Of several it is the
// one that takes a multiprocessor the least time, by its query rows and whole blocks of `len_k`
// keys: so long sequences get large tiles, and few queries small ones, that more multiprocessors
// share. `tiles_of` tells how many tiles of so many rows the call has; `is_triangle` is
// FwdParams::is_triangle() of a masked call.
template <class TilesOf>
constexpr int select_fwd_sm90(int head_dim, MaskKind mask, bool is_triangle, int len_k,
                              int multiprocessors, const TilesOf& tiles_of) {
  int index = 0, best = -1;
  double least = std::numeric_limits<double>::infinity();
  for (const TileEntrySm90& row : kFwdTilesSm90) {
    if (row.config.head_dim == head_dim && row.serves(mask)) {
      const int block_m = row.config.block_m(), block_n = row.config.block_n;
      const double rows =
          TailSplit::make(block_m, mask, is_triangle, tiles_of(block_m), multiprocessors)
              .time(block_m, is_triangle, multiprocessors);
      const int64_t keys = (int64_t{len_k} + block_n - 1) / block_n * block_n;
      const double time = row.row_cost * rows * keys;
      if (time < least) {
        least = time;
        best = index;
      }
    }
    ++index;
  }
  return best;
}

}  // namespace flash_cute
