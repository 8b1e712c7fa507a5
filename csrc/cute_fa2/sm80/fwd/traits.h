// The types of one SM80 forward kernel: tile shapes, the tiled MMA, shared-memory layouts and the
// copies between memories.
#pragma once

#include <cute/tensor.hpp>

#include "common/element.h"
#include "common/platform.h"
#include "host/params.h"
#include "sm80/layouts.h"
#include "tiles/fwd_sm80.h"

namespace flash_cute::sm80 {

template <DType kDType, FwdConfigSm80 kConfig>
struct FwdTraits {
  using Element = ElementOf<kDType>;  // of Q, K, V and P
  using ElementOut = Element;

  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kThreads = kConfig.threads();
  // CTAs that the launch bounds ask an SM to have registers for; 0 asks nothing. With 2, ptxas uses
  // registers to the last and orders instructions differently (measured, notes/sm80_forward.md).
  static constexpr int kMinCtas = kConfig.head_dim <= 128 ? 2 : 0;
  static constexpr bool kPipelinedQk = kConfig.pipelined_qk;
  static constexpr bool kIsChunked = kConfig.is_chunked();  // see traits_chunked.h
  static constexpr int kStages = kConfig.stages();
  static constexpr int kRowWarps = kConfig.row_warps;
  static constexpr int kColumnWarps = kConfig.column_warps;
  static constexpr bool kSharesRows = kColumnWarps > 1;
  static_assert(!(kPipelinedQk && kSharesRows));
  static constexpr bool kQInRegisters = kConfig.q_in_registers;  // see mainloop.h

  using ShapeQ = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>>;
  using ShapeK = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>;
  using ShapeV = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDimV>>;
  using ShapeVt = cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>>;
  using ShapeS = cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>>;
  using ShapeO = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDimV>>;

  // Warps stand along the query rows. A row's softmax stays within a quad of lanes, and each warp
  // reads all of K and V. With column warps they stand along the columns as well, and each reads a
  // share.
  using TiledMma = TiledMmaOf<Element, kRowWarps, kColumnWarps>;
  static_assert(kBlockM % (16 * kRowWarps) == 0 && kBlockN % (16 * kColumnWarps) == 0 &&
                kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kHeadDimV % (16 * kColumnWarps) == 0);

  using SmemLayoutQ = SmemLayout<ShapeQ>;
  using SmemLayoutK = SmemLayout<ShapeK>;
  using SmemLayoutV = SmemLayout<ShapeV>;
  using SmemLayoutO = SmemLayout<ShapeO>;
  // The same V seen as (kHeadDimV, kBlockN), the B operand of O += P V.
  using SmemLayoutVt = SmemLayoutTransposed<ShapeV>;

  // What warps that share rows exchange: P, and a word for each row and warp.
  struct Exchange {
    using SmemLayoutP = SmemLayout<ShapeS>;
    alignas(128) Element p[cute::cosize_v<SmemLayoutP>];
    float rows[kColumnWarps][kBlockM];
  };
  struct Nothing {};

  struct QInSharedMemory {
    union {
      alignas(128) Element q[cute::cosize_v<SmemLayoutQ>];
      alignas(128) ElementOut o[cute::cosize_v<SmemLayoutO>];  // once the main loop is over
    };
    alignas(128) Element k[kStages][cute::cosize_v<SmemLayoutK>];
    alignas(128) Element v[kStages][cute::cosize_v<SmemLayoutV>];
    [[no_unique_address]] std::conditional_t<kSharesRows, Exchange, Nothing> exchange;
  };
  // V lies where Q was. O goes where K was, which nobody reads any more, while others may read V.
  union QInRegisters {
    struct {
      alignas(128) Element q[cute::cosize_v<SmemLayoutQ>];
      alignas(128) Element k[kStages][cute::cosize_v<SmemLayoutK>];
    };
    struct {
      alignas(128) Element v[kStages][cute::cosize_v<SmemLayoutV>];
      alignas(128) ElementOut o[cute::cosize_v<SmemLayoutO>];  // once the main loop is over
    };
  };
  static_assert(!kQInRegisters ||
                (!kPipelinedQk && !kSharesRows && kBlockN * kHeadDimV <= kBlockM * kHeadDim));
  using SharedMemory = std::conditional_t<kQInRegisters, QInRegisters, QInSharedMemory>;
  static_assert(kIsChunked || sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  template <class CopyOp, class T, int kStrip>
  using GmemTiledCopy = sm80::GmemTiledCopy<CopyOp, T, kThreads, kStrip>;
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
