// The kernel that adds up dK or dV of head splits, and rounds them.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>

#include "common/gradient.h"
#include "common/platform.h"
#include "sm90/bwd/sums.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

// Sums of fp32 to dK and dV, where CTAs share the heads of a group. A tile
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
