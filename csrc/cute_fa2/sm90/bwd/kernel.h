// A CTA of the SM90 backward from beginning to end, and the kernel that makes gradients of sums.
// Its warpgroups have roles. It has one tile of keys.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>

#include "common/gradient.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/mainloop.h"
#include "sm90/bwd/pipeline.h"
#include "sm90/bwd/producer.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/sums.h"
#include "sm90/bwd/traits.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct BwdKernel {
  using Traits = Traits_;
  using Arguments = BwdArguments;
  using SharedMemory = typename Traits::SharedMemory;
  using Mainloop = BwdMainloop<Traits, kMask>;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    if (hopper::is_first_thread()) {
      hopper::prefetch_tensor_map(arguments.maps.q);
      hopper::prefetch_tensor_map(arguments.maps.k);
      hopper::prefetch_tensor_map(arguments.maps.v);
      hopper::prefetch_tensor_map(arguments.maps.dout);
      BwdPipeline<Traits>::init_barriers(smem);
      hopper::fence_barrier_init();
      // CTAs that wait for others take their tiles in turn, so that all earlier ones already run.
      if (params.workspace.tickets) smem.ticket = platform::next_number(params.workspace.tickets);
    }
    platform::sync_cta();  // the barriers and the ticket are visible to all threads

    // Each role computes its own: the producer has few registers.
    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::register_dealloc<Traits::kConfig.producer_registers()>();
      const TileCoord tile = tile_of(arguments, smem);
      if (hopper::is_first_thread()) {
        const Sequence sequence(params, tile.batch);
        BwdProducer<Traits>(arguments, tile, sequence, smem).run(walk(arguments, tile, sequence));
      }
    } else {
      hopper::register_alloc<Traits::kConfig.consumer_registers()>();
      const int consumer = warpgroup - 1;
      auto tdKrdK = partition_fragment_C(typename Traits::MmaDk{}, typename Traits::ShapeDk{});
      auto tdVrdV = partition_fragment_C(typename Traits::MmaDv{}, typename Traits::ShapeDv{});
      const TileCoord tile = tile_of(arguments, smem);
      const Sequence sequence(params, tile.batch);
      Mainloop(arguments, tile, sequence, smem, consumer)
          .run(walk(arguments, tile, sequence), tdKrdK, tdVrdV);
      store(arguments, tile, sequence, consumer, tdKrdK, tdVrdV);
    }
  }

 private:
  static CUTE_DEVICE TileCoord tile_of(const Arguments& arguments, const SharedMemory& smem) {
    return arguments.decoder.tile(platform::warp_uniform(
        arguments.params.workspace.tickets ? smem.ticket : platform::cta_index()));
  }

  static CUTE_DEVICE QueryWalk walk(const Arguments& arguments, TileCoord tile,
                                    const Sequence& sequence) {
    const typename Mainloop::TileMask mask(arguments.params, sequence, UnpackedRows{});
    return {arguments, tile, mask, sequence, Traits::kBlockM, Traits::kBlockN};
  }

  template <class Dk, class Dv>
  static CUTE_DEVICE void store(const Arguments& arguments, TileCoord tile,
                                const Sequence& sequence, int consumer, Dk& tdKrdK, Dv& tdVrdV) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    using ShapeDk = typename Traits::ShapeDk;
    using ShapeDv = typename Traits::ShapeDv;
    if (params.head_splits > 1) {
      const int64_t tiles = int64_t{tile.split} * params.batch + tile.batch;
      const int64_t index =
          (tiles * arguments.heads_kv + tile.head) * params.n_blocks + tile.m_block;
      const int64_t part = index * Traits::kConsumers + consumer;
      WarpgroupSums::store_to(params.workspace.dk + part * size(ShapeDk{}), tdKrdK);
      WarpgroupSums::store_to(params.workspace.dv + part * size(ShapeDv{}), tdVrdV);
      return;
    }
    const int row0 = tile.m_block * Traits::kBlockN + consumer * Traits::kConsumerKeys;
    const int thread = hopper::thread_in_warpgroup();
    const auto place = [&](const TensorView<void*>& view, int columns) {
      return GradientPlace{view, tile.batch, tile.head, sequence.first_k, sequence.len_k, columns};
    };
    using Element = typename Traits::Element;
    store_gradient<Element, typename Traits::MmaDk, ShapeDk>(
        place(params.dk, params.head_dim), row0, params.scale.scale, tdKrdK, thread);
    store_gradient<Element, typename Traits::MmaDv, ShapeDv>(place(params.dv, params.head_dim_v),
                                                             row0, 1.f, tdVrdV, thread);
  }
};

// Sums of fp32 to gradients: of dQ, and of dK and dV where CTAs share the heads of a group. A tile
// has the rows of kParts accumulators, each `Shape`. A CTA for each tile, a warpgroup for each
// part.
template <class Element, class TiledMma, class Shape, int kParts>
struct ConvertKernel {
  struct Traits {
    static constexpr int kThreads = kParts * hopper::kWarpgroup;
    static constexpr int kMinCtas = 1;
    struct SharedMemory {};
  };
  struct Arguments {
    TensorView<void*> gradient;
    const float* sums;  // (splits, batch, heads, blocks, parts, an accumulator)
    int splits;
    int64_t tiles;  // of a split
    cutlass::FastDivmod blocks;
    cutlass::FastDivmod heads;
    int rows;
    int columns;
    float factor;
  };

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory&) {
    using namespace cute;
    const int64_t tile = platform::cta_index();
    int batch_head, block, batch, head;
    arguments.blocks(batch_head, block, platform::cta_index());
    arguments.heads(batch, head, batch_head);
    const int part = hopper::warpgroup_index();
    auto sum = partition_fragment_C(TiledMma{}, Shape{});
    clear(sum);
    for (int split = 0; split < arguments.splits; ++split) {  // in a fixed order
      const int64_t index = (split * arguments.tiles + tile) * kParts + part;
      WarpgroupSums::add_from(arguments.sums + index * size(Shape{}), sum);
    }
    const GradientPlace place = {arguments.gradient, batch, head, 0, arguments.rows,
                                 arguments.columns};
    constexpr int kRows = decltype(size<0>(Shape{}))::value;
    store_gradient<Element, TiledMma, Shape>(place, (block * kParts + part) * kRows,
                                             arguments.factor, sum, hopper::thread_in_warpgroup());
  }
};

}  // namespace flash_cute::sm90
