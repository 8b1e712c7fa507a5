// The gradient of a bias above head dim 256, or in fp32. Sums of dS are in registers.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"
#include "sm80/bwd/bias_tiles.h"
#include "sm80/bwd/large/mainloop.h"
#include "sm80/bwd/large/traits.h"

namespace flash_cute::sm80 {

template <class Traits_>
struct LargeBiasGradientKernel {
  using Traits = Traits_;
  using SharedMemory = typename Traits::SharedMemory;
  using TiledMma = typename Traits::TiledMmaS;
  using ShapeS = typename Traits::ShapeS;
  using Tiles =
      BiasTiles<typename Traits::Element, TiledMma, ShapeS, Traits::kThreads, Traits::kBlockRows>;
  using Arguments = typename Tiles::Arguments;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    const auto bias_tile = Tiles::of_cta(arguments);
    auto sums = partition_fragment_C(TiledMma{}, ShapeS{});  // (4, MMA_M, kBlockRows / 32)
    clear(sums);
    Tiles::for_each(arguments, bias_tile,
                    [&](const TileCoord& at, int key_block, const Sequence& sequence) {
                      platform::sync_cta();  // all warps are done with the block before
                      if (platform::thread_index() == 0) {
                        const int64_t stats_blocks = int64_t{at.batch} * arguments.stats_blocks;
                        smem.tile = {at, sequence, stats_blocks * Traits::kBlockRows, 0,
                                     at.head / params.group_size};
                      }
                      platform::sync_cta();  // it is known which block comes, to all threads
                      LargeBwdMainloop<Traits, Gradient::kBias>(params, smem).add(key_block, sums);
                    });

    // The ring's memory is free.
    static_assert(sizeof(float) * size(ShapeS{}) <= sizeof(smem.chunks));
    auto* const places = reinterpret_cast<float*>(smem.chunks);
    const auto matrix = as_matrix(sums);  // (rows, columns)
    const auto mine = Tiles::coords(platform::thread_index());
    platform::sync_cta();  // all warps are done with the last block
    CUTE_UNROLL
    for (int i = 0; i < size(matrix); ++i) places[Tiles::place(mine(i))] = matrix(i);
    Tiles::store(arguments, bias_tile, places);
  }
};

}  // namespace flash_cute::sm80
