// The gradient of a bias above head dim 256, or in fp32. Sums of dS are in registers.
#pragma once

#include <cute/tensor.hpp>

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
  using Tiles = BiasTiles<typename Traits::Element, TiledMma, ShapeS, Traits::kThreads>;
  using Arguments = typename Tiles::Arguments;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    const auto tile = Tiles::of_cta(arguments);
    auto sums = partition_fragment_C(TiledMma{}, ShapeS{});  // (4, MMA_M, kBlockRows / 32)
    clear(sums);
    for (auto block = Tiles::first(arguments, tile); block.exists();
         block = Tiles::next(arguments, tile, block)) {
      platform::sync_cta();  // all warps are done with the block before
      if (platform::thread_index() == 0) {
        smem.tile = {block.at, block.sequence, int64_t{block.at.batch} * arguments.stats_rows, 0,
                     block.kv_head};
      }
      platform::sync_cta();  // it is known which block comes, to all threads
      LargeBwdMainloop<Traits, Gradient::kBias>(params, smem).add(block.key_block, sums);
    }

    // The ring's memory is free.
    static_assert(sizeof(float) * size(ShapeS{}) <= sizeof(smem.chunks));
    platform::sync_cta();  // all warps are done with the last block
    Tiles::store(arguments, tile, sums, reinterpret_cast<float*>(smem.chunks));
  }
};

}  // namespace flash_cute::sm80
