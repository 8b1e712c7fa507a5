// One tile of the SM80 backward from beginning to end, and the kernel that makes gradients of sums.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>

#include "common/gradient.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "sm80/bwd/accumulator.h"
#include "sm80/bwd/arguments.h"
#include "sm80/bwd/mainloop.h"
#include "sm80/bwd/traits.h"

namespace flash_cute::sm80 {

template <class Traits_, MaskKind kMask>
struct BwdKernel {
  using Traits = Traits_;
  using Arguments = BwdArguments;
  using SharedMemory = typename Traits::SharedMemory;
  using Mainloop = BwdMainloop<Traits, kMask>;
  using Sums = AccumulatorSums<Traits>;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    if (int* const tickets = params.workspace.tickets) {
      // CTAs that wait for others take their tiles in turn, so that all earlier ones already run.
      if (platform::thread_index() == 0) smem.ticket = platform::next_number(tickets);
      platform::sync_cta();  // the ticket is there
    }
    if constexpr (has_sequences(kMask)) {  // the grid is as large as there may be tiles
      const int index = index_of(arguments, smem, platform::cta_index());
      if (index >= arguments.packed_tiles.count()) return;
      if (platform::thread_index() == 0) {
        int head;
        const SequenceTile& entry = arguments.packed_tiles.entry(index, head);
        smem.sequence = PackedTiles::sequence(entry);
        smem.first_index = entry.first_index;
        smem.tile = PackedTiles::coord(entry, head);
      }
      platform::sync_cta();  // the sequence is there
    }
    const TileCoord found = tile_of(arguments, smem, platform::cta_index());
    const TileCoord& taken = has_sequences(kMask) ? smem.tile : found;
    const Sequence& sequence = sequence_of(params, smem, taken.batch);
    const typename Mainloop::TileMask mask(params, sequence, UnpackedRows{});

    typename Traits::TiledMmaDkv tiled_mma;
    auto tdKrdK = partition_fragment_C(tiled_mma, typename Traits::ShapeK{});
    auto tdVrdV = partition_fragment_C(tiled_mma, typename Traits::ShapeV{});
    Mainloop(arguments, taken, mask, sequence, smem).run(tdKrdK, tdVrdV);

    // Rematerialized: the tile would hold registers through the main loop.
    const TileCoord tile =
        tile_of(arguments, smem, platform::rematerialize(platform::cta_index(), sequence.len_k));
    if (params.head_splits > 1) {
      const int64_t index =
          ((int64_t{tile.split} * params.batch + tile.batch) * arguments.heads_kv + tile.head) *
              params.n_blocks +
          tile.m_block;
      Sums::store_to(params.workspace.dk + index * size(typename Traits::ShapeK{}), tdKrdK);
      Sums::store_to(params.workspace.dv + index * size(typename Traits::ShapeV{}), tdVrdV);
      return;
    }
    const int row0 = tile.m_block * Traits::kBlockN;
    const auto place = [&](const TensorView<void*>& view, int columns) {
      return GradientPlace{view, tile.batch, tile.head, sequence.first_k, sequence.len_k, columns};
    };
    using Element = typename Traits::Element;
    store_gradient<Element, typename Traits::TiledMmaDkv, typename Traits::ShapeK>(
        place(params.dk, params.head_dim), row0, params.scale.scale, tdKrdK,
        platform::thread_index());
    store_gradient<Element, typename Traits::TiledMmaDkv, typename Traits::ShapeV>(
        place(params.dv, params.head_dim_v), row0, 1.f, tdVrdV, platform::thread_index());
  }

 private:
  static CUTE_DEVICE TileCoord tile_of(const Arguments& arguments, const SharedMemory& smem,
                                       int cta) {
    const int index = index_of(arguments, smem, cta);
    const TileCoord tile =
        has_sequences(kMask) ? arguments.packed_tiles.tile(index) : arguments.decoder.tile(index);
    return {platform::warp_uniform(tile.m_block), platform::warp_uniform(tile.head),
            platform::warp_uniform(tile.batch), platform::warp_uniform(tile.split)};
  }
  static CUTE_DEVICE decltype(auto) sequence_of(const BwdParams& params, const SharedMemory& smem,
                                                int batch) {
    if constexpr (has_sequences(kMask)) {
      return (smem.sequence);
    } else {
      return Sequence::of<kMask>(params, batch);
    }
  }
  static CUTE_DEVICE int index_of(const Arguments& arguments, const SharedMemory& smem, int cta) {
    return arguments.params.workspace.tickets ? smem.ticket : cta;
  }
};

// Sums of fp32 to gradients: of dQ, and of dK and dV where CTAs share the heads of a group. A CTA
// for each tile of `Shape`.
template <class BwdTraits, class TiledMma, class Shape>
struct ConvertKernel {
  struct Traits {
    static constexpr int kThreads = BwdTraits::kThreads;
    static constexpr int kMinCtas = 1;
    struct SharedMemory {};
  };
  struct Arguments {
    TensorView<void*> gradient;
    const float* sums;  // (splits, batch, heads, blocks, a tile)
    int splits;
    int64_t tiles;  // of a split
    cutlass::FastDivmod blocks;
    cutlass::FastDivmod heads;
    int rows;
    int columns;
    float factor;
    const SequenceBlock* row_blocks;  // packed sequences: the rows of each tile; else null
  };

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory&) {
    using namespace cute;
    const int64_t tile = platform::cta_index();
    int batch_head, block, batch, head;
    arguments.blocks(batch_head, block, platform::cta_index());
    arguments.heads(batch, head, batch_head);
    int first = 0, rows = arguments.rows;
    if (arguments.row_blocks) {
      const SequenceBlock of_tile = arguments.row_blocks[block];
      if (of_tile.batch < 0) return;
      batch = of_tile.batch;
      first = of_tile.first;
      rows = of_tile.count;
      block = 0;
    }
    auto sum = partition_fragment_C(TiledMma{}, Shape{});
    clear(sum);
    for (int split = 0; split < arguments.splits; ++split) {  // in a fixed order
      const int64_t index = split * arguments.tiles + tile;
      AccumulatorSums<Traits>::add_from(arguments.sums + index * size(Shape{}), sum);
    }
    const GradientPlace place = {arguments.gradient, batch, head, first, rows, arguments.columns};
    constexpr int kRows = decltype(size<0>(Shape{}))::value;
    store_gradient<typename BwdTraits::Element, TiledMma, Shape>(
        place, block * kRows, arguments.factor, sum, platform::thread_index());
  }
};

}  // namespace flash_cute::sm80
