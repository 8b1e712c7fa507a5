// The types of one kernel for dQ: tile shapes, the matrix products of a warpgroup and the
// shared-memory layouts.
#pragma once

#include <cute/tensor.hpp>

#include "common/element.h"
#include "host/params.h"
#include "sm90/bwd/layouts.h"
#include "sm90/hopper.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute::sm90 {

template <DType kDType, DqConfigSm90 kConfig_, bool kReadsBias_ = false>
struct DqTraits {
  using Element = ElementOf<kDType>;

  static constexpr bool kReadsBias = kReadsBias_;
  static constexpr DqConfigSm90 kConfig = kConfig_;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kBlockM = kConfig.block_m();
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kConsumers = kConfig.consumers;
  static constexpr int kConsumerRows = kConfig.kConsumerRows;
  static constexpr int kStagesK = kConfig.k_stages;
  static constexpr int kStagesV = kConfig.v_stages;
  static constexpr int kThreads = kConfig.roles().threads();
  static constexpr int kMinCtas = 1;

  using ShapeK = Tile<kBlockN, kHeadDim>;
  using ShapeV = Tile<kBlockN, kHeadDimV>;
  // Of a consumer.
  using ShapeQ = Tile<kConsumerRows, kHeadDim>;  // and dQ
  using ShapeDout = Tile<kConsumerRows, kHeadDimV>;
  using ShapeS = Tile<kConsumerRows, kBlockN>;

  // S = Q K^T and dP = dO V^T. So dS is where dQ += dS K takes it: in registers.
  using MmaS = decltype(cute::make_tiled_mma(hopper::MmaSS<Element, kBlockN>{}));
  using MmaDq = decltype(cute::make_tiled_mma(hopper::MmaRS<Element, kHeadDim>{}));
  static_assert(cute::tile_size<1>(MmaDq{}) == kHeadDim);

  static constexpr int kStrip = FwdConfigSm90::strip(kHeadDim);    // of Q and K
  static constexpr int kStripV = FwdConfigSm90::strip(kHeadDimV);  // of V and dO

  // Tiles as wgmma sees them, (1, 1, depth / 16): descriptors, the same for all threads.
  static CUTE_DEVICE auto fragment_q(Element* tile) {
    return MmaS{}.get_slice(0).partition_fragment_A(
        smem_tensor<ByRows<Element, ShapeQ, kStrip>>(tile));
  }
  static CUTE_DEVICE auto fragment_dout(Element* tile) {
    return MmaS{}.get_slice(0).partition_fragment_A(
        smem_tensor<ByRows<Element, ShapeDout, kStripV>>(tile));
  }
  static CUTE_DEVICE auto fragment_k(Element* tile) {
    return MmaS{}.get_slice(0).partition_fragment_B(
        smem_tensor<ByRows<Element, ShapeK, kStrip>>(tile));
  }
  static CUTE_DEVICE auto fragment_v(Element* tile) {
    return MmaS{}.get_slice(0).partition_fragment_B(
        smem_tensor<ByRows<Element, ShapeV, kStripV>>(tile));
  }
  static CUTE_DEVICE auto fragment_kt(Element* tile) {
    return MmaDq{}.get_slice(0).partition_fragment_B(
        smem_tensor<Transposed<Element, ShapeK, kStrip>>(tile));
  }

  struct SharedMemory {
    alignas(1024) Element q[kConsumers][cute::size(ShapeQ{})];
    alignas(1024) Element dout[kConsumers][cute::size(ShapeDout{})];
    alignas(1024) Element k[kStagesK][cute::size(ShapeK{})];
    alignas(1024) Element v[kStagesV][cute::size(ShapeV{})];
    // Full: what TMA brought is visible to all consumers. Empty: all warps are done with the stage.
    hopper::Barrier q_full;
    hopper::Barrier dout_full;
    hopper::Barrier k_full[kStagesK];
    hopper::Barrier k_empty[kStagesK];
    hopper::Barrier v_full[kStagesV];
    hopper::Barrier v_empty[kStagesV];
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  static CUTE_DEVICE void init_barriers(SharedMemory& smem) {
    constexpr int kWarps = kConsumers * hopper::kWarpgroup / 32;
    smem.q_full.init(1);
    smem.dout_full.init(1);
    for (int stage = 0; stage < kStagesK; ++stage) {
      smem.k_full[stage].init(1);
      smem.k_empty[stage].init(kWarps);
    }
    for (int stage = 0; stage < kStagesV; ++stage) {
      smem.v_full[stage].init(1);
      smem.v_empty[stage].init(kWarps);
    }
  }
};

}  // namespace flash_cute::sm90
