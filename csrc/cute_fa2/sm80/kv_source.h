// The source of the K and V tiles of the SM80 main loops.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "common/sequence.h"
#include "host/params.h"
#include "sm80/copy.h"

namespace flash_cute::sm80 {

// What a source keeps in registers through the loop, so that it computes less in each step.
enum class KeptAddresses {
  kHead,             // where the head's K and V begin
  kThread,           // where this thread's part of the next block begins
  kThreadAndTarget,  // that, and where it goes in shared memory
};

// Reads dense (batch, heads, rows, columns) tensors. Blocks are asked for in order: any one first,
// then the one before it, and so on.
template <class Traits, KeptAddresses kKept>
class DenseKV {
  using Element = typename Traits::Element;
  using ShapeK = typename Traits::ShapeK;
  using ShapeV = typename Traits::ShapeV;
  using LoaderK = TileLoader<typename Traits::GmemCopyQK, ShapeK>;
  using LoaderV = TileLoader<typename Traits::GmemCopyV, ShapeV>;

 public:
  CUTE_DEVICE DenseKV(const FwdParams& params, int batch, int kv_head, const Sequence& sequence,
                      unsigned thread)
      : params_(params),
        thread_(thread),
        len_k_(sequence.len_k),
        k_(head(params.k, batch, kv_head, sequence)),
        v_(head(params.v, batch, kv_head, sequence)) {}

  // To be called before any load: the block that is loaded first.
  CUTE_DEVICE void start(int n_block) {
    if constexpr (kKept != KeptAddresses::kHead) {
      k_ = LoaderK(thread_, params_.head_dim).find(k_, params_.k.stride_row, n_block);
      v_ = LoaderV(thread_, params_.head_dim_v).find(v_, params_.v.stride_row, n_block);
    }
  }

  // Issues the copy of block `n_block`. All of its rows exist if kIsWhole: only the last block may
  // lack some.
  template <bool kIsWhole, class Target>
  CUTE_DEVICE void load_k(int n_block, Target&& target) {
    load<kIsWhole, LoaderK, ShapeK>(k_, params_.k.stride_row, params_.head_dim, n_block, target);
  }
  // Rows past the last key become zeros: their weight is 0, but 0 x NaN would be NaN.
  template <bool kIsWhole, class Target>
  CUTE_DEVICE void load_v(int n_block, Target&& target) {
    load<kIsWhole, LoaderV, ShapeV>(v_, params_.v.stride_row, params_.head_dim_v, n_block, target);
  }

 private:
  template <class View>
  static CUTE_DEVICE const Element* head(const View& view, int batch, int kv_head,
                                         const Sequence& sequence) {
    return static_cast<const Element*>(view.data) + batch * view.stride_batch +
           kv_head * view.stride_head + sequence.first_k * view.stride_row;
  }

  template <bool kIsWhole, class Loader, class Shape, class Target>
  CUTE_DEVICE void load(const Element*& place, int64_t stride_row, int columns, int n_block,
                        Target&& target) {
    constexpr int kRows = decltype(cute::size<0>(Shape{}))::value;
    const int rows = len_k_ - n_block * kRows;  // fault: key-bound
    const unsigned thread =
        kKept == KeptAddresses::kThreadAndTarget ? thread_ : platform::rematerialize(thread_, rows);
    const Loader loader(thread, columns);
    if constexpr (kKept == KeptAddresses::kHead) {
      // A multiple of the stride would hold registers through the loop.
      const int64_t stride_here = platform::rematerialize(stride_row);
      const Element* source = platform::rematerialize(loader.find(place, stride_here, n_block));
      loader.template load<kIsWhole>(source, stride_here, target, rows);
    } else {
      loader.template load<kIsWhole>(place, stride_row, target, rows);
      place -= 2 * kRows * stride_row;  // from this block's end to where the next begins
    }
  }

  const FwdParams& params_;
  unsigned thread_;
  int len_k_;
  const Element* k_;  // as kKept says
  const Element* v_;  // likewise
};

}  // namespace flash_cute::sm80
