// What a finished tile leaves in global memory: O and the log-sum-exp, straight from registers.
#pragma once

#include <cute/tensor.hpp>

#include "common/layout.h"
#include "common/platform.h"
#include "common/tile.h"
#include "sm90/arguments.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits>
struct FwdEpilogue {
  using ElementOut = typename Traits::ElementOut;

  // tOrO  ((2, 2, kHeadDimV / 8), 1, 1), normalised
  // row0  the consumer's first row
  template <class Out, class Softmax>
  static CUTE_DEVICE void run(const Arguments& arguments, TileCoord tile, int row0, int len_q,
                              const Out& tOrO, const Softmax& softmax) {
    using namespace cute;
    const FwdParams& params = arguments.params;
    const int thread = hopper::thread_in_warpgroup();
    const int lane_in_quad = thread % 4;
    const int first_row = row0 + thread / 32 * 16 + thread % 32 / 4;
    if (lane_in_quad < Softmax::kRows) {  // each of two lanes has one of the rows
      const int row = first_row + 8 * lane_in_quad;
      if (arguments.query_rows.exists(row, len_q)) {
        *arguments.query_rows.find<float>(params.lse, tile, row) = softmax.lse(lane_in_quad);
      }
    }
    auto words = make_tensor<uint32_t>(  // two columns each: (2, kHeadDimV / 8)
        Int<decltype(size(tOrO))::value / 2>{});
    convert_to_words<ElementOut>(tOrO, words);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      const int row = first_row + 8 * r;
      const bool exists = arguments.query_rows.exists(row, len_q);
      auto* out = arguments.query_rows.find<ElementOut>(params.out, tile, row);
      // A lane holds two columns of every eight. Four lanes trade, for each of them to have eight
      // columns that lie together: 16 bytes.
      CUTE_UNROLL
      for (int column = 0; column < Traits::kHeadDimV; column += 32) {
        uint32_t chunk[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) chunk[i] = words(2 * (column / 8 + i) + r);
        transpose_in_quad(chunk, lane_in_quad);
        const int first = column + 8 * lane_in_quad;
        if (exists && first < params.head_dim) hopper::store_words(out + first, chunk);
      }
    }
  }

 private:
  // Word i of lane j becomes word j of lane i.
  static CUTE_DEVICE void transpose_in_quad(uint32_t (&words)[4], int lane) {
    exchange(words[0], words[1], lane & 1, 1);
    exchange(words[2], words[3], lane & 1, 1);
    exchange(words[0], words[2], lane & 2, 2);
    exchange(words[1], words[3], lane & 2, 2);
  }
  // The lower lane's `b` for the upper lane's `a`.
  static CUTE_DEVICE void exchange(uint32_t& a, uint32_t& b, bool is_upper, int lane_mask) {
    const uint32_t other = platform::shuffle_xor(is_upper ? a : b, lane_mask);
    (is_upper ? a : b) = other;
  }
};

}  // namespace flash_cute::sm90
