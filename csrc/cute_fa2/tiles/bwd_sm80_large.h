// The tile table of the SM80 backward above head dim 256 (sm80/bwd/large/). Python reads it through
// the op `build_info`.
#pragma once

namespace flash_cute {

// One tile: a CTA keeps kTileRows rows of a gradient, keys of dK and dV or query rows of dQ, and
// `columns` of its columns. It walks over the rows of the other side, kBlockRows at a time. All
// operands come through a ring of chunks.
struct LargeBwdConfigSm80 {
  int columns;
  int stages;  // chunks in shared memory

  static constexpr int kTileRows = 64;
  static constexpr int kBlockRows = 128;
  static constexpr int kChunkColumns = 64;  // of the operands of S and dP
  static constexpr int kChunkRows = 16;     // of what is summed up: Q, K or dO
  static constexpr int kThreads = 256;

  constexpr int chunk_elements() const {
    const int pair = (kTileRows + kBlockRows) * kChunkColumns, summed = kChunkRows * columns;
    return pair > summed ? pair : summed;
  }
  // The ring, P or dS, the rows' statistics, and which tile it is.
  constexpr int smem_bytes(int element_bytes) const {
    const int elements = stages * chunk_elements() + kTileRows * kBlockRows;
    return elements * element_bytes + kBlockRows * 8 + 128;
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

// The index of the entry that serves `head_dim` (a bucket), or -1.
constexpr int select_bwd_sm80_large(int head_dim, int smem_per_cta, int element_bytes) {
  int index = 0;
  for (const LargeBwdEntrySm80& entry : kLargeBwdTilesSm80) {
    if (entry.head_dim == head_dim && entry.fits(smem_per_cta, element_bytes)) return index;
    ++index;
  }
  return -1;
}

}  // namespace flash_cute
