// Masks as intervals: for a query row, the first visible key and one past the last, of the keys
// that the tile attends to. Both never decrease from a row to the next, and from them alone follow
// the key blocks that a tile visits, those that need no test of single elements, and that test.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile.h"
#include "params.h"

namespace flash_cute {

struct BlockRange {
  int begin;
  int end;  // one past the last
};

template <MaskKind kKind>
class Mask {
 public:
  CUTE_HOST_DEVICE Mask(const FwdParams& params, Sequence sequence, const PackGqa& pack_gqa)
      : key_begin_(sequence.key_begin),
        key_end_(sequence.key_end),
        band_begin_(params.band_begin),
        band_end_(params.band_end),
        pack_gqa_(pack_gqa) {}

  CUTE_HOST_DEVICE int begin(int row) const {
    return kKind == MaskKind::kFull ? key_begin_
                                    : cute::max(key_begin_, pack_gqa_.query(row) + band_begin_);
  }
  CUTE_HOST_DEVICE int end(int row) const {
    return kKind == MaskKind::kFull ? key_end_
                                    : cute::min(key_end_, pack_gqa_.query(row) + band_end_);
  }

  // The key blocks of which any of the rows [row_begin, row_end) sees a key; empty (end <= begin)
  // when there is none.
  CUTE_DEVICE BlockRange visible_blocks(int row_begin, int row_end, int block_n) const {
    return {begin(row_begin) / block_n, (cute::max(0, end(row_end - 1)) + block_n - 1) / block_n};
  }

  // The key blocks of which every one of `rows` rows from `row_origin` on sees every key. In other
  // visible blocks `cuts` holds; who has the registers finds out once a tile.
  CUTE_DEVICE BlockRange whole_blocks(int row_origin, int rows, int block_n) const {
    return {(begin(row_origin + rows - 1) + block_n - 1) / block_n, end(row_origin) / block_n};
  }

  // Whether an edge of any row's interval runs through the tile of `rows` x `keys` at
  // (row_origin, key_origin), so that its elements need a test.
  CUTE_DEVICE bool cuts(int row_origin, int rows, int key_origin, int keys) const {
    row_origin = platform::rematerialize(row_origin, key_origin);
    return end(row_origin) < key_origin + keys || begin(row_origin + rows - 1) > key_origin;
  }

  // Sets the scores outside each row's interval to -inf. `scores` are a thread's, `coords` (row and
  // key of each score within the tile of `rows` x `keys`) in the same (rows, columns) layout, and
  // `offsets` those of thread 0, which are constants; the tile begins at (row_origin, key_origin).
  template <class Scores, class Coords, class Offsets>
  CUTE_DEVICE void apply(Scores& scores, const Coords& coords, const Offsets& offsets,
                         int row_origin, int rows, int key_origin, int keys) const {
    // Few blocks need this: what is computed on the way must not cost the others registers.
    row_origin = platform::rematerialize(row_origin);
    // Coordinates may be unsigned; what they are compared with may be below 0.
    const auto row_of = [](auto coord) { return static_cast<int>(cute::get<0>(coord)); };
    const auto key_of = [](auto coord) { return static_cast<int>(cute::get<1>(coord)); };
    const int first_row = row_origin + row_of(coords(0, 0));
    const int first_key = key_origin + key_of(coords(0, 0));
    // Each of the two edges costs a test of every score, so only where it crosses the tile.
    if (end(row_origin) < key_origin + keys) {
      CUTE_UNROLL
      for (int r = 0; r < cute::size<0>(scores); ++r) {
        const int row_end = end(first_row + row_of(offsets(r, 0))) - first_key;
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) {
          if (key_of(offsets(r, c)) >= row_end) scores(r, c) = -INFINITY;
        }
      }
    }
    if (kKind == MaskKind::kBanded && begin(row_origin + rows - 1) > key_origin) {
      CUTE_UNROLL
      for (int r = 0; r < cute::size<0>(scores); ++r) {
        const int row_begin = begin(first_row + row_of(offsets(r, 0))) - first_key;
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) {
          if (key_of(offsets(r, c)) < row_begin) scores(r, c) = -INFINITY;
        }
      }
    }
  }

 private:
  int key_begin_;
  int key_end_;
  int band_begin_;
  int band_end_;
  PackGqa pack_gqa_;  // of two rows the later one's query is no earlier
};

}  // namespace flash_cute
