// The types of the SM90 backward's products in one pass, where each consumer has keys of its own:
// shapes, the matrix products of a warpgroup and the shared-memory layouts that TMA writes and
// wgmma reads.
#pragma once

#include <cute/tensor.hpp>

#include "sm90/bwd/layouts.h"
#include "sm90/hopper.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute::sm90 {

// `kBlockN_`: the keys of a tile of K, V and dS.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockN_>
struct OnePassTypes {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = BwdConfigSm90::kBlockM;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kConsumerKeys = BwdConfigSm90::kConsumerKeys;

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

 private:
  template <class Shape, class Tensor>
  static CUTE_DEVICE auto first(const Tensor& tile) {
    return cute::local_tile(tile, Shape{}, cute::make_coord(0, 0));
  }
};

}  // namespace flash_cute::sm90
