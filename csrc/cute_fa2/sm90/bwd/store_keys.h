// dK or dV of some keys, out of a warpgroup's accumulators.
#pragma once

#include <cute/tensor.hpp>

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

// Of the keys of warpgroup `part` of `kParts` of the tile, which has `Shape` of them each.
template <class Element, class Mma, class Shape, int kParts, class Accumulator>
CUTE_DEVICE void store_keys(const BwdArguments& arguments, const TileCoord& tile,
                            const Sequence& sequence, int part, const KeysGradient& gradient,
                            Accumulator& accumulator) {
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
  store_gradient<Element, Mma, Shape>(place, (tile.m_block * kParts + part) * kKeys,
                                      gradient.factor, accumulator, hopper::thread_in_warpgroup());
}

}  // namespace flash_cute::sm90
