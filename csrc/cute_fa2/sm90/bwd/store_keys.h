// dK or dV of some keys, out of a warpgroup's accumulators.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/gradient.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/sums.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

struct KeysGradient {
  const TensorView<void*>& view;
  float* sums;  // where CTAs share the heads of a group: the workspace for it
  int columns;
  float factor;
};

// How a warp stages its 16 rows: with a chunk of 16 bytes more in each, a chunk of 8 rows lies in
// all banks.
constexpr int kStagedRows = 16, kStagedChunk = 8;
constexpr int staged_size(int columns) { return kStagedRows * (columns + kStagedChunk); }

// The warp's rows, from row `row0` of the place on: factor x accumulator. They go through `staged`,
// which is the warp's own, so that neighbouring lanes store neighbouring chunks.
template <int kColumns, class Element, class Accumulator>
CUTE_DEVICE void store_staged(const GradientPlace& place, int row0, float factor,
                              const Accumulator& accumulator, Element* staged) {
  using namespace cute;
  constexpr int kRows = kStagedRows, kChunk = kStagedChunk, kPitch = kColumns + kChunk;
  const int lane = hopper::thread_in_warpgroup() % 32;
  Element* const to = staged + lane % kRows * kPitch + lane / kRows * kChunk;
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += 16) {
    auto eight = make_tensor<float>(_8{});  // ((2 columns, 2 rows), 2 x 8 columns)
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) eight(i) = factor * accumulator(column / 2 + i);
    auto words = make_tensor<uint32_t>(_4{});
    convert_to_words<Element>(eight, words);
    const uint32_t block[4] = {words(0), words(1), words(2), words(3)};
    hopper::stmatrix(to + column, block);
  }
  hopper::sync_warp();  // all rows are there

  constexpr int kChunks = kColumns / kChunk;
  constexpr int kOfLane = kRows * kChunks / 32;
  uint128_t chunks[kOfLane];
  CUTE_UNROLL
  for (int i = 0; i < kOfLane; ++i) {
    const int index = i * 32 + lane;
    chunks[i] = *reinterpret_cast<const uint128_t*>(staged + index / kChunks * kPitch +
                                                    index % kChunks * kChunk);
  }
  const TensorView<void*>& view = place.view;
  Element* const first = static_cast<Element*>(view.data) + place.batch * view.stride_batch +
                         place.head * view.stride_head + place.first * view.stride_row;
  CUTE_UNROLL
  for (int i = 0; i < kOfLane; ++i) {
    const int index = i * 32 + lane, row = row0 + index / kChunks,
              column = index % kChunks * kChunk;
    if (row >= place.rows || column >= place.columns) continue;
    *reinterpret_cast<uint128_t*>(first + row * view.stride_row + column) = chunks[i];
  }
  hopper::sync_warp();  // all rows have been read
}

// Of the keys of warpgroup `part` of `kParts` of the tile, which has `Shape` of them each. With
// kIsStaged through `staged`, shared memory of this warp.
template <class Element, class Mma, class Shape, int kParts, bool kIsStaged = false,
          class Accumulator>
CUTE_DEVICE void store_keys(const BwdArguments& arguments, const TileCoord& tile,
                            const Sequence& sequence, int part, const KeysGradient& gradient,
                            Accumulator& accumulator, Element* staged = nullptr) {
  const BwdParams& params = arguments.params;
  if (params.head_splits > 1) {
    const int64_t tiles = int64_t{tile.split} * params.batch + tile.batch;
    const int64_t index = (tiles * arguments.heads_kv + tile.head) * params.n_blocks + tile.m_block;
    constexpr int kSize = decltype(cute::size(Shape{}))::value;
    return WarpgroupSums::store_to(gradient.sums + (index * kParts + part) * kSize, accumulator);
  }
  constexpr int kKeys = decltype(cute::size<0>(Shape{}))::value;
  const GradientPlace place = {gradient.view,    tile.batch,     tile.head,
                               sequence.first_k, sequence.len_k, gradient.columns};
  const int row0 = (tile.m_block * kParts + part) * kKeys;
  if constexpr (kIsStaged) {
    store_staged<decltype(cute::size<1>(Shape{}))::value>(
        place, row0 + hopper::warp_in_warpgroup() * kStagedRows, gradient.factor, accumulator,
        staged);
  } else {
    store_gradient<Element, Mma, Shape>(place, row0, gradient.factor, accumulator,
                                        hopper::thread_in_warpgroup());
  }
}

}  // namespace flash_cute::sm90
