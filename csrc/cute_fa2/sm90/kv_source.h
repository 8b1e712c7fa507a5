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
// map.
template <int kRows, int kColumns, int kStrip, int kBoxRows = kRows, class View, class Element>
CUTE_DEVICE void tma_load_rows(const CUtensorMap& map, const View& view, Element* target,
                               hopper::Barrier& arrival, int row, int head, int batch) {
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kStrip) {
    CUTE_UNROLL
    for (int first = 0; first < kRows; first += kBoxRows) {
      hopper::tma_load(map, target + column * kRows + first * kStrip, arrival, column, 0,
                       row + first, view.stride_head != 0 ? head : 0,
                       view.stride_batch != 0 ? batch : 0);
    }
  }
}

// Dense (batch, heads, rows, columns) tensors, by TMA. Rows past the last key lie outside of the
// map and become zeros: their weight is 0, but 0 x NaN would be NaN. (With sequences of several
// lengths in one tensor, the next would lie there. V would need another map.)
template <class Traits>
class TmaDenseKV {
  using Element = typename Traits::Element;
  static constexpr int kBlockN = Traits::kBlockN;

 public:
  CUTE_DEVICE TmaDenseKV(const TensorMaps& maps, const FwdParams& params)
      : maps_(maps), params_(params) {}

  CUTE_DEVICE void load_k(Element* target, hopper::Barrier& arrival, const Sequence& sequence,
                          int n_block, int kv_head, int batch) const {
    tma_load_rows<kBlockN, Traits::kHeadDim, Traits::kStrip>(
        maps_.k, params_.k, target, arrival, n_block * kBlockN + static_cast<int>(sequence.first_k),
        kv_head, batch);
  }
  CUTE_DEVICE void load_v(Element* target, hopper::Barrier& arrival, const Sequence& sequence,
                          int n_block, int kv_head, int batch) const {
    tma_load_rows<kBlockN, Traits::kHeadDimV, Traits::kStripV>(
        maps_.v, params_.v, target, arrival, n_block * kBlockN + static_cast<int>(sequence.first_k),
        kv_head, batch);
  }

 private:
  const TensorMaps& maps_;
  const FwdParams& params_;
};

}  // namespace flash_cute::sm90
