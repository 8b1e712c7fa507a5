// dK or dV of some keys, out of a warpgroup's accumulators.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/gradient.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/layouts.h"
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

// The same of a consumer of one pass, of dK and dV. Each warp lays its 16 rows into `staged`, its
// own, as TMA stores them.
template <class Traits, bool kHasSequences>
class KeysStore {
  using Element = typename Traits::Element;
  static constexpr int kRows = BwdTensorMaps::kWarpRows;
  static_assert(4 * kRows == Traits::kConsumerKeys);

 public:
  template <class Dk, class Dv>
  static CUTE_DEVICE void run(const BwdArguments& arguments, const TileCoord& tile,
                              const Sequence& sequence, int consumer, Dk& tdKrdK, Dv& tdVrdV,
                              Element* staged) {
    const BwdParams& params = arguments.params;
    const float scale = params.scale.scale;
    const int row0 = (tile.m_block * Traits::kConsumers + consumer) * Traits::kConsumerKeys +
                     hopper::warp_in_warpgroup() * kRows;
    // The map does not know where a sequence ends that another one follows.
    const bool is_last = kHasSequences && row0 + kRows > sequence.len_k;  // fault: bwd90-last-store
    if (is_last || params.head_splits > 1) {
      store_keys<Element, typename Traits::MmaDk, typename Traits::ShapeDk, Traits::kConsumers>(
          arguments, tile, sequence, consumer,
          {params.dk, params.workspace.dk, params.head_dim, scale}, tdKrdK);
      store_keys<Element, typename Traits::MmaDv, typename Traits::ShapeDv, Traits::kConsumers>(
          arguments, tile, sequence, consumer,
          {params.dv, params.workspace.dv, params.head_dim_v, 1.f}, tdVrdV);
      return;
    }
    constexpr int kStrip = Traits::kStrip, kStripV = Traits::kStripV;
    Element* const staged_v = staged + kRows * Traits::kHeadDim;
    stage<Traits::kHeadDim, kStrip>(staged, scale, tdKrdK);
    stage<Traits::kHeadDimV, kStripV>(staged_v, 1.f, tdVrdV);
    // What each lane wrote is visible to TMA, and once all lanes are here, to the first one's
    // boxes.
    hopper::fence_async_proxy();
    hopper::sync_warp();
    if (!hopper::is_first_lane()) return;
    const int row = static_cast<int>(sequence.first_k) + row0;
    const auto store = [&](const CUtensorMap& map, const TensorView<void*>& view, Element* from,
                           int columns, int strip) {
      CUTE_UNROLL
      for (int column = 0; column < columns; column += strip) {
        hopper::tma_store(map, from + column * kRows, column, 0, row, tile.head,
                          view.stride_batch != 0 ? tile.batch : 0);
      }
    };
    store(arguments.maps.dk, params.dk, staged, Traits::kHeadDim, kStrip);
    store(arguments.maps.dv, params.dv, staged_v, Traits::kHeadDimV, kStripV);
    hopper::tma_store_commit();
  }

  // Waits until TMA has read what this warp staged. Then all its lanes may write there again.
  static CUTE_DEVICE void wait_until_read() {
    if (hopper::is_first_lane()) hopper::tma_store_wait<0>();  // fault: bwd90-store-wait
    hopper::sync_warp();
  }

 private:
  // The warp's 16 rows of factor x accumulator ((2, 2, kColumns / 8), 1, 1), a strip of columns
  // after the other, swizzled.
  template <int kColumns, int kStrip, class Accumulator>
  static CUTE_DEVICE void stage(Element* staged, float factor, const Accumulator& accumulator) {
    using namespace cute;
    using Layout = decltype(as_position_independent_swizzle_layout(
        ByRows<Element, Tile<kRows, kStrip>, kStrip>{}));
    const int lane = hopper::thread_in_warpgroup() % 32;
    // Where this lane's chunk of columns 0 to 15 lies; `first ^ column` is that of later columns.
    const int first = Layout{}(lane % kRows, lane / kRows * 8);
    CUTE_UNROLL
    for (int column = 0; column < kColumns; column += 16) {
      auto eight = make_tensor<float>(_8{});  // ((2 columns, 2 rows), 2 x 8 columns)
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) eight(i) = factor * accumulator(column / 2 + i);
      auto words = make_tensor<uint32_t>(_4{});
      convert_to_words<Element>(eight, words);
      const uint32_t block[4] = {words(0), words(1), words(2), words(3)};
      hopper::stmatrix(staged + column / kStrip * kStrip * kRows + (first ^ (column % kStrip)),
                       block);
    }
  }
};

}  // namespace flash_cute::sm90
