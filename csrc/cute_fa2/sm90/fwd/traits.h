// The types of one SM90 forward kernel: tile shapes, the matrix products of a warpgroup and the
// shared-memory layouts that TMA writes and wgmma reads.
#pragma once

#include <cute/tensor.hpp>

#include "common/element.h"
#include "host/params.h"
#include "sm90/fwd/tile_finder.h"
#include "sm90/hopper.h"
#include "sm90/tile_scheduler.h"
#include "tiles/fwd_sm90.h"

namespace flash_cute::sm90 {

// kSplitKV_: the keys are split, and each split writes a result of its own. kIsPacked_: for
// MaskKind::kPacked. kReadsBias_: for kScored, see TileEntrySm90.
template <DType kDType, FwdConfigSm90 kConfig_, bool kSplitKV_, bool kIsPacked_ = false,
          bool kReadsBias_ = false>
struct FwdTraits {
  using Element = ElementOf<kDType>;  // of Q, K, V and P
  using ElementOut = Element;
  using PackedTile = std::conditional_t<kSplitKV_, PackedSplitTile, PackedWorkTile>;
  using Tile = std::conditional_t<kIsPacked_, PackedTile, WorkTile>;

  static constexpr FwdConfigSm90 kConfig = kConfig_;
  static constexpr bool kSplitKV = kSplitKV_;
  static constexpr bool kIsPacked = kIsPacked_;
  static constexpr bool kReadsBias = kReadsBias_;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kConsumers = kConfig.consumers;
  static constexpr int kConsumerRows = kConfig.kConsumerRows;  // query rows of a consumer
  static constexpr int kBlockM = kConfig.block_m();
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kMinCtas = 1;

  using ShapeQ = cute::Shape<cute::Int<kConsumerRows>, cute::Int<kHeadDim>>;
  using ShapeK = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>;
  using ShapeVt = cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>>;
  using ShapeS = cute::Shape<cute::Int<kConsumerRows>, cute::Int<kBlockN>>;
  using ShapeO = cute::Shape<cute::Int<kConsumerRows>, cute::Int<kHeadDimV>>;

  // A consumer is one warpgroup, with 64 rows. S = Q K^T comes from shared memory. O += P V takes P
  // from the registers in which the softmax left it.
  static constexpr auto kMajorK = cute::SM90::GMMA::Major::K;
  static constexpr auto kMajorMN = cute::SM90::GMMA::Major::MN;
  using MmaS = decltype(cute::make_tiled_mma(hopper::MmaSS<Element, kBlockN>{}));
  using MmaO = decltype(cute::make_tiled_mma(hopper::MmaRS<Element, kHeadDimV>{}));
  static_assert(kConsumers >= 2 && kConsumers <= 4);
  static_assert(kBlockN % 16 == 0 && kHeadDim % 32 == 0);
  // One instruction for all columns. CuTe has the powers of 2, 96 and 192. The other multiples of 8
  // are in a header that takes long to compile; variants.py asks for it where they are needed.
  static_assert(cute::tile_size<1>(MmaS{}) == kBlockN && cute::tile_size<1>(MmaO{}) == kHeadDimV);

  // Shared-memory rows are cut into strips of 64 elements (128 bytes, all 32 banks) or 32, one TMA
  // box each. The swizzle permutes their 16-byte chunks among 8 neighbouring rows.
  static constexpr int kStrip = kConfig.strip(kHeadDim);    // of Q and K
  static constexpr int kStripV = kConfig.strip(kHeadDimV);  // of V and O
  template <cute::SM90::GMMA::Major kMajor, int kColumns>
  using SmemAtom =
      std::conditional_t<kColumns == 64, cute::SM90::GMMA::Layout_SW128_Atom<Element, kMajor>,
                         cute::SM90::GMMA::Layout_SW64_Atom<Element, kMajor>>;
  using SmemLayoutQ = decltype(cute::tile_to_shape(SmemAtom<kMajorK, kStrip>{}, ShapeQ{}));
  using SmemLayoutK = decltype(cute::tile_to_shape(SmemAtom<kMajorK, kStrip>{}, ShapeK{}));
  // V lies as K does. The product takes the same elements as (kHeadDimV, kBlockN): a strip's keys
  // first, then the next strip.
  using SmemLayoutVt = decltype(cute::tile_to_shape(SmemAtom<kMajorMN, kStripV>{}, ShapeVt{},
                                                    cute::Step<cute::_2, cute::_1>{}));

  // O is stored by strips of a warp's rows. The layout gives offsets of elements from the strip's
  // first on. (CuTe's layout with a pointer's swizzle works on pointers alone.)
  static constexpr int kOutStrips = kConfig.out_strips(sizeof(ElementOut));
  static constexpr int kWarpRows = kConsumerRows / 4;
  using SmemLayoutO = decltype(cute::as_position_independent_swizzle_layout(cute::tile_to_shape(
      SmemAtom<kMajorK, kStripV>{}, cute::Shape<cute::Int<kWarpRows>, cute::Int<kStripV>>{})));
  static_assert(kOutStrips >= 1);

  // A tile as wgmma sees it, (1, 1, K / 16): descriptors, the same for all threads.
  static CUTE_DEVICE auto fragment_q(Element* tile) {
    return MmaS{}.get_slice(0).partition_fragment_A(at(tile, SmemLayoutQ{}));
  }
  static CUTE_DEVICE auto fragment_k(Element* tile) {
    return MmaS{}.get_slice(0).partition_fragment_B(at(tile, SmemLayoutK{}));
  }
  static CUTE_DEVICE auto fragment_vt(Element* tile) {
    return MmaO{}.get_slice(0).partition_fragment_B(at(tile, SmemLayoutVt{}));
  }

  // A "full" barrier's phase ends when a tile has arrived, an "empty" one's when all its readers
  // are done with it.
  struct SharedMemory {
    alignas(1024) Element q[kQStages][kConsumers][kConsumerRows * kHeadDim];
    alignas(1024) Element k[kStages][kBlockN * kHeadDim];
    alignas(1024) Element v[kStages][kBlockN * kHeadDimV];
    alignas(1024) ElementOut out[kConsumers][4][kOutStrips][kWarpRows * kStripV];
    alignas(16) Tile tile[kQStages][kConsumers];  // the tile whose rows are in q
    hopper::Barrier q_full[kQStages][kConsumers];
    hopper::Barrier q_empty[kQStages][kConsumers];
    hopper::Barrier k_full[kStages];
    hopper::Barrier k_empty[kStages];
    hopper::Barrier v_full[kStages];
    hopper::Barrier v_empty[kStages];
    NextTile<Tile> next;  // packed sequences
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

 private:
  template <class Layout>
  static CUTE_DEVICE auto at(Element* tile, Layout layout) {
    return cute::make_tensor(cute::make_smem_ptr(tile), layout);
  }
};

}  // namespace flash_cute::sm90
