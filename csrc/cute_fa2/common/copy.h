// Tiles between global and shared memory, and the K/V source that hands them out.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "params.h"

namespace flash_cute {

// The (rows, head_dim) matrix of one head, cut into tiles of a static shape: (shape..., tiles).
template <class TileShape, class Element, class Pointer>
CUTE_DEVICE auto tiles_of_head(const TensorView<Pointer>& view, int batch, int head, int rows) {
  using namespace cute;
  const int64_t offset = batch * view.stride_batch + head * view.stride_head;
  auto matrix =
      make_tensor(make_gmem_ptr(static_cast<Element*>(view.data) + offset),
                  make_shape(rows, size<1>(TileShape{})), make_stride(view.stride_row, _1{}));
  return local_tile(matrix, TileShape{}, make_coord(_, _0{}));
}

// This thread's share of a copy of tiles from global to shared memory, with zeros for what lies
// outside the tensor.
template <class GmemCopy, class TileShape>
class TileLoader {
 public:
  CUTE_DEVICE TileLoader(int thread, int head_dim) : thread_(thread), head_dim_(head_dim) {}

  // Issues the copy of `source` (rows, kHeadDim), of which `rows` rows exist, to `target`;
  // asynchronous.
  template <class Source, class Target>
  CUTE_DEVICE void load(const Source& source, Target&& target, int rows) const {
    using namespace cute;
    const auto thread_copy = GmemCopy{}.get_slice(platform::computed_here(thread_));
    auto from = thread_copy.partition_S(source);  // (8, rows, columns)
    auto to = thread_copy.partition_D(target);    // (8, rows, columns)
    auto row = from(_, _0{}, _);                  // (8, columns)
    // (8, rows, columns) -> (row, column)
    auto at = thread_copy.partition_S(make_identity_tensor(TileShape{}));
    CUTE_UNROLL
    for (int r = 0; r < size<1>(from); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<2>(from); ++c) {
        const bool exists = get<0>(at(0, r, c)) < rows && get<1>(at(0, r, c)) < head_dim_;
        copy(GmemCopy{}.with(exists), row(_, c), to(_, r, c));
      }
      // One running pointer in place of an address for each row: 64-bit addresses are what
      // registers are short of here.
      row.data() = row.data() + stride<1>(from.layout());
    }
  }

  // Multiplies this thread's share of a tile in shared memory by `factor`: what it copied itself
  // and has waited for, so that no barrier is needed before.
  template <class Target>
  CUTE_DEVICE void multiply(Target&& target, float factor) const {
    using namespace cute;
    using Element = typename std::remove_reference_t<Target>::value_type;
    const auto thread_copy = GmemCopy{}.get_slice(platform::computed_here(thread_));
    auto mine = thread_copy.partition_D(target);  // (8, rows, columns)
    CUTE_UNROLL
    for (int i = 0; i < size(mine); ++i) mine(i) = Element(float(mine(i)) * factor);
  }

 private:
  int thread_;
  int head_dim_;
};

// Where the main loop gets its K and V tiles from. This one reads plain (batch, heads, rows,
// head_dim) tensors.
template <class Traits>
class DenseKeysValues {
  using Element = typename Traits::Element;
  using ShapeK = typename Traits::ShapeK;
  using ShapeV = typename Traits::ShapeV;

 public:
  CUTE_DEVICE DenseKeysValues(const FwdParams& params, int batch, int kv_head, int len_k,
                              int thread)
      : keys_(tiles_of_head<ShapeK, const Element>(params.k, batch, kv_head, len_k)),
        values_(tiles_of_head<ShapeV, const Element>(params.v, batch, kv_head, len_k)),
        key_loader_(thread, params.head_dim),
        value_loader_(thread, params.head_dim),
        len_k_(len_k) {}

  template <class Target>
  CUTE_DEVICE void load_keys(int n_block, Target&& target) const {
    key_loader_.load(keys_(cute::_, cute::_, n_block), target, rows_from(n_block));
  }
  // Rows past the last key become zeros: their weight is 0, but 0 x NaN would be NaN.
  template <class Target>
  CUTE_DEVICE void load_values(int n_block, Target&& target) const {
    value_loader_.load(values_(cute::_, cute::_, n_block), target, rows_from(n_block));
  }

 private:
  CUTE_DEVICE int rows_from(int n_block) const {
    return len_k_ - n_block * cute::size<0>(ShapeK{});
  }

  template <class Shape>
  using Tiles = decltype(tiles_of_head<Shape, const Element>(FwdParams{}.k, 0, 0, 0));
  Tiles<ShapeK> keys_;    // (kBlockN, kHeadDim, blocks)
  Tiles<ShapeV> values_;  // (kBlockN, kHeadDimV, blocks)
  TileLoader<typename Traits::GmemCopy, ShapeK> key_loader_;
  TileLoader<typename Traits::GmemCopy, ShapeV> value_loader_;
  int len_k_;
};

}  // namespace flash_cute
