// The types of one SM80 forward kernel for large head dims: K and V in chunks.
#pragma once

#include <cute/tensor.hpp>

#include "sm80/fwd/traits.h"
#include "sm80/layouts.h"

namespace flash_cute::sm80 {

// Here ShapeK, ShapeV and what follows from them are of a chunk.
template <DType kDType, FwdConfigSm80 kConfig>
struct ChunkedFwdTraits : FwdTraits<kDType, kConfig> {
  using Base = FwdTraits<kDType, kConfig>;
  using Element = typename Base::Element;
  using Base::kBlockM, Base::kBlockN, Base::kColumnWarps, Base::kHeadDim, Base::kHeadDimV,
      Base::kStages;
  static constexpr int kColumnsK = kConfig.k_columns;
  static constexpr int kKeysV = kConfig.v_keys;
  static constexpr int kColumnsV = kConfig.v_columns;
  static_assert(Base::kSharesRows && kStages >= 3);
  static_assert(kHeadDim % kColumnsK == 0 && kColumnsK % 32 == 0);
  static_assert(kBlockN % kKeysV == 0 && kKeysV % 16 == 0);
  static_assert(kHeadDimV % kColumnsV == 0 && kColumnsV % (16 * kColumnWarps) == 0);

  using ShapeQChunk = cute::Shape<cute::Int<kBlockM>, cute::Int<kColumnsK>>;
  using ShapeK = cute::Shape<cute::Int<kBlockN>, cute::Int<kColumnsK>>;
  using ShapeV = cute::Shape<cute::Int<kKeysV>, cute::Int<kColumnsV>>;
  using ShapeP = cute::Shape<cute::Int<kBlockM>, cute::Int<kKeysV>>;  // that go with a chunk of V

  // The columns of a chunk of K lie together.
  using SmemLayoutQ =
      decltype(cute::tile_to_shape(SmemAtom<strip(kColumnsK)>{}, typename Base::ShapeQ{}));
  using SmemLayoutQChunk = SmemLayout<ShapeQChunk>;
  using SmemLayoutK = SmemLayout<ShapeK>;
  using SmemLayoutV = SmemLayout<ShapeV>;
  using SmemLayoutVt = SmemLayoutTransposed<ShapeV>;

  struct SharedMemory {
    union {
      alignas(128) Element q[cute::cosize_v<SmemLayoutQ>];
      // Once the main loop is over.
      alignas(128) typename Base::ElementOut o[cute::cosize_v<typename Base::SmemLayoutO>];
    };
    alignas(128) Element chunks[kStages][kConfig.chunk_elements()];
    typename Base::Exchange exchange;
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  template <class Shape>
  using GmemCopy = GmemChunkCopy<Element, Base::kThreads, Shape>;
  using GmemCopyQK = GmemCopy<ShapeQChunk>;  // of Q; a chunk of K has its own
  using GmemCopyK = GmemCopy<ShapeK>;
  using GmemCopyV = GmemCopy<ShapeV>;
  static_assert(GmemChunkCopyOf<Element, Base::kThreads, ShapeK>::kFits &&
                GmemChunkCopyOf<Element, Base::kThreads, ShapeV>::kFits);
};

}  // namespace flash_cute::sm80
