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

// How the tiles of `row` best split the keys on a device of so many multiprocessors; `asked`: into
// at most how many parts instead, or 0. Where to put what comes of the parts is left open.
KeySplits choose_splits(const FwdParams& params, const FwdRow& row, int multiprocessors,
                        int64_t asked);

// How many bytes that takes, and where it is to be: 16-byte aligned memory of the device.
int64_t bytes_of_splits(const FwdParams& params);
void place_splits(FwdParams& params, void* memory);

// Launches the kernel that makes `out` and `lse` of what has come of the parts.
void combine_splits(const FwdParams& params, DType dtype, int device, cudaStream_t stream);

}  // namespace flash_cute
