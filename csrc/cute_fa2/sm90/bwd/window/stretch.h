// A stretch of the diagonal: what a CTA of WindowKernel works on. All blocks have 64 rows or keys.
//
// A window whose sides reach over `before` and `behind` whole blocks, of which there are two at
// most, lets a block of rows see three blocks of keys. They are numbered so that block j of rows
// sees the keys i = j, j + 1 and j + 2. So block i of keys is seen by the rows j = i - 2, i - 1 and
// i. The stretch has the rows j from 0 on. dQ of those needs two blocks of keys more than rows, and
// dK and dV of the last keys two blocks of rows of the next stretch. The first two blocks of keys
// have their dK and dV from the stretch before.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/plan_bwd.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute::sm90 {

struct Stretch {
  static constexpr int kBlock = WindowConfigSm90::kBlock;
  static constexpr int kMore = WindowConfigSm90::kSpan - 1;  // blocks

  int first;    // block of rows, in the sequence
  int rows;     // blocks of rows whose dQ it makes
  int reading;  // blocks of rows that it reads
  int shift;    // the number of the first block of keys, in the sequence
  int blocks;   // of the sequence, whose rows are as many as its keys

  static CUTE_DEVICE Stretch of(const TileCoord& tile, const Sequence& sequence,
                                const NarrowWindow& window) {
    const int blocks = (sequence.len_k + kBlock - 1) / kBlock;
    const int first = tile.m_block * window.stretch;
    return {first, cute::min(window.stretch, blocks - first),
            cute::min(window.stretch + kMore, blocks - first), first + window.behind - kMore,
            blocks};
  }

  CUTE_DEVICE int keys() const { return rows + kMore; }
  CUTE_DEVICE int row0(int j) const { return (first + j) * kBlock; }
  CUTE_DEVICE int key0(int i) const { return (shift + i) * kBlock; }
  // At either end of a sequence some numbers have no keys.
  CUTE_DEVICE bool has_keys(int i) const { return shift + i >= 0 && shift + i < blocks; }
  // Whether it makes dK and dV of block i.
  CUTE_DEVICE bool owns_keys(int i) const { return has_keys(i) && (i >= kMore || first == 0); }
};

}  // namespace flash_cute::sm90
