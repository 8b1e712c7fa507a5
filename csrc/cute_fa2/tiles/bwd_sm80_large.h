// The tile tables of the SM80 backward above head dim 256, and of fp32 (sm80/bwd/large/). Python
// reads them through the op `build_info`.
#pragma once

#include <span>

namespace flash_cute {

// One tile: a CTA keeps kTileRows rows of a gradient, keys of dK and dV or query rows of dQ, and
// `columns` of its columns. It walks over the rows of the other side, `block_rows` at a time. All
// operands come through a ring of chunks.
struct LargeBwdConfigSm80 {
  int columns;
  int stages;  // chunks in shared memory
  int block_rows = 128;
  int chunk_columns = 64;  // of the operands of S and dP
  int chunk_rows = 16;     // of what is summed up: Q, K or dO

  static constexpr int kTileRows = 64;
  static constexpr int kThreads = 256;

  constexpr int chunk_elements() const {
    const int pair = (kTileRows + block_rows) * chunk_columns, summed = chunk_rows * columns;
    return pair > summed ? pair : summed;
  }
  // The ring, P or dS, the rows' statistics, and which tile it is.
  constexpr int smem_bytes(int element_bytes) const {
    const int elements = stages * chunk_elements() + kTileRows * block_rows;
    return elements * element_bytes + block_rows * 8 + 128;
  }
};

struct LargeBwdEntrySm80 {
  int head_dim;  // bucket of all tensors: serves head dims up to this one
  LargeBwdConfigSm80 config;

  // As TileEntrySm80::fits.
  constexpr bool fits(int smem_per_cta, int element_bytes) const {
    return config.smem_bytes(element_bytes) <= smem_per_cta;
  }
  static constexpr int max_registers() { return 255; }
};

// Each fits 99 KB. Head dims from 513 on have two groups of columns, and the kernels of half of
// them.
inline constexpr LargeBwdEntrySm80 kLargeBwdTilesSm80[] = {
    // head_dim, {columns, stages}; none timed
    {384, {384, 3}},
    {512, {512, 3}},
    {768, {384, 3}},
    {1024, {512, 3}},
};

// Of fp32, where those of bwd_sm80.h do not serve: chunks of 16 KB at most. None timed.
inline constexpr LargeBwdEntrySm80 kFp32BwdTilesSm80[] = {
    {64, {64, 3, 64, 32, 32}},
    {128, {128, 3, 64, 32, 32}},
    {256, {256, 3, 64, 32, 16}},
};

constexpr std::span<const LargeBwdEntrySm80> large_bwd_tiles_sm80(int element_bytes) {
  if (element_bytes == 4) return kFp32BwdTilesSm80;
  return kLargeBwdTilesSm80;
}

// The index of the entry that serves `head_dim` (a bucket), or -1.
constexpr int select_bwd_sm80_large(int head_dim, int smem_per_cta, int element_bytes) {
  int index = 0;
  for (const LargeBwdEntrySm80& entry : large_bwd_tiles_sm80(element_bytes)) {
    if (entry.head_dim == head_dim && entry.fits(smem_per_cta, element_bytes)) return index;
    ++index;
  }
  return -1;
}

}  // namespace flash_cute
