// The source of K and V of the SM80 main loop for large head dims.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "common/sequence.h"
#include "host/params.h"
#include "sm80/copy.h"

namespace flash_cute::sm80 {

// Reads dense (batch, heads, rows, columns) tensors chunk by chunk: of each block K's chunks, from
// the first columns on, and then V's, from the first keys on, of which all columns come first.
// Blocks go from any one to the one before it, and so on.
template <class Traits>
class ChunkedKV {
  using Element = typename Traits::Element;
  using ShapeK = typename Traits::ShapeK;
  using ShapeV = typename Traits::ShapeV;
  using LoaderK = TileLoader<typename Traits::GmemCopyK, ShapeK>;
  using LoaderV = TileLoader<typename Traits::GmemCopyV, ShapeV>;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kGroupsV = Traits::kHeadDimV / Traits::kColumnsV;

 public:
  CUTE_DEVICE ChunkedKV(const FwdParams& params, int batch, int kv_head, const Sequence& sequence,
                        unsigned thread)
      : params_(params),
        thread_(thread),
        len_k_(sequence.len_k),
        k_(head(params.k, batch, kv_head, sequence)),
        v_(head(params.v, batch, kv_head, sequence)) {}

  // The chunks of K of a block, and those of V.
  CUTE_DEVICE int chunks_k() const {
    return (params_.head_dim + Traits::kColumnsK - 1) / Traits::kColumnsK;
  }
  static constexpr int kChunksV = kBlockN / Traits::kKeysV * kGroupsV;

  // To be called before any load: the block that is loaded first.
  CUTE_DEVICE void start(int n_block) {
    k_ = LoaderK(thread_, 0).find(k_, params_.k.stride_row, n_block);
    v_ = LoaderV(thread_, 0).find(v_, params_.v.stride_row, n_block * (kBlockN / Traits::kKeysV));
  }

  // Issue the copy of a chunk of block `n_block`, each in turn. Rows past the last key become
  // zeros: in V their weight is 0, but 0 x NaN would be NaN.
  template <class Target>
  CUTE_DEVICE void load_k(int n_block, int chunk, Target&& target) {
    const LoaderK loader(thread_, params_.head_dim - chunk * Traits::kColumnsK);
    const Element* source = k_;
    loader.template load<false>(source, params_.k.stride_row, target, len_k_ - n_block * kBlockN);
    k_ += Traits::kColumnsK;
  }
  template <class Target>
  CUTE_DEVICE void load_v(int n_block, int chunk, Target&& target) {
    const int keys = chunk / kGroupsV, group = chunk % kGroupsV;
    const LoaderV loader(thread_, params_.head_dim_v - group * Traits::kColumnsV);
    const Element* source = v_ + group * Traits::kColumnsV;
    loader.template load<false>(source, params_.v.stride_row, target,
                                len_k_ - n_block * kBlockN - keys * Traits::kKeysV);
    if (group + 1 == kGroupsV) v_ += Traits::kKeysV * params_.v.stride_row;
  }

  // From the end of a block to the one before it.
  CUTE_DEVICE void next_block() {
    k_ -= kBlockN * params_.k.stride_row + chunks_k() * Traits::kColumnsK;
    v_ -= 2 * kBlockN * params_.v.stride_row;
  }

 private:
  template <class View>
  static CUTE_DEVICE const Element* head(const View& view, int batch, int kv_head,
                                         const Sequence& sequence) {
    return static_cast<const Element*>(view.data) + batch * view.stride_batch +
           kv_head * view.stride_head + sequence.first_k * view.stride_row;
  }

  const FwdParams& params_;
  unsigned thread_;
  int len_k_;
  const Element* k_;  // where this thread's part of the next chunk begins
  const Element* v_;  // likewise, of the next keys
};

}  // namespace flash_cute::sm80
