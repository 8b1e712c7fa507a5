// The source of K and V of the SM80 main loop for large head dims.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "common/sequence.h"
#include "host/params.h"
#include "sm80/copy.h"

namespace flash_cute::sm80 {

// Reads dense (batch, heads, rows, columns) tensors, chunk by chunk.
template <class Traits>
class ChunkedKV {
  using Element = typename Traits::Element;
  using ShapeK = typename Traits::ShapeK;
  using ShapeV = typename Traits::ShapeV;
  static constexpr int kGroupsV = Traits::kHeadDimV / Traits::kColumnsV;

 public:
  CUTE_DEVICE ChunkedKV(const FwdParams& params, int batch, int kv_head, const Sequence& sequence,
                        unsigned thread)
      : params_(params),
        thread_(thread),
        len_k_(sequence.len_k),
        k_(head(params.k, batch, kv_head, sequence)),
        v_(head(params.v, batch, kv_head, sequence)) {}

  // The chunks of K of a block.
  CUTE_DEVICE int chunks_k() const {
    return (params_.head_dim + Traits::kColumnsK - 1) / Traits::kColumnsK;
  }
  // Those of V: all columns of the first keys, and so on.
  static constexpr int kChunksV = Traits::kBlockN / Traits::kKeysV * kGroupsV;

  // Issue the copy of a chunk of block `n_block`. Rows past the last key become zeros: in V their
  // weight is 0, but 0 x NaN would be NaN.
  template <class Target>
  CUTE_DEVICE void load_k(int n_block, int chunk, Target&& target) const {
    load<typename Traits::GmemCopyK, ShapeK>(k_, params_.k.stride_row, params_.head_dim, n_block,
                                             chunk * Traits::kColumnsK, target);
  }
  template <class Target>
  CUTE_DEVICE void load_v(int n_block, int chunk, Target&& target) const {
    const int keys = chunk / kGroupsV, group = chunk % kGroupsV;
    load<typename Traits::GmemCopyV, ShapeV>(v_, params_.v.stride_row, params_.head_dim_v,
                                             n_block * (Traits::kBlockN / Traits::kKeysV) + keys,
                                             group * Traits::kColumnsV, target);
  }

 private:
  template <class View>
  static CUTE_DEVICE const Element* head(const View& view, int batch, int kv_head,
                                         const Sequence& sequence) {
    return static_cast<const Element*>(view.data) + batch * view.stride_batch +
           kv_head * view.stride_head + sequence.first_k * view.stride_row;
  }

  // Chunk `index` along the rows of `matrix`, from column `column0` on.
  template <class GmemCopy, class Shape, class Target>
  CUTE_DEVICE void load(const Element* matrix, int64_t stride_row, int columns, int index,
                        int column0, Target&& target) const {
    constexpr int kRows = decltype(cute::size<0>(Shape{}))::value;
    const unsigned thread = platform::rematerialize(thread_, index);
    const int64_t stride_here = platform::rematerialize(stride_row);
    const TileLoader<GmemCopy, Shape> loader(thread, columns - column0);
    const Element* source =
        platform::rematerialize(loader.find(matrix + column0, stride_here, index));
    loader.template load<false>(source, stride_here, target, len_k_ - index * kRows);
  }

  const FwdParams& params_;
  unsigned thread_;
  int len_k_;
  const Element* k_;  // of the head
  const Element* v_;
};

}  // namespace flash_cute::sm80
