// Masks as intervals: for a query row, the first visible key and one past the last. Both never
// decrease from a row to the next, and from them alone follow the key blocks that a tile visits,
// those that need no test of single elements, and that test.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "common/sequence.h"
#include "params.h"

namespace flash_cute {

struct BlockRange {
  int begin;
  int end;  // one past the last

  CUTE_DEVICE bool contains(int block) const { return begin <= block && block < end; }
};

template <MaskKind kKind>
class Mask {
 public:
  CUTE_DEVICE Mask(const FwdParams& params, Sequence sequence)
      : len_k_(sequence.len_k), band_begin_(params.band_begin), band_end_(params.band_end) {}

  CUTE_DEVICE int begin(int row) const {
    return kKind == MaskKind::kFull ? 0 : cute::max(0, row + band_begin_);
  }
  CUTE_DEVICE int end(int row) const {
    return kKind == MaskKind::kFull ? len_k_ : cute::min(len_k_, row + band_end_);
  }

  // The key blocks of which any of the rows [row_begin, row_end) sees a key; empty (end <= begin)
  // when there is none.
  CUTE_DEVICE BlockRange visible_blocks(int row_begin, int row_end, int block_n) const {
    return {begin(row_begin) / block_n, (cute::max(0, end(row_end - 1)) + block_n - 1) / block_n};
  }

  // The key blocks of which every one of the rows sees every key, so that no element needs a test.
  CUTE_DEVICE BlockRange fully_visible_blocks(int row_begin, int row_end, int block_n) const {
    return {(begin(row_end - 1) + block_n - 1) / block_n, cute::max(0, end(row_begin)) / block_n};
  }

  // Sets the scores outside each row's interval to -inf. `scores` and `coords` (row and key of each
  // score within the tile) have the same (rows, columns) layout; the tile begins at (row_origin,
  // key_origin).
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, const Coords& coords, int row_origin,
                         int key_origin) const {
    // Few blocks need this: what is computed on the way must not cost the others registers.
    row_origin = platform::computed_here(row_origin);
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(scores); ++r) {
      const int row = row_origin + cute::get<0>(coords(r, 0));
      const int row_begin = begin(row) - key_origin;
      const int row_end = end(row) - key_origin;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        const int key = cute::get<1>(coords(r, c));
        if (key >= row_end || (kKind == MaskKind::kBanded && key < row_begin))
          scores(r, c) = -INFINITY;
      }
    }
  }

 private:
  int len_k_;
  int band_begin_;
  int band_end_;
};

}  // namespace flash_cute
