// A CTA of the SM80 backward above head dim 256, or in fp32: a tile of one gradient from beginning
// to end.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>

#include "common/gradient.h"
#include "common/packed_tiles.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"
#include "sm80/bwd/large/mainloop.h"
#include "sm80/bwd/large/traits.h"

namespace flash_cute::sm80 {

// A tile has some rows, and one group of the columns. CTAs of all groups are neighbours.
struct LargeBwdArguments {
  BwdParams params;  // its band is that of sequences (Band::of_sequence), of dense tensors too
  TileDecoder decoder;
  PackedTiles packed_tiles;  // in place of the decoder, for MaskKind::kPacked
  cutlass::FastDivmod column_groups;
  cutlass::FastDivmod group_size;  // query heads of a key head
};

template <class Traits_, Gradient kOf>
struct LargeBwdKernel {
  using Traits = Traits_;
  using Arguments = LargeBwdArguments;
  using SharedMemory = typename Traits::SharedMemory;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    const BwdParams& params = arguments.params;
    int index, group;
    arguments.column_groups(index, group, platform::cta_index());
    // The grid is as large as there may be tiles.
    if (has_sequences(params.mask) && index >= arguments.packed_tiles.count()) return;
    if (platform::thread_index() == 0) {
      smem.tile = find(arguments, index);
      smem.tile.column = group * Traits::kColumns;
      const int head = smem.tile.at.head;
      smem.tile.first_head =
          kOf == Gradient::kDq ? arguments.group_size.div(head) : head * params.group_size;
    }
    platform::sync_cta();  // the tile is there

    // (4, MMA_M, MMA_N)
    auto gradient = cute::partition_fragment_C(typename Traits::TiledMmaGradient{},
                                               typename Traits::ShapeGradient{});
    LargeBwdMainloop<Traits, kOf>(params, smem).run(gradient);
    store(params, smem.tile, gradient);
  }

 private:
  using Tile = typename Traits::Tile;

  static CUTE_DEVICE Tile find(const Arguments& arguments, int index) {
    const BwdParams& params = arguments.params;
    if (has_sequences(params.mask)) {
      int head;
      const SequenceTile& entry = arguments.packed_tiles.entry(index, head);
      return {PackedTiles::coord(entry, head), PackedTiles::sequence(entry),
              int64_t{entry.first_index} * Traits::kBlockRows, 0, 0};
    }
    const TileCoord at = arguments.decoder.tile(index);
    return {at, Sequence::of<MaskKind::kBanded>(params, at.batch),
            int64_t{at.batch} * params.heads_q * params.m_blocks * Traits::kBlockRows, 0, 0};
  }

  template <class Accumulator>
  static CUTE_DEVICE void store(const BwdParams& params, const Tile& tile, Accumulator& gradient) {
    constexpr bool kIsDq = kOf == Gradient::kDq, kIsDv = kOf == Gradient::kDv;
    const Sequence& sequence = tile.sequence;
    TensorView<void*> view = kIsDq ? params.dq : kIsDv ? params.dv : params.dk;
    view.data = static_cast<typename Traits::Element*>(view.data) + tile.column;
    const GradientPlace place = {view,
                                 tile.at.batch,
                                 tile.at.head,
                                 kIsDq ? sequence.first_q : sequence.first_k,
                                 kIsDq ? sequence.len_q : sequence.len_k,
                                 (kIsDv ? params.head_dim_v : params.head_dim) - tile.column};
    store_gradient<typename Traits::Element, typename Traits::TiledMmaGradient,
                   typename Traits::ShapeGradient>(place, tile.at.m_block * Traits::kTileRows,
                                                   kIsDv ? 1.f : params.scale.scale, gradient,
                                                   platform::thread_index());
  }
};

}  // namespace flash_cute::sm80
