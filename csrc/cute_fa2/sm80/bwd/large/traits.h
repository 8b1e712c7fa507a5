// The types of the SM80 backward kernels above head dim 256, and of fp32's: shapes, the tiled MMA
// of each product, shared memory and the copies between memories.
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
#include "tiles/bwd_sm80_large.h"

namespace flash_cute::sm80 {

// Which gradient a kernel computes.
enum class Gradient { kDq, kDk, kDv, kBias };

template <DType kDType, LargeBwdConfigSm80 kConfig>
struct LargeBwdTraits {
  using Element = ElementOf<kDType>;

  static constexpr int kTileRows = kConfig.kTileRows;
  static constexpr int kBlockRows = kConfig.block_rows;
  static constexpr int kColumns = kConfig.columns;  // of the gradient
  static constexpr int kChunkColumns = kConfig.chunk_columns;
  static constexpr int kChunkRows = kConfig.chunk_rows;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kThreads = kConfig.kThreads;
  static constexpr int kMinCtas = 1;
  static_assert(kStages >= 3 && kBlockRows % kChunkRows == 0);
  // The statistics of a block are loaded among the sums of the block before (load_chunk).
  static_assert(kBlockRows / kChunkRows >= kStages - 1);

  // The operands of S and dP in a chunk: the tile's rows, and those of a block.
  using ShapeTile = cute::Shape<cute::Int<kTileRows>, cute::Int<kChunkColumns>>;
  using ShapeBlock = cute::Shape<cute::Int<kBlockRows>, cute::Int<kChunkColumns>>;
  using ShapeS = cute::Shape<cute::Int<kTileRows>, cute::Int<kBlockRows>>;
  // gradient += weights x summed rows
  using ShapeGradient = cute::Shape<cute::Int<kTileRows>, cute::Int<kColumns>>;
  using ShapeWeights = cute::Shape<cute::Int<kTileRows>, cute::Int<kChunkRows>>;
  using ShapeSummed = cute::Shape<cute::Int<kChunkRows>, cute::Int<kColumns>>;

  static constexpr bool kIsFp32 = kDType == DType::kFloat;
  // A warp has 32 x 32 of S and dP (of fp32 32 x 16), and all rows of a strip of the gradient: so
  // it reads least. Of fp32, with fewer columns, half of the rows.
  using TiledMmaS = TiledMmaOf<Element, 2, 4>;
  using TiledMmaGradient = TiledMmaOf<Element, kIsFp32 ? 2 : 1, kIsFp32 ? 4 : 8>;
  static_assert(kThreads == 256 && kColumns % (16 * (kIsFp32 ? 4 : 8)) == 0);

  template <class Shape>
  using SmemLayout = std::conditional_t<kIsFp32, SmemLayoutFp32<Shape>, sm80::SmemLayout<Shape>>;
  // Of summed rows, as (kColumns, kChunkRows).
  using SmemLayoutSummedT = std::conditional_t<kIsFp32, SmemLayoutTransposedFp32<ShapeSummed>,
                                               SmemLayoutTransposed<ShapeSummed>>;
  // Of the weights as they are stored: in fp32 their columns lie in the order of the rows there.
  using SmemLayoutStored =
      std::conditional_t<kIsFp32, SmemLayoutEvenFirstFp32<ShapeS>, sm80::SmemLayout<ShapeS>>;

  // Which tile a CTA has. Read when it is asked for: it would hold registers.
  struct Tile {
    TileCoord at;  // its m_block counts tiles of the gradient's rows
    Sequence sequence;
    int64_t first_stats;  // of its sequence's rows in head 0
    int column;           // the first of its gradient's columns
    int first_head;       // of the other side
  };
  struct SharedMemory {
    alignas(128) Element chunks[kStages][kConfig.chunk_elements()];
    alignas(128) Element weights[cute::size(ShapeS{})];  // P or dS
    alignas(128) TwoRowGradStats stats[kBlockRows / 2];
    alignas(128) Tile tile;
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  template <class Shape>
  using GmemCopy = GmemChunkCopy<Element, kThreads, Shape>;

  // Operands by ldmatrix, from rows of shared memory or (transposed) from columns.
  template <class TiledMma>
  using LoadA = decltype(cute::make_tiled_copy_A(cute::Copy_Atom<platform::LoadMatrix, Element>{},
                                                 TiledMma{}));
  using LoadB = decltype(cute::make_tiled_copy_B(cute::Copy_Atom<platform::LoadMatrix, Element>{},
                                                 TiledMmaS{}));
  // In fp32 by words: transposed, ldmatrix would tear them apart.
  using LoadTransposedB = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<std::conditional_t<kIsFp32, cute::UniversalCopy<uint32_t>,
                                         platform::LoadMatrixTransposed>,
                      Element>{},
      TiledMmaGradient{}));
  using StoreWeights = decltype(cute::make_tiled_copy_C(
      cute::Copy_Atom<cute::UniversalCopy<uint32_t>, Element>{}, TiledMmaS{}));
};

}  // namespace flash_cute::sm80
