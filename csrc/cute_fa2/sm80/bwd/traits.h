// The types of one SM80 backward kernel: tile shapes, the tiled MMA of each product, shared-memory
// layouts and the copies between memories.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/element.h"
#include "common/platform.h"
#include "common/row_grad_stats.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"
#include "sm80/layouts.h"
#include "tiles/bwd_sm80.h"

namespace flash_cute::sm80 {

template <DType kDType, BwdConfigSm80 kConfig>
struct BwdTraits {
  using Element = ElementOf<kDType>;

  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kMinCtas = 1;
  static constexpr bool kStoresDq = kConfig.stores_dq();
  static constexpr bool kIsFp32 = kDType == DType::kFloat;

  using ShapeQ = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>>;
  using ShapeDout = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDimV>>;
  using ShapeK = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>;
  using ShapeV = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDimV>>;
  using ShapeS = cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>>;

  // Warps share S and dP, dK and dV, and dQ each in their own way: the squarer a warp's part, the
  // less it reads.
  template <WarpGrid kWarps>
  using TiledMmaBy = TiledMmaOf<Element, kWarps.rows, kWarps.columns>;
  using TiledMmaS = TiledMmaBy<kConfig.s_warps>;
  using TiledMmaDkv = TiledMmaBy<kConfig.dkv_warps>;
  using TiledMmaDq = TiledMmaBy<kConfig.dq_warps>;
  template <class Shape>
  static constexpr bool divides(WarpGrid warps) {
    return cute::size<0>(Shape{}) % (16 * warps.rows) == 0 &&
           cute::size<1>(Shape{}) % (16 * warps.columns) == 0 &&
           warps.count() == kConfig.s_warps.count();
  }
  static_assert(divides<ShapeS>(kConfig.s_warps) && divides<ShapeK>(kConfig.dkv_warps) &&
                divides<ShapeV>(kConfig.dkv_warps) && divides<ShapeQ>(kConfig.dq_warps));

  template <class Shape>
  using SmemLayout = std::conditional_t<kIsFp32, SmemLayoutFp32<Shape>, sm80::SmemLayout<Shape>>;
  // The same elements as (columns, rows), to be summed over rows.
  template <class Shape>
  using SmemLayoutTransposed = std::conditional_t<kIsFp32, SmemLayoutTransposedFp32<Shape>,
                                                  sm80::SmemLayoutTransposed<Shape>>;
  // P and dS as they are stored, and so transposed. In fp32 their columns lie in the order of K's
  // rows, when dQ is summed.
  using SmemLayoutStored =
      std::conditional_t<kIsFp32, SmemLayoutEvenFirstFp32<ShapeS>, sm80::SmemLayout<ShapeS>>;
  using SmemLayoutStoredTransposed =
      std::conditional_t<kIsFp32, SmemLayoutEvenFirstTransposedFp32<ShapeS>,
                         sm80::SmemLayoutTransposed<ShapeS>>;

  struct SharedMemory {
    alignas(128) Element k[cute::size(ShapeK{})];
    alignas(128) Element v[cute::size(ShapeV{})];
    alignas(128) Element q[kStages][cute::size(ShapeQ{})];
    alignas(128) Element dout[kStages][cute::size(ShapeDout{})];
    alignas(128) Element p[cute::size(ShapeS{})];
    alignas(128) Element ds[cute::size(ShapeS{})];
    alignas(128) TwoRowGradStats stats[kStages][kBlockM / 2];
    alignas(128) int ticket;
    // Packed sequences: that of the tile, and where its blocks of statistics begin.
    int first_index;
    TileCoord tile;
    Sequence sequence;
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  template <int kColumns>
  using GmemCopy = GmemTiledCopy<platform::CopyGlobalToShared, Element, kThreads,
                                 kIsFp32 ? 32 : strip(kColumns)>;

  // Operands of a tiled MMA by ldmatrix, from rows of shared memory or (transposed) from columns.
  // In fp32 those by words: ldmatrix would tear them apart.
  using TransposedCopy = cute::Copy_Atom<
      std::conditional_t<kIsFp32, cute::UniversalCopy<uint32_t>, platform::LoadMatrixTransposed>,
      Element>;
  template <class TiledMma>
  using LoadA = decltype(cute::make_tiled_copy_A(cute::Copy_Atom<platform::LoadMatrix, Element>{},
                                                 TiledMma{}));
  template <class TiledMma>
  using LoadB = decltype(cute::make_tiled_copy_B(cute::Copy_Atom<platform::LoadMatrix, Element>{},
                                                 TiledMma{}));
  template <class TiledMma>
  using LoadTransposedA = decltype(cute::make_tiled_copy_A(TransposedCopy{}, TiledMma{}));
  template <class TiledMma>
  using LoadTransposedB = decltype(cute::make_tiled_copy_B(TransposedCopy{}, TiledMma{}));
  using StoreS = decltype(cute::make_tiled_copy_C(
      cute::Copy_Atom<cute::UniversalCopy<uint32_t>, Element>{}, TiledMmaS{}));
};

}  // namespace flash_cute::sm80
