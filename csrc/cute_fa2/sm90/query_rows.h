// What the rows of a tile stand for. Where many query heads share a K and V head and queries are
// few, as in decoding, all heads of such a group are rows of one tile, so that K and V are read
// once for them all: row r is query r / 2^n of the group's head r % 2^n, with 2^n at least the
// group's size. Otherwise a row is a query.
#pragma once

#include <cute/config.hpp>

#include "params.h"

namespace flash_cute::sm90 {

class QueryRows {
 public:
  // Packs where that makes fewer tiles of `block_m` rows.
  static QueryRows make(const FwdParams& params, int block_m) {
    const int group = params.heads_per_kv_head;
    int log2 = 0;
    while ((1 << log2) < group) ++log2;
    const int64_t rows_packed = int64_t{params.len_q} << log2;
    const auto tiles = [&](int64_t rows) { return (rows + block_m - 1) / block_m; };
    const bool packed = group > 1 && log2 <= kMaxLog2 && params.q.stride_head != 0 &&
                        rows_packed < kMaxLength &&
                        tiles(rows_packed) < tiles(params.len_q) * group;
    QueryRows rows;
    rows.log2_ = packed ? log2 : 0;
    rows.group_ = packed ? group : 1;
    rows.tile_heads_per_kv_head_ = packed ? 1 : group;
    return rows;
  }

  // Of tiles: (batch, heads) pairs have each their own.
  int heads(const FwdParams& params) const { return params.heads_q / group_; }
  CUTE_HOST_DEVICE int count(int len_q) const { return len_q << log2_; }

  CUTE_HOST_DEVICE int group() const { return group_; }              // heads that are packed
  CUTE_HOST_DEVICE int rows_of_query() const { return 1 << log2_; }  // at least as many
  CUTE_DEVICE int kv_head(int tile_head) const { return tile_head / tile_heads_per_kv_head_; }
  CUTE_DEVICE int query(int row) const { return row >> log2_; }
  CUTE_DEVICE int head(int tile_head, int row) const { return tile_head * group_ + in_group(row); }
  // Whether a row of an existing query stands for a head.
  CUTE_DEVICE bool is_head(int row) const { return in_group(row) < group_; }

 private:
  static constexpr int kMaxLog2 = 6;  // the rows of a consumer

  CUTE_DEVICE int in_group(int row) const { return row & ((1 << log2_) - 1); }

  int log2_;
  int group_;
  int tile_heads_per_kv_head_;
};

}  // namespace flash_cute::sm90
