// Keys in several parts, for calls with too few tiles to keep the GPU busy, as in decoding ("Flash-
// Decoding": Dao, Haziza, Massa and Sizov 2023): into how many, and what combines their results.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "config.h"
#include "params.h"

namespace flash_cute {

// How many tiles of `block_m` rows a call has, its keys being whole; where heads share K and V, a
// query may be up to `most` rows.
int64_t tiles_of(const FwdParams& params, int block_m, int64_t most = kMaxLength);

// The tiles of a call that may split its keys, and what they take: in the time that a
// multiprocessor full of thread blocks needs for a key of each, with all rows of a tile. Of sm80
// the costs are guesses by a model of the GPU, of sm90 such as choose well on an H100;
// bench/results/decode.json has what they choose beside other numbers of parts.
struct SplitCost {
  int64_t count;          // for each part of the keys
  int block_n;            // keys of a block
  int ctas_per_sm;        // thread blocks on a multiprocessor; of sm90 tiles at a time
  double of_key;          // what a key takes, by a tile's rows
  double of_tile;         // and a tile beside its keys, as keys
  double of_combining;    // what it takes to combine parts: at all,
  double of_row;          // for each row,
  double of_row_of_part;  // and for each of its parts
  double whole_rounds;    // of tiles on the busiest multiprocessor, if the keys stay whole

  static SplitCost of_sm80(const FwdParams& params, const TileEntrySm80& row, int multiprocessors);
  // `row` has the tiles for parts, `whole` those for whole keys.
  static SplitCost of_sm90(const FwdParams& params, MaskKind mask, const TileEntrySm90& row,
                           const TileEntrySm90& whole, int multiprocessors);
};

// How they best split the keys on a device of so many multiprocessors; `asked`: into at most how
// many parts instead, or 0. Where to put what comes of the parts is left open.
SplitKV choose_splits(const FwdParams& params, const SplitCost& tiles, int multiprocessors,
                      int64_t asked);

// How many bytes that takes, and where it is to be: 16-byte aligned memory of the device.
int64_t bytes_of_splits(const FwdParams& params);
void place_splits(FwdParams& params, void* memory);

// Launches the kernel that makes `out` and `lse` of what has come of the parts.
void launch_combine(const FwdParams& params, DType dtype, int device, cudaStream_t stream);

}  // namespace flash_cute
