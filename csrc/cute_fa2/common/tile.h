// A tile of the output: which one, and what its rows stand for.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>
#include <cute/config.hpp>

#include "params.h"

namespace flash_cute {

struct TileCoord {
  int m_block;  // which block_m rows
  int head;     // query head, or group of them (PackGqa)
  int batch;
  int split;  // of the keys (SplitKV)
};

// Where many query heads share a K and V head and it makes far fewer tiles, as in decoding, all
// heads of such a group are rows of one sequence, so that K and V are read once for them all: row r
// is query r / 2^n of the group's head r % 2^n, with 2^n at least the group's size. Otherwise a row
// is a query.
class PackGqa {
 public:
  // Packs where that saves a quarter of the tiles of `block_m` rows, up to `most` rows a query.
  static PackGqa make(const FwdParams& params, int block_m, int64_t most = kMaxLength) {
    const int group = params.group_size;
    int log2 = 0;
    while ((int64_t{1} << log2) < group) ++log2;
    const int64_t rows_packed = int64_t{params.len_q} << log2;
    const auto tiles_of = [&](int64_t rows) { return (rows + block_m - 1) / block_m; };
    const bool packed = (int64_t{1} << log2) <= most && rows_packed <= kMaxLength &&
                        4 * tiles_of(rows_packed) <= 3 * tiles_of(params.len_q) * group;
    PackGqa rows;
    rows.log2_ = packed ? log2 : 0;
    rows.group_ = packed ? group : 1;
    rows.heads_ = params.heads_q / rows.group_;
    rows.group_size_ = cutlass::FastDivmod(packed ? 1 : group);
    return rows;
  }

  // Of tiles, as `TileCoord::head` counts them: packed heads are one.
  CUTE_HOST_DEVICE int heads() const { return heads_; }
  CUTE_HOST_DEVICE int group_size() const { return group_size_.divisor; }
  CUTE_HOST_DEVICE int count(int len_q) const { return len_q << log2_; }
  int m_blocks(int len_q, int block_m) const { return (count(len_q) - 1) / block_m + 1; }
  // Of all heads and sequences, the keys being whole.
  int64_t tiles(const FwdParams& params, int block_m) const {
    return int64_t{m_blocks(params.len_q, block_m)} * heads() * params.batch;
  }

  CUTE_HOST_DEVICE int group() const { return group_; }              // heads that are packed
  CUTE_HOST_DEVICE int rows_of_query() const { return 1 << log2_; }  // at least as many
  CUTE_DEVICE int kv_head(int tile_head) const { return group_size_.div(tile_head); }
  CUTE_HOST_DEVICE int query(int row) const { return row >> log2_; }
  CUTE_DEVICE int in_group(int row) const { return row & ((1 << log2_) - 1); }
  CUTE_DEVICE int head(int tile_head, int row) const { return tile_head * group_ + in_group(row); }
  // Whether the row stands for anything.
  CUTE_DEVICE bool exists(int row, int len_q) const {
    return query(row) < len_q && in_group(row) < group_;
  }

  // Where the row begins that `row` stands for, of a (batch, heads_q, len_q, head_dim) tensor; of a
  // row that does not exist, somewhere. `tile` has a head and a batch.
  template <class Element, class Pointer, class Tile>
  CUTE_DEVICE Element* find(const TensorView<Pointer>& view, Tile tile, int row) const {
    return static_cast<Element*>(view.data) + tile.batch * view.stride_batch +
           head(tile.head, row) * view.stride_head + query(row) * view.stride_row;
  }

  // Calls visit(i, where row + i * kStep begins, whether it exists) for i from 0 to kCount - 1.
  template <class Element, int kCount, int kStep, class Pointer, class Visit>
  CUTE_DEVICE void walk(const TensorView<Pointer>& view, TileCoord tile, int row, int len_q,
                        const Visit& visit) const {
    Element* address = find<Element>(view, tile, row);
    if (log2_ == 0) {  // rows are queries, evenly spaced
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i, address += kStep * view.stride_row) {
        visit(i, address, row + i * kStep < len_q);
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        visit(i, find<Element>(view, tile, row + i * kStep), exists(row + i * kStep, len_q));
      }
    }
  }

 private:
  int log2_;
  int group_;
  int heads_;
  cutlass::FastDivmod group_size_;
};

}  // namespace flash_cute
