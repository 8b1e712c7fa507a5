// The types of one SM90 forward kernel above head dim 256: tile shapes, the products of its
// warpgroups and the shared-memory layouts that TMA writes and wgmma reads.
#pragma once

#include <cute/tensor.hpp>

#include "common/element.h"
#include "host/params.h"
#include "sm90/hopper.h"
#include "sm90/tile_scheduler.h"
#include "tiles/fwd_sm90.h"

namespace flash_cute::sm90 {

// A tile has 64 query rows. One warpgroup computes S and P. Each of two others has half of O's
// columns, kHeadDimV. Q, K and V come in chunks of 64 rows and some columns.
template <DType kDType, FwdConfigSm90 kConfig_>
struct LargeFwdTraits {
  using Element = ElementOf<kDType>;  // of Q, K, V and P
  using ElementOut = Element;
  using Tile = WorkTile;

  static constexpr FwdConfigSm90 kConfig = kConfig_;
  static constexpr bool kSplitKV = false;
  static constexpr bool kIsPacked = false;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kGroups = kConfig.column_groups;
  static constexpr int kHeadDimV = kConfig.head_dim_v / kGroups;  // of a group
  static constexpr int kConsumerRows = kConfig.kConsumerRows;     // query rows of a tile
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kChunkColumns = kConfig.chunk_columns();
  static constexpr int kChunksOfGroup = kHeadDimV / kChunkColumns;
  static constexpr int kStages = kConfig.stages;     // chunks of K
  static constexpr int kVStages = kConfig.kVStages;  // chunks of V, of a group
  static constexpr int kQStages = kConfig.q_stages;  // work tiles that are announced
  static constexpr int kPStages = kConfig.kPStages;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kMinCtas = 1;
  static_assert(kHeadDim == kConfig.head_dim_v && kBlockN == kConsumerRows && kGroups == 2);

  using ShapeS = cute::Shape<cute::Int<kConsumerRows>, cute::Int<kBlockN>>;
  using ShapeP = ShapeS;
  using ShapeO = cute::Shape<cute::Int<kConsumerRows>, cute::Int<kHeadDimV>>;
  using ShapeChunk = cute::Shape<cute::Int<kBlockN>, cute::Int<kChunkColumns>>;
  using ShapeVt = cute::Shape<cute::Int<kChunkColumns>, cute::Int<kBlockN>>;

  // S = Q K^T takes the first half of Q from registers, where it stays for the tile, the second
  // from shared memory. O += P V takes both from shared memory, a chunk of V in each instruction.
  static constexpr auto kMajorK = cute::SM90::GMMA::Major::K;
  static constexpr auto kMajorMN = cute::SM90::GMMA::Major::MN;
  using MmaS = decltype(cute::make_tiled_mma(hopper::MmaSS<Element, kBlockN>{}));
  using MmaSFirst = decltype(cute::make_tiled_mma(hopper::MmaRS<Element, kBlockN, kMajorK>{}));
  using MmaO =
      decltype(cute::make_tiled_mma(hopper::MmaSS<Element, kChunkColumns, kMajorK, kMajorMN>{}));
  static_assert(cute::tile_size<1>(MmaS{}) == kBlockN &&
                cute::tile_size<1>(MmaO{}) == kChunkColumns);

  // Strips of 64 columns, as traits.h has them.
  static constexpr int kStrip = kConfig.strip(kChunkColumns);
  static constexpr int kStripV = kStrip;
  static_assert(kStrip == 64 && kBlockN == kStrip);
  template <cute::SM90::GMMA::Major kMajor>
  using SmemAtom = cute::SM90::GMMA::Layout_SW128_Atom<Element, kMajor>;
  using SmemLayoutK = decltype(cute::tile_to_shape(SmemAtom<kMajorK>{}, ShapeChunk{}));
  using SmemLayoutVt = decltype(cute::tile_to_shape(SmemAtom<kMajorMN>{}, ShapeVt{},
                                                    cute::Step<cute::_2, cute::_1>{}));
  using SmemLayoutP = decltype(cute::tile_to_shape(SmemAtom<kMajorK>{}, ShapeP{}));

  static constexpr int kOutStrips = kConfig.out_strips(sizeof(ElementOut));
  static constexpr int kWarpRows = kConsumerRows / 4;
  // A warp's rows of a strip: of Q, P or O. Offsets of elements from the first on.
  using SmemLayoutO = decltype(cute::as_position_independent_swizzle_layout(cute::tile_to_shape(
      SmemAtom<kMajorK>{}, cute::Shape<cute::Int<kWarpRows>, cute::Int<kStrip>>{})));
  static_assert(kOutStrips >= 1);

  // A chunk of Q, K or V, or P, as wgmma sees it, (1, 1, K / 16): descriptors.
  static CUTE_DEVICE auto fragment_q(Element* chunk) {
    return MmaS{}.get_slice(0).partition_fragment_A(at(chunk, SmemLayoutK{}));
  }
  static CUTE_DEVICE auto fragment_k(Element* chunk) {
    return MmaS{}.get_slice(0).partition_fragment_B(at(chunk, SmemLayoutK{}));
  }
  static CUTE_DEVICE auto fragment_vt(Element* chunk) {
    return MmaO{}.get_slice(0).partition_fragment_B(at(chunk, SmemLayoutVt{}));
  }
  static CUTE_DEVICE auto fragment_p(Element* block) {
    return MmaO{}.get_slice(0).partition_fragment_A(at(block, SmemLayoutP{}));
  }

  struct SharedMemory {
    alignas(1024) Element q[kChunksOfGroup][kBlockN * kChunkColumns];  // the second half
    alignas(1024) Element k[kStages][kBlockN * kChunkColumns];         // and the first half of Q
    alignas(1024) Element v[kGroups][kVStages][kBlockN * kChunkColumns];
    alignas(1024) Element p[kPStages][kConsumerRows * kBlockN];
    alignas(1024) ElementOut out[kGroups][4][kOutStrips][kWarpRows * kStrip];
    float factors[kPStages][kConsumerRows];  // of O's rows, ahead of a block or behind the last
    alignas(16) Tile tile[kQStages];
    hopper::Barrier tile_full[kQStages];
    hopper::Barrier tile_empty[kQStages];
    hopper::Barrier q_full;
    hopper::Barrier q_empty;
    hopper::Barrier k_full[kStages];
    hopper::Barrier k_empty[kStages];
    hopper::Barrier v_full[kGroups][kVStages];
    hopper::Barrier v_empty[kGroups][kVStages];
    hopper::Barrier p_full[kPStages];
    hopper::Barrier p_empty[kPStages];
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

 private:
  template <class Layout>
  static CUTE_DEVICE auto at(Element* block, Layout layout) {
    return cute::make_tensor(cute::make_smem_ptr(block), layout);
  }
};

}  // namespace flash_cute::sm90
