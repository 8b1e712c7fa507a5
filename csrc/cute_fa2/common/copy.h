// Tiles between global and shared memory, and the K/V source that hands them out.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "common/tile.h"
#include "params.h"

namespace flash_cute {

// This thread's share of a copy of tiles from global to shared memory, with zeros for what lies
// outside the tensor.
template <class GmemCopy, class TileShape>
class TileLoader {
 public:
  CUTE_DEVICE TileLoader(unsigned thread, int head_dim) : thread_(thread), head_dim_(head_dim) {}

  // Where this thread's part begins of tile `index` along the rows of the matrix (rows, head_dim)
  // at `data`.
  template <class Element>
  CUTE_DEVICE const Element* find(const Element* data, int64_t stride_row, int index) const {
    using namespace cute;
    // As many rows as may be: what lies beyond is nobody's business here.
    const auto matrix =
        make_tensor(make_gmem_ptr(data), make_shape(kMaxLength, size<1>(TileShape{})),
                    make_stride(stride_row, _1{}));
    const auto tile = local_tile(matrix, TileShape{}, make_coord(index, _0{}));
    return &GmemCopy{}.get_slice(thread_).partition_S(tile)(0, 0, 0);
  }

  // Issues the copy of a tile, of which `rows` rows exist (all, if kIsWhole), to `target`;
  // asynchronous. `source` is where this thread's part begins, and then where it ends.
  template <bool kIsWhole, class Element, class Target>
  CUTE_DEVICE void load(const Element*& source, int64_t stride_row, Target&& target,
                        int rows) const {
    using namespace cute;
    auto to = GmemCopy{}.get_slice(thread_).partition_D(target);  // (8, rows, columns)
    constexpr int kStep = decltype(size<0>(TileShape{}))::value / decltype(size<1>(to))::value;
    // (8, rows, columns) -> (row, column). Thread 0's are constants, from which those of another
    // thread differ all by the same: what is compared below are constants with what is left.
    auto at = GmemCopy{}.get_slice(thread_).partition_S(make_identity_tensor(TileShape{}));
    auto beside = GmemCopy{}.get_slice(0).partition_S(make_identity_tensor(TileShape{}));
    const int rows_left = rows - static_cast<int>(get<0>(at(0, 0, 0)));
    const int columns_left = head_dim_ - static_cast<int>(get<1>(at(0, 0, 0)));
    CUTE_UNROLL
    for (int r = 0; r < size<1>(to); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<2>(to); ++c) {
        const bool row_exists = kIsWhole || get<0>(beside(0, r, c)) < rows_left;
        const int column = get<1>(beside(0, r, c));
        copy(GmemCopy{}.with(row_exists && column < columns_left),
             make_tensor(make_gmem_ptr(source + column), Shape<_8>{}), to(_, r, c));
      }
      // One running pointer in place of an address for each row: 64-bit addresses are what
      // registers are short of here.
      source += kStep * stride_row;
    }
  }

  // The same of the query rows of `view` that begin with `row0`.
  template <class View, class Target>
  CUTE_DEVICE void load_rows(const View& view, const PackGqa& pack_gqa, TileCoord tile, int row0,
                             int len_q, Target&& target) const {
    using namespace cute;
    using Element = typename std::remove_reference_t<Target>::value_type;
    const auto thread_copy = GmemCopy{}.get_slice(thread_);
    auto to = thread_copy.partition_D(target);  // (8, rows, columns)
    // (8, rows, columns) -> (row, column)
    auto at = thread_copy.partition_S(make_identity_tensor(TileShape{}));
    constexpr int kRows = decltype(size<1>(to))::value;
    constexpr int kStep = decltype(size<0>(TileShape{}))::value / kRows;
    pack_gqa.walk<const Element, kRows, kStep>(
        view, tile, row0 + static_cast<int>(get<0>(at(0, 0, 0))), len_q,
        [&](int r, const Element* source, bool exists) {
          CUTE_UNROLL
          for (int c = 0; c < size<2>(to); ++c) {
            const int column = get<1>(at(0, r, c));
            copy(GmemCopy{}.with(exists && column < head_dim_),
                 make_tensor(make_gmem_ptr(source + column), Shape<_8>{}), to(_, r, c));
          }
        });
  }

