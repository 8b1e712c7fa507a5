// Which rows a tile has, where query heads share a head of K and V.
#pragma once

#include <cstdint>

#include "host/params.h"

namespace flash_cute {

// With few queries, as in decoding, all query heads of a K/V head are rows of one tile ("PackGQA").
// K and V are then read once for them all. Row r is then query r / 2^n of the group's head r % 2^n,
// with 2^n at least the group's size. Otherwise a row is a query.
struct GqaLayout {
  int log2_rows;     // rows of a query, 2^log2_rows: 1 unless packed
  int packed_heads;  // query heads in a tile: 1 unless packed
  int heads;         // heads as tiles count them: packed heads are one
  int heads_per_kv;  // of these, how many share a head of K and V

  // Packs where that saves a quarter of the tiles of `block_m` rows, up to `max_rows` rows a query.
  static GqaLayout make(const FwdParams& params, int block_m, int64_t max_rows) {
    const int group = params.group_size;
    int log2 = 0;
    while ((int64_t{1} << log2) < group) ++log2;
    const int64_t rows_packed = int64_t{params.len_q} << log2;
    const auto tiles_of = [&](int64_t rows) { return (rows + block_m - 1) / block_m; };
    const bool packs = (int64_t{1} << log2) <= max_rows && rows_packed < kMaxLength &&
                       4 * tiles_of(rows_packed) <= 3 * tiles_of(params.len_q) * group;
    if (!packs) return {0, 1, params.heads_q, group};
    return {log2, group, params.heads_q / group, 1};
  }

  int m_blocks(int len_q, int block_m) const { return (rows(len_q) - 1) / block_m + 1; }
  // Of all heads and sequences, for each split.
  int64_t tiles(const FwdParams& params, int block_m) const {
    return int64_t{m_blocks(params.len_q, block_m)} * heads * params.batch;
  }

  FLASH_CUTE_HOST_DEVICE int rows(int len_q) const { return len_q << log2_rows; }
  FLASH_CUTE_HOST_DEVICE int rows_per_query() const { return 1 << log2_rows; }
  FLASH_CUTE_HOST_DEVICE int query(int row) const { return row >> log2_rows; }
};

}  // namespace flash_cute
