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

  // Issues the copy of `source` (rows, kHeadDim), of which `rows` rows exist (all, if kIsWhole), to
  // `target`; asynchronous.
  template <bool kIsWhole, class Source, class Target>
  CUTE_DEVICE void load(const Source& source, Target&& target, int rows) const {
    using namespace cute;
    const auto thread_copy = GmemCopy{}.get_slice(platform::computed_here(thread_, rows));
    auto from = thread_copy.partition_S(source);  // (8, rows, columns)
    auto to = thread_copy.partition_D(target);    // (8, rows, columns)
    // One running pointer in place of an address for each row: 64-bit addresses are what registers
    // are short of here.
    auto row = make_tensor(make_gmem_ptr(platform::computed_here(&from(0, 0, 0))),  // (8, columns)
                           from(_, _0{}, _).layout());
    // (8, rows, columns) -> (row, column). Thread 0's are constants, from which those of another
    // thread differ all by the same: what is compared below are constants with what is left.
    auto at = thread_copy.partition_S(make_identity_tensor(TileShape{}));
    auto beside = GmemCopy{}.get_slice(0).partition_S(make_identity_tensor(TileShape{}));
    const int rows_left = rows - static_cast<int>(get<0>(at(0, 0, 0)));
    const int columns_left = head_dim_ - static_cast<int>(get<1>(at(0, 0, 0)));
    CUTE_UNROLL
    for (int r = 0; r < size<1>(from); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<2>(from); ++c) {
        const bool row_exists = kIsWhole || get<0>(beside(0, r, c)) < rows_left;
        const bool exists = row_exists && get<1>(beside(0, r, c)) < columns_left;
        copy(GmemCopy{}.with(exists), row(_, c), to(_, r, c));
      }
      row.data() = row.data() + stride<1>(from.layout());
    }
  }

  // The same of the query rows of `view` that begin with `row0`.
  template <class View, class Target>
  CUTE_DEVICE void load_rows(const View& view, const QueryRows& query_rows, TileCoord tile,
                             int row0, int len_q, Target&& target) const {
    using namespace cute;
    using Element = typename std::remove_reference_t<Target>::value_type;
    const auto thread_copy = GmemCopy{}.get_slice(thread_);
    auto to = thread_copy.partition_D(target);  // (8, rows, columns)
    // (8, rows, columns) -> (row, column)
    auto at = thread_copy.partition_S(make_identity_tensor(TileShape{}));
    constexpr int kRows = decltype(size<1>(to))::value;
    constexpr int kStep = decltype(size<0>(TileShape{}))::value / kRows;
    query_rows.walk<const Element, kRows, kStep>(
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
    const auto thread_copy = GmemCopy{}.get_slice(platform::computed_here(thread_));
    auto mine = thread_copy.partition_D(target);  // (8, rows, columns)
    CUTE_UNROLL
    for (int i = 0; i < size(mine); ++i) mine(i) = Element(float(mine(i)) * factor);
  }

 private:
  unsigned thread_;
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
                              unsigned thread)
      : params_(params),
        thread_(thread),
        len_k_(len_k),
        keys_(matrix(params.k, batch, kv_head)),
        values_(matrix(params.v, batch, kv_head)) {}

  // The tile of block `n_block`, of which all rows exist if kIsWhole: those of the last block may
  // not.
  template <bool kIsWhole, class Target>
  CUTE_DEVICE void load_keys(int n_block, Target&& target) const {
    load<kIsWhole, ShapeK>(keys_, params_.k.stride_row, n_block, target);
  }
  // Rows past the last key become zeros: their weight is 0, but 0 x NaN would be NaN.
  template <bool kIsWhole, class Target>
  CUTE_DEVICE void load_values(int n_block, Target&& target) const {
    load<kIsWhole, ShapeV>(values_, params_.v.stride_row, n_block, target);
  }

 private:
  // Of one head.
  template <class View>
  static CUTE_DEVICE const Element* matrix(const View& view, int batch, int kv_head) {
    return static_cast<const Element*>(view.data) + batch * view.stride_batch +
           kv_head * view.stride_head;
  }

  template <bool kIsWhole, class Shape, class Target>
  CUTE_DEVICE void load(const Element* data, int64_t stride_row, int n_block,
                        Target&& target) const {
    using namespace cute;
    // A multiple of the stride, kept through the loop, would hold registers.
    const auto source = make_tensor(make_gmem_ptr(data), make_shape(len_k_, size<1>(Shape{})),
                                    make_stride(platform::computed_here(stride_row), _1{}));
    const TileLoader<typename Traits::GmemCopy, Shape> loader(thread_, params_.head_dim);
    loader.template load<kIsWhole>(local_tile(source, Shape{}, make_coord(n_block, _0{})), target,
                                   len_k_ - n_block * size<0>(Shape{}));
  }

  const FwdParams& params_;
  unsigned thread_;
  int len_k_;
  const Element* keys_;
  const Element* values_;
};

}  // namespace flash_cute
