// The types of one SM80 forward kernel for fp32 (sm80/tf32.h). All warps stand along the rows.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "sm80/layouts.h"
#include "tiles/fwd_sm80.h"

namespace flash_cute::sm80 {

template <FwdConfigSm80 kConfig>
struct Fp32FwdTraits {
  using Element = float;
  using ElementOut = float;

  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kMinCtas = 0;  // a thread may have 255 registers in any case
  static constexpr bool kPipelinedQk = false;
  static constexpr bool kIsChunked = false;
  static constexpr int kStages = 1;
  static constexpr bool kSharesRows = false;
  static constexpr bool kQInRegisters = false;
  static constexpr int kStrip = 32;  // columns of a strip of shared memory: 128 bytes
  static_assert(!kConfig.pipelined_qk && !kConfig.is_chunked() && kConfig.column_warps == 1 &&
                !kConfig.q_in_registers);
  static_assert(kBlockM % (16 * kConfig.row_warps) == 0 && kBlockN % 16 == 0);
  static_assert(kHeadDim % kStrip == 0 && kHeadDimV % kStrip == 0);

  using ShapeQ = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>>;
  using ShapeK = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>;
  using ShapeV = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDimV>>;
  using ShapeVt = cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>>;
  using ShapeS = cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>>;
  using ShapeO = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDimV>>;

  using TiledMma = TiledMmaOf<Element, kConfig.row_warps, 1>;  // of m16n8k8

  using SmemLayoutQ = SmemLayoutFp32<ShapeQ>;
  using SmemLayoutK = SmemLayoutFp32<ShapeK>;
  using SmemLayoutV = SmemLayoutFp32<ShapeV>;
  using SmemLayoutO = SmemLayoutFp32<ShapeO>;
  // The same V seen as (kHeadDimV, kBlockN), the B operand of O += P V. Of 8 neighbouring keys the
  // even ones come first, as P's columns do (as_tf32_operand).
  using SmemLayoutVt = SmemLayoutTransposedFp32<ShapeV>;

  struct SharedMemory {
    union {
      alignas(128) Element q[cute::cosize_v<SmemLayoutQ>];
      alignas(128) ElementOut o[cute::cosize_v<SmemLayoutO>];  // once the main loop is over
    };
    alignas(128) Element k[kStages][cute::cosize_v<SmemLayoutK>];
    alignas(128) Element v[kStages][cute::cosize_v<SmemLayoutV>];
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  using GmemCopyQK = GmemTiledCopy<platform::CopyGlobalToShared, Element, kThreads, kStrip>;
  using GmemCopyV = GmemCopyQK;
  using GmemCopyO =
      GmemTiledCopy<cute::UniversalCopy<cute::uint128_t>, ElementOut, kThreads, kStrip>;

  // To ldmatrix 4 bytes are two elements: a matrix is 8 rows of 4 numbers of fp32.
  using LoadQ = decltype(cute::make_tiled_copy_A(cute::Copy_Atom<platform::LoadMatrix, Element>{},
                                                 TiledMma{}));
  using LoadK = decltype(cute::make_tiled_copy_B(cute::Copy_Atom<platform::LoadMatrix, Element>{},
                                                 TiledMma{}));
  // Transposed it would tear them apart. By words, 4 even or odd keys x 8 columns: all 32 banks.
  using LoadVt = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<cute::UniversalCopy<uint32_t>, Element>{}, TiledMma{}));
  using StoreO = decltype(cute::make_tiled_copy_C(
      cute::Copy_Atom<cute::UniversalCopy<uint64_t>, ElementOut>{}, TiledMma{}));
};

}  // namespace flash_cute::sm80
