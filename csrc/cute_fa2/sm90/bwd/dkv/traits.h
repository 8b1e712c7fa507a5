// The types of one kernel for dK and dV by roles: tile shapes, the matrix products of a warpgroup
// and the shared-memory layouts.
#pragma once

#include <cute/tensor.hpp>

#include "common/element.h"
#include "common/row_grad_stats.h"
#include "host/params.h"
#include "sm90/bwd/layouts.h"
#include "sm90/bwd/tile_queue.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute::sm90 {

template <DType kDType, BwdConfigSm90 kConfig_, bool kReadsBias_ = false>
struct DkvTraits {
  using Element = ElementOf<kDType>;
  using Walk = QueryWalk;

  static constexpr bool kReadsBias = kReadsBias_;
  static constexpr BwdConfigSm90 kConfig = kConfig_;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kBlockM = kConfig.kBlockM;
  static constexpr int kBlockN = kConfig.block_n();
  static constexpr int kConsumers = kConfig.consumers;
  static constexpr int kConsumerKeys = kConfig.kConsumerKeys;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kWeightsStages = kConfig.kWeightsStages;
  static constexpr int kThreads = kConfig.roles().threads();
  static constexpr int kMinCtas = 1;
  static_assert(kConsumers == 2);

  using ShapeK = Tile<kBlockN, kHeadDim>;   // and dK
  using ShapeV = Tile<kBlockN, kHeadDimV>;  // and dV
  using ShapeQ = Tile<kBlockM, kHeadDim>;
  using ShapeDout = Tile<kBlockM, kHeadDimV>;
  using ShapeSt = Tile<kBlockN, kBlockM>;
  using ShapeDk = ShapeK;
  using ShapeDv = ShapeV;

  // S^T = K Q^T and dP^T = V dO^T. So P^T and dS^T are where dV += P^T dO and dK += dS^T Q take
  // them: in registers.
  using MmaSt = decltype(cute::make_tiled_mma(hopper::MmaSS<Element, kBlockM>{}));
  using MmaDk = decltype(cute::make_tiled_mma(hopper::MmaRS<Element, kHeadDim>{}));
  using MmaDv = decltype(cute::make_tiled_mma(hopper::MmaRS<Element, kHeadDimV>{}));
  static_assert(cute::tile_size<1>(MmaDk{}) == kHeadDim &&
                cute::tile_size<1>(MmaDv{}) == kHeadDimV);

  static constexpr int kStrip = FwdConfigSm90::strip(kHeadDim);    // of Q and K
  static constexpr int kStripV = FwdConfigSm90::strip(kHeadDimV);  // of V and dO

  // Tiles as wgmma sees them, (1, 1, depth / 16): descriptors, the same for all threads.
  static CUTE_DEVICE auto fragment_k(Element* tile) {
    return MmaSt{}.get_slice(0).partition_fragment_A(
        smem_tensor<ByRows<Element, ShapeK, kStrip>>(tile));
  }
  static CUTE_DEVICE auto fragment_v(Element* tile) {
    return MmaSt{}.get_slice(0).partition_fragment_A(
        smem_tensor<ByRows<Element, ShapeV, kStripV>>(tile));
  }
  static CUTE_DEVICE auto fragment_q(Element* tile) {
    return MmaSt{}.get_slice(0).partition_fragment_B(
        smem_tensor<ByRows<Element, ShapeQ, kStrip>>(tile));
  }
  static CUTE_DEVICE auto fragment_dout(Element* tile) {
    return MmaSt{}.get_slice(0).partition_fragment_B(
        smem_tensor<ByRows<Element, ShapeDout, kStripV>>(tile));
  }
  static CUTE_DEVICE auto fragment_qt(Element* tile) {
    return MmaDk{}.get_slice(0).partition_fragment_B(
        smem_tensor<Transposed<Element, ShapeQ, kStrip>>(tile));
  }
  static CUTE_DEVICE auto fragment_doutt(Element* tile) {
    return MmaDv{}.get_slice(0).partition_fragment_B(
        smem_tensor<Transposed<Element, ShapeDout, kStripV>>(tile));
  }

  struct SharedMemory {
    alignas(1024) Element k[cute::size(ShapeK{})];
    alignas(1024) Element v[cute::size(ShapeV{})];
    alignas(1024) Element q[kStages][cute::size(ShapeQ{})];
    alignas(1024) Element dout[kStages][cute::size(ShapeDout{})];
    alignas(128) float weights[kWeightsStages][cute::size(ShapeSt{})];  // P^T, as threads hold it
    alignas(128) TwoRowGradStats stats[kStages][kBlockM / 2];           // comes and goes with Q
    // Full: what TMA brought is visible to both consumers. Empty: all their warps are done with the
    // stage.
    hopper::Barrier k_full;
    hopper::Barrier v_full;
    hopper::Barrier kv_empty;
    hopper::Barrier q_full[kStages];
    hopper::Barrier q_empty[kStages];
    hopper::Barrier dout_full[kStages];
    hopper::Barrier dout_empty[kStages];
    // From the consumer of dV to that of dK, and back.
    hopper::Barrier weights_full[kWeightsStages];
    hopper::Barrier weights_empty[kWeightsStages];
    TileQueue<Walk> queue;
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  static CUTE_DEVICE void init_barriers(SharedMemory& smem) {
    constexpr int kWarps = kConsumers * hopper::kWarpgroup / 32;
    smem.k_full.init(1);
    smem.v_full.init(1);
    smem.kv_empty.init(kWarps);
    smem.queue.init(hopper::kArrivalsOfWarp * kWarps + 1);  // the second producer takes, too
    for (int stage = 0; stage < kStages; ++stage) {
      smem.q_full[stage].init(1);
      smem.q_empty[stage].init(hopper::kArrivalsOfWarp * kWarps);
      smem.dout_full[stage].init(1);
      smem.dout_empty[stage].init(kWarps);
    }
    for (int stage = 0; stage < kWeightsStages; ++stage) {
      // The warps of one consumer: those of dV's fill, those of dK's empty.
      smem.weights_full[stage].init(hopper::kArrivalsOfWarp * kWarps / 2);
      smem.weights_empty[stage].init(hopper::kArrivalsOfWarp * kWarps / 2);
    }
  }
};

}  // namespace flash_cute::sm90
