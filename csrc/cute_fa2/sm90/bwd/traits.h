// The types of one SM90 backward kernel of one pass: tile shapes, the matrix products of a
// warpgroup and the shared-memory layouts that TMA writes and wgmma reads.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/element.h"
#include "common/row_grad_stats.h"
#include "host/params.h"
#include "sm90/bwd/layouts.h"
#include "sm90/bwd/tile_queue.h"
#include "sm90/hopper.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute::sm90 {

template <DType kDType, BwdConfigSm90 kConfig_, bool kReadsBias_, bool kStaggers>
struct BwdTraits {
  using Element = ElementOf<kDType>;

  static constexpr bool kReadsBias = kReadsBias_;
  static constexpr BwdConfigSm90 kConfig = kConfig_;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kBlockM = kConfig.kBlockM;
  static constexpr int kBlockN = kConfig.block_n();
  static constexpr int kConsumers = kConfig.consumers;
  static constexpr int kConsumerKeys = kConfig.kConsumerKeys;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kDsStages = kConfig.kDsStages;
  static constexpr int kLists = 2;  // of blocks of dQ, from the adder to its consumer
  static constexpr int kThreads = kConfig.roles().threads();
  static constexpr int kMinCtas = 1;
  static_assert(kConsumers == 2 || kConsumers == 3);
  using Walk = std::conditional_t<kStaggers, StaggeredWalk<kBlockN / kBlockM>, QueryWalk>;

  using ShapeK = Tile<kBlockN, kHeadDim>;
  using ShapeV = Tile<kBlockN, kHeadDimV>;
  using ShapeQ = Tile<kBlockM, kHeadDim>;
  using ShapeDout = Tile<kBlockM, kHeadDimV>;
  using ShapeDs = Tile<kBlockM, kBlockN>;
  // Of a consumer.
  using ShapeSt = Tile<kConsumerKeys, kBlockM>;
  using ShapeDk = Tile<kConsumerKeys, kHeadDim>;
  using ShapeDv = Tile<kConsumerKeys, kHeadDimV>;

  // S^T = K Q^T and dP^T = V dO^T, for the consumer's keys. So P^T and dS^T are where dV += P^T dO
  // and dK += dS^T Q take them: in registers. dQ = dS K takes dS of all consumers, from shared
  // memory.
  static constexpr auto kMajorMN = cute::SM90::GMMA::Major::MN;
  using MmaSt = decltype(cute::make_tiled_mma(hopper::MmaSS<Element, kBlockM>{}));
  using MmaDk = decltype(cute::make_tiled_mma(hopper::MmaRS<Element, kHeadDim>{}));
  using MmaDv = decltype(cute::make_tiled_mma(hopper::MmaRS<Element, kHeadDimV>{}));
  using MmaDq =
      decltype(cute::make_tiled_mma(hopper::MmaSS<Element, kHeadDim, kMajorMN, kMajorMN>{}));
  static_assert(cute::tile_size<1>(MmaDk{}) == kHeadDim &&
                cute::tile_size<1>(MmaDv{}) == kHeadDimV);

  static constexpr int kStrip = FwdConfigSm90::strip(kHeadDim);    // of Q and K
  static constexpr int kStripV = FwdConfigSm90::strip(kHeadDimV);  // of V and dO
  static constexpr int kStripDs = FwdConfigSm90::strip(kBlockM);   // of dS^T
  // dS^T is stored by rows of a warp. The layout gives offsets of elements, as the forward's of O.
  using SmemLayoutDst = decltype(cute::as_position_independent_swizzle_layout(
      ByRows<Element, Tile<kConsumerKeys / 4, kStripDs>, kStripDs>{}));

  // Tiles as wgmma sees them, (1, 1, K / 16): descriptors, the same for all threads of a consumer.
  // K and V are those of the first consumer.
  static CUTE_DEVICE auto fragment_k(Element* tile) {
    return MmaSt{}.get_slice(0).partition_fragment_A(
        first<ShapeDk>(smem_tensor<ByRows<Element, ShapeK, kStrip>>(tile)));
  }
  static CUTE_DEVICE auto fragment_v(Element* tile) {
    return MmaSt{}.get_slice(0).partition_fragment_A(
        first<ShapeDv>(smem_tensor<ByRows<Element, ShapeV, kStripV>>(tile)));
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
  static CUTE_DEVICE auto fragment_ds(Element* tile) {
    return MmaDq{}.get_slice(0).partition_fragment_A(
        smem_tensor<Transposed<Element, Tile<kBlockN, kBlockM>, kStripDs>>(tile));
  }
  static CUTE_DEVICE auto fragment_kt(Element* tile) {
    return MmaDq{}.get_slice(0).partition_fragment_B(
        smem_tensor<Transposed<Element, ShapeK, kStrip>>(tile));
  }

  // What the barriers mean: pipeline.h.
  struct SharedMemory {
    alignas(1024) Element k[cute::size(ShapeK{})];
    alignas(1024) Element v[cute::size(ShapeV{})];
    alignas(1024) Element q[kStages][cute::size(ShapeQ{})];
    alignas(1024) Element dout[kStages][cute::size(ShapeDout{})];
    alignas(1024) Element ds[kDsStages][cute::size(ShapeDs{})];  // as (keys, query rows)
    alignas(1024) float dq[kConsumers][cute::size(ShapeQ{})];    // on its way to the sums; then dK
                                                                 // and dV on theirs
    alignas(128) TwoRowGradStats stats[kStages][kBlockM / 2];    // comes and goes with Q
    hopper::Barrier k_full;
    hopper::Barrier v_full;
    hopper::Barrier kv_empty;
    hopper::Barrier q_full[kStages];
    hopper::Barrier q_empty[kStages];
    hopper::Barrier dout_full[kStages];
    hopper::Barrier dout_empty[kStages];
    hopper::Barrier ds_full[kDsStages];
    hopper::Barrier ds_empty[kDsStages];
    hopper::Barrier dq_full[kConsumers];
    hopper::Barrier dq_empty[kConsumers];
    hopper::Barrier list_full[kLists][kConsumers];
    hopper::Barrier list_empty[kLists][kConsumers];
    int list[kLists][kConsumers];  // of blocks of dQ that the consumer makes of sums: the first one
    TileQueue<Walk> queue;
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

 private:
  template <class Shape, class Tensor>
  static CUTE_DEVICE auto first(const Tensor& tile) {
    return cute::local_tile(tile, Shape{}, cute::make_coord(0, 0));
  }
};

}  // namespace flash_cute::sm90
