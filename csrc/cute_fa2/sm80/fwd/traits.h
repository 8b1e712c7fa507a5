// The types of one SM80 forward kernel: tile shapes, the tiled MMA, shared-memory layouts and the
// copies between memories.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/copy_traits_sm80.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/tensor.hpp>

#include "common/element.h"
#include "common/platform.h"
#include "common/score_mod.h"
#include "host/params.h"
#include "tiles/fwd_sm80.h"

namespace flash_cute::sm80 {

template <DType kDType, FwdConfigSm80 kConfig>
struct FwdTraits {
  using Element = ElementOf<kDType>;  // of Q, K, V and P
  using ElementOut = Element;
  using ScoreMod = NoScoreMod;

  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kThreads = kConfig.threads();
  // CTAs that the launch bounds ask an SM to have registers for; 0 asks nothing. With 2, ptxas uses
  // registers to the last and orders instructions differently (measured, notes/sm80_forward.md).
  static constexpr int kMinCtas = kConfig.head_dim <= 128 ? 2 : 0;
  static constexpr bool kPipelinedQk = kConfig.pipelined_qk;
  static constexpr int kStages = kConfig.stages();
  static constexpr int kRowWarps = kConfig.row_warps;
  static constexpr int kColumnWarps = kConfig.column_warps;
  static constexpr bool kSharesRows = kColumnWarps > 1;
  static_assert(!(kPipelinedQk && kSharesRows));

  using ShapeQ = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>>;
  using ShapeK = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>;
  using ShapeV = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDimV>>;
  using ShapeVt = cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>>;
  using ShapeS = cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>>;
  using ShapeO = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDimV>>;

  // Warps stand along the query rows. A row's softmax stays within a quad of lanes, and each warp
  // reads all of K and V. With column warps they stand along the columns as well, and each reads a
  // share. 16 neighbouring columns are one warp's: one ldmatrix.x4 fills B operands for two n8.
  using TiledMma = cute::TiledMMA<
      cute::MMA_Atom<platform::Mma<Element>>,
      cute::Layout<cute::Shape<cute::Int<kRowWarps>, cute::Int<kColumnWarps>, cute::_1>>,
      cute::Tile<cute::Int<16 * kRowWarps>,
                 cute::Layout<cute::Shape<cute::_8, cute::Int<kColumnWarps>, cute::_2>,
                              cute::Stride<cute::_1, cute::_16, cute::_8>>,
                 cute::_16>>;
  static_assert(kBlockM % (16 * kRowWarps) == 0 && kBlockN % (16 * kColumnWarps) == 0 &&
                kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kHeadDimV % (16 * kColumnWarps) == 0);

  // Shared-memory rows are cut into strips of 64 elements (128 bytes, all 32 banks) or 32. The
  // swizzle permutes the 16-byte chunks of 8 neighbouring rows, so that a column of chunks lies in
  // 8 different bank groups. One ldmatrix phase, or the store of an accumulator, touches such a
  // column.
  static constexpr int strip(int columns) { return columns % 64 == 0 ? 64 : 32; }
  template <int kStrip>
  using SmemAtom =
      decltype(cute::composition(cute::Swizzle<kStrip == 64 ? 3 : 2, 3, 3>{},
                                 cute::Layout<cute::Shape<cute::_8, cute::Int<kStrip>>,
                                              cute::Stride<cute::Int<kStrip>, cute::_1>>{}));
  template <class Shape>
  using SmemLayout =
      decltype(cute::tile_to_shape(SmemAtom<strip(cute::size<1>(Shape{}))>{}, Shape{}));
  using SmemLayoutQ = SmemLayout<ShapeQ>;
  using SmemLayoutK = SmemLayout<ShapeK>;
  using SmemLayoutV = SmemLayout<ShapeV>;
  using SmemLayoutO = SmemLayout<ShapeO>;
  // The same V seen as (kHeadDimV, kBlockN), the B operand of O += P V.
  using SmemLayoutVt = decltype(cute::composition(
      SmemLayoutV{}, cute::Layout<ShapeVt, cute::Stride<cute::Int<kBlockN>, cute::_1>>{}));

  // What warps that share rows exchange: P, and a word for each row and warp.
  struct Exchange {
    using SmemLayoutP = SmemLayout<ShapeS>;
    alignas(128) Element p[cute::cosize_v<SmemLayoutP>];
    float rows[kColumnWarps][kBlockM];
  };
  struct Nothing {};

  struct SharedMemory {
    union {
      alignas(128) Element q[cute::cosize_v<SmemLayoutQ>];
      alignas(128) ElementOut o[cute::cosize_v<SmemLayoutO>];  // once the main loop is over
    };
    alignas(128) Element k[kStages][cute::cosize_v<SmemLayoutK>];
    alignas(128) Element v[kStages][cute::cosize_v<SmemLayoutV>];
    [[no_unique_address]] std::conditional_t<kSharesRows, Exchange, Nothing> exchange;
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  // 16 bytes a thread; neighbouring threads have a strip's row.
  template <class CopyOp, class T, int kStrip>
  using GmemTiledCopy = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<CopyOp, T>{},
      cute::Layout<cute::Shape<cute::Int<kThreads / (kStrip / 8)>, cute::Int<kStrip / 8>>,
                   cute::Stride<cute::Int<kStrip / 8>, cute::_1>>{},
      cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
  using GmemCopyQK = GmemTiledCopy<platform::CopyGlobalToShared, Element, strip(kHeadDim)>;
  using GmemCopyV = GmemTiledCopy<platform::CopyGlobalToShared, Element, strip(kHeadDimV)>;
  using GmemCopyO =
      GmemTiledCopy<cute::UniversalCopy<cute::uint128_t>, ElementOut, strip(kHeadDimV)>;

  using LoadQ = decltype(cute::make_tiled_copy_A(cute::Copy_Atom<platform::LoadMatrix, Element>{},
                                                 TiledMma{}));
  using LoadK = decltype(cute::make_tiled_copy_B(cute::Copy_Atom<platform::LoadMatrix, Element>{},
                                                 TiledMma{}));
  using LoadVt = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<platform::LoadMatrixTransposed, Element>{}, TiledMma{}));
  using LoadP = LoadQ;  // of shared rows, as StoreP
  template <class T>
  using StoreWords = decltype(cute::make_tiled_copy_C(
      cute::Copy_Atom<cute::UniversalCopy<uint32_t>, T>{}, TiledMma{}));
  using StoreP = StoreWords<Element>;
  using StoreO = StoreWords<ElementOut>;
};

}  // namespace flash_cute::sm80