  // Multiplies this thread's share of a tile in shared memory by `factor`: what it copied itself
  // and has waited for, so that no barrier is needed before.
  template <class Target>
  CUTE_DEVICE void multiply(Target&& target, float factor) const {
    using namespace cute;
    using Element = typename std::remove_reference_t<Target>::value_type;
    const auto thread_copy = GmemCopy{}.get_slice(platform::rematerialize(thread_));
    auto mine = thread_copy.partition_D(target);  // (8, rows, columns)
    CUTE_UNROLL
    for (int i = 0; i < size(mine); ++i) mine(i) = Element(float(mine(i)) * factor);
  }

 private:
  unsigned thread_;
  int head_dim_;
};

// What is kept through a loop over blocks of keys, so that less is computed in each step.
enum class KeptAddresses {
  kHead,             // where the head's K and V begin
  kThread,           // where this thread's part of the next block begins
  kThreadAndTarget,  // that, and where it goes in shared memory
};

// Where the main loop gets its K and V tiles from: first those of any block, then those of the one
// before it, and so on. This one reads plain (batch, heads, rows, head_dim) tensors.
template <class Traits, KeptAddresses kKept>
class DenseKV {
  using Element = typename Traits::Element;
  using ShapeK = typename Traits::ShapeK;
  using ShapeV = typename Traits::ShapeV;

 public:
  CUTE_DEVICE DenseKV(const FwdParams& params, int batch, int kv_head, int len_k, unsigned thread)
      : params_(params),
        thread_(thread),
        len_k_(len_k),
        keys_(matrix(params.k, batch, kv_head)),
        values_(matrix(params.v, batch, kv_head)) {}

  // To be called before any load: the block that is loaded first.
  CUTE_DEVICE void start(int n_block) {
    if constexpr (kKept != KeptAddresses::kHead) {
      const int head_dim = params_.head_dim;
      keys_ = Loader<ShapeK>(thread_, head_dim).find(keys_, params_.k.stride_row, n_block);
      values_ = Loader<ShapeV>(thread_, head_dim).find(values_, params_.v.stride_row, n_block);
    }
  }

  // The tile of block `n_block`, of which all rows exist if kIsWhole: those of the last block may
  // not.
  template <bool kIsWhole, class Target>
  CUTE_DEVICE void load_k(int n_block, Target&& target) {
    load<kIsWhole, ShapeK>(keys_, params_.k.stride_row, n_block, target);
  }
  // Rows past the last key become zeros: their weight is 0, but 0 x NaN would be NaN.
  template <bool kIsWhole, class Target>
  CUTE_DEVICE void load_v(int n_block, Target&& target) {
    load<kIsWhole, ShapeV>(values_, params_.v.stride_row, n_block, target);
  }

 private:
  template <class Shape>
  static constexpr int kRows = decltype(cute::size<0>(Shape{}))::value;
  template <class Shape>
  using Loader = TileLoader<typename Traits::GmemCopy, Shape>;

  // Of one head.
  template <class View>
  static CUTE_DEVICE const Element* matrix(const View& view, int batch, int kv_head) {
    return static_cast<const Element*>(view.data) + batch * view.stride_batch +
           kv_head * view.stride_head;
  }

  template <bool kIsWhole, class Shape, class Target>
  CUTE_DEVICE void load(const Element*& place, int64_t stride_row, int n_block, Target&& target) {
    const int rows = len_k_ - n_block * kRows<Shape>;
    const unsigned thread =
        kKept == KeptAddresses::kThreadAndTarget ? thread_ : platform::rematerialize(thread_, rows);
    const Loader<Shape> loader(thread, params_.head_dim);
    if constexpr (kKept == KeptAddresses::kHead) {
      // A multiple of the stride, kept through the loop, would hold registers.
      const int64_t stride_here = platform::rematerialize(stride_row);
      const Element* source = platform::rematerialize(loader.find(place, stride_here, n_block));
      loader.template load<kIsWhole>(source, stride_here, target, rows);
    } else {
      loader.template load<kIsWhole>(place, stride_row, target, rows);
      place -= 2 * kRows<Shape> * stride_row;  // from this block's end to where the next begins
    }
  }

  const FwdParams& params_;
  unsigned thread_;
  int len_k_;
  const Element* keys_;    // as kKept says
  const Element* values_;  // likewise
};

}  // namespace flash_cute
