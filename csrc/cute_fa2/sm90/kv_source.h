// The source of the K and V tiles of the SM90 producer.
#pragma once

#include <cute/config.hpp>

#include "common/pack_gqa.h"
#include "common/sequence.h"
#include "host/params.h"
#include "host/plan_fwd.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

// Issues the TMA loads of kRows rows, from row `row` of (batch, head), to `target`: a box of
// kBoxRows rows for each part of each strip of columns. An expanded dimension has one entry in the
// map. `second` is the coordinate of the second dimension, `first_column` where the columns begin.
template <int kRows, int kColumns, int kStrip, int kBoxRows = kRows, class View, class Element>
CUTE_DEVICE void tma_load_rows(const CUtensorMap& map, const View& view, Element* target,
                               hopper::Barrier& arrival, int row, int head, int batch,
                               int second = 0, int first_column = 0) {
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kStrip) {
    CUTE_UNROLL
    for (int first = 0; first < kRows; first += kBoxRows) {
      hopper::tma_load(map, target + column * kRows + first * kStrip, arrival,
                       first_column + column, second, row + first, view.stride_head != 0 ? head : 0,
                       view.stride_batch != 0 ? batch : 0);
    }
  }
}

// Where a sequence lies in a tensor of `bound` rows.
struct RowsOfSequence {
  int first;
  int count;
  int bound;
};

// The same of rows of a sequence, from its row `row` on. What lies past its end becomes zeros. By a
// ragged map, but for boxes that lie there whole: of such a map they would touch other memory. If
// kBeginsInside there is none.
template <bool kIsPacked, int kRows, int kColumns, int kStrip, int kBoxRows = kRows,
          bool kBeginsInside = false, class View, class Element>
CUTE_DEVICE void tma_load_rows_of(const CUtensorMap& map, const CUtensorMap& ragged,
                                  const View& view, Element* target, hopper::Barrier& arrival,
                                  int row, RowsOfSequence rows, int head, int batch) {
  if constexpr (!kIsPacked) {
    tma_load_rows<kRows, kColumns, kStrip, kBoxRows>(map, view, target, arrival, row, head, batch);
  } else {
    CUTE_UNROLL
    for (int first = 0; first < kRows; first += kBoxRows) {
      const bool is_outside = !kBeginsInside && row + first >= rows.count;
      const int at = is_outside ? rows.bound : rows.bound - rows.count + row + first;
      CUTE_UNROLL
      for (int column = 0; column < kColumns; column += kStrip) {
        hopper::tma_load(is_outside ? map : ragged, target + column * kRows + first * kStrip,
                         arrival, column, is_outside ? 0 : rows.first + rows.count, at,
                         view.stride_head != 0 ? head : 0, view.stride_batch != 0 ? batch : 0);
      }
    }
  }
}

// (batch, heads, rows, columns) tensors, by TMA. Rows of V past the last key become zeros: their
// weight is 0, but 0 x NaN would be NaN. They lie outside of the map. With sequences of several
// lengths in one tensor other keys lie there, so V has a ragged map: its coordinates count from the
// end of the sequence (sm90/tensor_map.cpp).
template <class Traits, bool kIsPacked>
class TmaKV {
  using Element = typename Traits::Element;
  static constexpr int kBlockN = Traits::kBlockN;

 public:
  CUTE_DEVICE TmaKV(const TensorMaps& maps, const FwdParams& params)
      : maps_(maps), params_(params) {}

  CUTE_DEVICE void load_k(Element* target, hopper::Barrier& arrival, const Sequence& sequence,
                          int n_block, int kv_head, int batch) const {
    tma_load_rows<kBlockN, Traits::kHeadDim, Traits::kStrip>(
        maps_.k, params_.k, target, arrival, n_block * kBlockN + sequence.first_k, kv_head, batch);
  }
  CUTE_DEVICE void load_v(Element* target, hopper::Barrier& arrival, const Sequence& sequence,
                          int n_block, int kv_head, int batch) const {
    if constexpr (kIsPacked) {
      // A box wholly outside would touch other memory. A tile always has a block, even without
      // keys: then of the tensor's first row, which has no weight.
      const bool is_empty = sequence.len_k == 0;
      const int end = is_empty ? 1 : sequence.first_k + sequence.len_k;  // fault: ragged-end
      const int row = params_.len_k - (is_empty ? 1 : sequence.len_k) + n_block * kBlockN;
      CUTE_UNROLL
      for (int column = 0; column < Traits::kHeadDimV; column += Traits::kStripV) {
        // So would a strip of columns that V does not have. K's map, whose boxes have the same
        // shape, gives zeros for it.
        static_assert(Traits::kStripV == Traits::kStrip);
        const bool is_outside = column > 0 && column >= params_.head_dim_v;
        hopper::tma_load(is_outside ? maps_.k : maps_.v, target + column * kBlockN, arrival,
                         is_outside ? Traits::kHeadDim : column, is_outside ? 0 : end,
                         is_outside ? 0 : row, params_.v.stride_head != 0 ? kv_head : 0,
                         params_.v.stride_batch != 0 ? batch : 0);
      }
    } else {
      tma_load_rows<kBlockN, Traits::kHeadDimV, Traits::kStripV>(
          maps_.v, params_.v, target, arrival, n_block * kBlockN, kv_head, batch);
    }
  }

 private:
  const TensorMaps& maps_;
  const FwdParams& params_;
};

}  // namespace flash_cute::sm90
