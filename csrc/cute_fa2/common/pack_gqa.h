// Which query a row of a tile is, and where that row is in memory.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>
#include <cute/config.hpp>

#include "common/sequence.h"
#include "host/gqa_layout.h"
#include "host/params.h"

namespace flash_cute {

class PackGqa : public GqaLayout {
 public:
  explicit PackGqa(const GqaLayout& layout) : GqaLayout(layout), heads_per_kv_(heads_per_kv) {}

  CUTE_DEVICE int kv_head(int tile_head) const { return heads_per_kv_.div(tile_head); }
  CUTE_DEVICE int in_group(int row) const { return row & ((1 << log2_rows) - 1); }
  CUTE_DEVICE int head(int tile_head, int row) const {
    return tile_head * packed_heads + in_group(row);
  }
  // The head and the query of a row, of one that stands for none a head that there is.
  struct HeadAndQuery {
    int head;
    int query;
  };
  CUTE_DEVICE HeadAndQuery query_of(int tile_head, int row) const {
    return {tile_head * packed_heads + cute::min(in_group(row), packed_heads - 1), query(row)};
  }
  // Whether the row stands for a query of the sequence.
  CUTE_DEVICE bool exists(int row, const Sequence& sequence) const {
    return query(row) < sequence.len_q && in_group(row) < packed_heads;  // fault: packed-row
  }

  // The address of the row in a (batch, heads_q, len_q, columns) tensor; of a row that does not
  // exist, any. `tile` has a head and a batch.
  template <class Element, class Pointer, class Tile>
  CUTE_DEVICE Element* find(const TensorView<Pointer>& view, Tile tile, int row,
                            const Sequence& sequence) const {
    return static_cast<Element*>(view.data) + tile.batch * view.stride_batch +
           head(tile.head, row) * view.stride_head +
           (sequence.first_q + query(row)) * view.stride_row;
  }

  // Calls visit(i, address of row + i * kStep, whether it exists) for i from 0 to kCount - 1.
  template <class Element, int kCount, int kStep, class Pointer, class Tile, class Visit>
  CUTE_DEVICE void for_each_row(const TensorView<Pointer>& view, Tile tile, int row,
                                const Sequence& sequence, const Visit& visit) const {
    Element* address = find<Element>(view, tile, row, sequence);
    if (log2_rows == 0) {  // rows are queries, evenly spaced
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i, address += kStep * view.stride_row) {
        visit(i, address, row + i * kStep < sequence.len_q);
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const int packed_row = row + i * kStep;
        visit(i, find<Element>(view, tile, packed_row, sequence), exists(packed_row, sequence));
      }
    }
  }

 private:
  cutlass::FastDivmod heads_per_kv_;
};

}  // namespace flash_cute
