// How the holders of a row agree: the lanes of a quad, or of a quad in each of several warps.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/online_softmax.h"
#include "common/platform.h"

namespace flash_cute::sm80 {

// As QuadAllreduce, for rows that several warps share. All threads of the CTA call together; `any`
// and `sync` are barriers of the CTA. Between two reductions the caller needs a barrier, so that
// words are read before they are written again.
template <class Traits>
class CrossWarpAllreduce {
 public:
  CUTE_DEVICE CrossWarpAllreduce(typename Traits::Exchange& exchange, unsigned thread)
      : words_(exchange.rows), thread_(thread) {}

  CUTE_DEVICE bool any(bool predicate) const { return platform::sync_cta_or(predicate); }
  CUTE_DEVICE void sync() const { platform::sync_cta(); }

  template <int kRows>
  CUTE_DEVICE void max(float (&rows)[kRows]) const {
    QuadAllreduce::max(rows);
    reduce(rows, [](float a, float b) { return fmaxf(a, b); });
  }

  template <int kRows>
  CUTE_DEVICE void sum(float (&rows)[kRows]) const {
    QuadAllreduce::sum(rows);
    reduce(rows, [](float a, float b) { return a + b; });
  }

 private:
  // All warps combine in the same order, so that they agree to the last bit.
  template <int kRows, class Combine>
  CUTE_DEVICE void reduce(float (&rows)[kRows], const Combine& combine) const {
    if (thread_ % 4 == 0) {
      auto mine = words_of(thread_ / (32 * Traits::kRowWarps));
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) mine(r, 0) = rows[r];
    }
    platform::sync_cta();  // the words of all warps are there
    CUTE_UNROLL
    for (int warp = 0; warp < Traits::kColumnWarps; ++warp) {
      auto theirs = words_of(warp);
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        rows[r] = warp == 0 ? theirs(r, 0) : combine(rows[r], theirs(r, 0));
      }
    }
  }

  // (rows, columns) -> the word that the column's warp has for the row
  CUTE_DEVICE auto words_of(int column_warp) const {
    using namespace cute;
    auto words = make_tensor(make_smem_ptr(words_[column_warp]),
                             Layout<typename Traits::ShapeS, Stride<_1, _0>>{});
    return as_matrix(typename Traits::TiledMma{}.get_slice(thread_).partition_C(words));
  }

  float (&words_)[Traits::kColumnWarps][Traits::kBlockM];
  unsigned thread_;
};

// What OnlineSoftmax takes.
template <class Traits>
CUTE_DEVICE auto row_allreduce(typename Traits::SharedMemory& smem, unsigned thread) {
  if constexpr (Traits::kSharesRows) {
    return CrossWarpAllreduce<Traits>(smem.exchange, thread);
  } else {
    return QuadAllreduce{};
  }
}

}  // namespace flash_cute::sm80
