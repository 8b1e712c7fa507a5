// Masks as intervals. For a query row: the first visible key and one past the last, of the keys
// that the tile attends to. Neither decreases from a row to the next. From them alone follow the
// key blocks that a tile visits, those that need no element test, and that test.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/platform.h"
#include "common/sequence.h"
#include "host/gqa_layout.h"
#include "host/params.h"

namespace flash_cute {

struct BlockRange {
  int begin;
  int end;  // one past the last
};

// Rows that are queries, of one head.
struct UnpackedRows {
  static CUTE_DEVICE int query(int row) { return row; }
};

// `kSplitKV`: whether the sequence's keys may be those of a split.
template <MaskKind kKind, class Rows = GqaLayout, bool kSplitKV = !has_sequences(kKind)>
class Mask {
 public:
  CUTE_DEVICE Mask(const AttentionParams& params, const Sequence& sequence, const Rows& rows)
      : key_begin_(sequence.key_begin),
        key_end_(sequence.key_end),
        band_(has_sequences(kKind) ? params.band.of_sequence(sequence.len_q, sequence.len_k)
                                   : params.band),
        rows_(rows) {}

  CUTE_DEVICE int begin(int row) const {
    const int key_begin = kSplitKV ? key_begin_ : 0;
    return kKind == MaskKind::kFull ? key_begin
                                    : cute::max(key_begin, band_.begin_of(rows_.query(row)));
  }
  CUTE_DEVICE int end(int row) const {
    return kKind == MaskKind::kFull ? key_end_
                                    : cute::min(key_end_, band_.end_of(rows_.query(row)));
  }

  // The key blocks of which any of the rows [row_begin, row_end) sees a key. Empty (end <= begin)
  // if there is none. A size is an int, or a BlockSize.
  template <class Size>
  CUTE_DEVICE BlockRange visible_blocks(int row_begin, int row_end, Size block_n) const {
    return {begin(row_begin) / block_n, (cute::max(0, end(row_end - 1)) + block_n - 1) / block_n};
  }

  // The key blocks of which each of the `rows` rows from `row_origin` on sees every key. For all
  // other visible blocks `cuts` is true.
  CUTE_DEVICE BlockRange whole_blocks(int row_origin, int rows, int block_n) const {
    return {(begin(row_origin + rows - 1) + block_n - 1) / block_n, end(row_origin) / block_n};
  }

  // The inverse of visible_blocks: the blocks of rows of which any sees one of the keys
  // [key_begin, key_end). For rows that are queries. Where the first of them would be past the last
  // row, the last block may be among them; the mask then leaves nothing of it.
  template <class Size>
  CUTE_DEVICE BlockRange visible_row_blocks(int key_begin, int key_end, int len_q,
                                            Size block_m) const {
    static_assert(std::is_same_v<Rows, UnpackedRows>);
    const bool is_full = kKind == MaskKind::kFull;
    const int begin = is_full ? 0 : cute::max(0, band_.query_begin_of(key_begin));
    const int end = is_full ? len_q : cute::min(len_q, band_.query_end_of(key_end - 1));
    return {begin / block_m, (cute::max(0, end) + block_m - 1) / block_m};
  }

  // Whether the tile of `rows` x `keys` at (row_origin, key_origin) needs an element test: the edge
  // of some row's interval runs through it.
  CUTE_DEVICE bool cuts(int row_origin, int rows, int key_origin, int keys) const {
    row_origin = platform::rematerialize(row_origin, key_origin);
    return end(row_origin) < key_origin + keys || begin(row_origin + rows - 1) > key_origin;
  }

  // The inverse of `cuts`: the rows at which a tile of `rows` x `keys` may begin uncut. For rows
  // that are queries, and keys from key_begin on.
  CUTE_DEVICE BlockRange uncut_origins(int rows, int key_origin, int keys) const {
    static_assert(std::is_same_v<Rows, UnpackedRows> && kKind != MaskKind::kFull);
    const int last_key = key_origin + keys - 1;
    if (last_key >= key_end_) return {0, 0};
    return {band_.query_begin_of(last_key), band_.query_end_of(key_origin) - (rows - 1)};
  }

  // Sets the scores outside each row's interval to -inf. The tile of `rows` x `keys` begins at
  // (row_origin, key_origin). `scores` are a thread's, and `coords` their (row, key) in the tile,
  // in the same (rows, columns) layout. `offsets` are the coords of thread 0, which are constants.
  template <class Scores, class Coords, class Offsets>
  CUTE_DEVICE void apply(Scores& scores, const Coords& coords, const Offsets& offsets,
                         int row_origin, int rows, int key_origin, int keys) const {
    // Few blocks come here. Rematerialized, so that the others pay no registers for it.
    row_origin = platform::rematerialize(row_origin);
    // Coordinates may be unsigned. What they are compared with may be below 0.
    const auto row_of = [](auto coord) { return static_cast<int>(cute::get<0>(coord)); };
    const auto key_of = [](auto coord) { return static_cast<int>(cute::get<1>(coord)); };
    const int first_row = row_origin + row_of(coords(0, 0));
    const int first_key = key_origin + key_of(coords(0, 0));
    // Each of the two edges costs a test of every score. Only where it crosses the tile.
    if (end(row_origin) < key_origin + keys) {
      CUTE_UNROLL
      for (int r = 0; r < cute::size<0>(scores); ++r) {
        const int row_end = end(first_row + row_of(offsets(r, 0))) - first_key;  // fault: mask-edge
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) {
          if (key_of(offsets(r, c)) >= row_end) scores(r, c) = -INFINITY;
        }
      }
    }
    if (kKind != MaskKind::kFull && begin(row_origin + rows - 1) > key_origin) {
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
  Band band_;
  [[no_unique_address]] Rows rows_;  // of two rows, the later one's query is no earlier
};

// As Mask::visible_row_blocks, but without a last block that sees none of the keys.
template <class TileMask, class Size>
CUTE_DEVICE BlockRange row_blocks_that_see(const TileMask& mask, int key_begin, int key_end,
                                           int len_q, Size block_m) {
  BlockRange rows = mask.visible_row_blocks(key_begin, key_end, len_q, block_m);
  if (rows.end <= rows.begin) return rows;
  const int row0 = (rows.end - 1) * block_m, row_end = cute::min(row0 + block_m, len_q);
  if (mask.begin(row0) >= key_end || mask.end(row_end - 1) <= key_begin) --rows.end;
  return rows;
}

// The other way: the key blocks of which any of the rows sees a key. The two have to agree exactly,
// as dQ of a block of rows is made when so many tiles have added to it (DqAdder). With more it
// would never be made, with fewer too early.
template <class TileMask, class Size>
CUTE_DEVICE BlockRange key_blocks_seen_by(const TileMask& mask, int row_begin, int row_end,
                                          Size block_n) {
  if (mask.begin(row_begin) >= mask.end(row_end - 1)) return {0, 0};
  return mask.visible_blocks(row_begin, row_end, block_n);
}

}  // namespace flash_cute
