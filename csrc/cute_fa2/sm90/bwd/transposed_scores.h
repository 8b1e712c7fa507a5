// P^T and dS^T of 64 keys of a warpgroup: (rows, columns) of a fragment are (keys, query rows). The
// statistics of a query row come from shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "host/params.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class TransposedScores {
  using MmaSt = typename Traits::MmaSt;
  using ShapeSt = typename Traits::ShapeSt;
  static constexpr int kBlockM = Traits::kBlockM;

 public:
  using TileMask = Mask<kMask, UnpackedRows>;
  // Whether they are loaded ahead of the wait for S. Where scores change, and at head dim 96, ptxas
  // would spill.
  static constexpr bool kLoadsLseEarly = kMask != MaskKind::kScored && Traits::kHeadDim != 96;

  // `key0`: the warpgroup's first.
  CUTE_DEVICE TransposedScores(const BwdParams& params, const Sequence& sequence, int key0)
      : params_(params), sequence_(sequence), key0_(key0) {}

  // MaskKind::kScored: changes S of the query rows from `row0` on, of a head. `derivatives`: of
  // the changed scores by S, but for the scale.
  template <class S, class Derivatives>
  CUTE_DEVICE void change(int batch, int head, int row0, S& tSrS, Derivatives& derivatives) const {
    auto scores = rows_first(tSrS);
    const int thread = platform::rematerialize(hopper::thread_in_warpgroup());
    using Element = typename Traits::Element;
    const ScoreMod<Element, Traits::kReadsBias, true, true> score_mod(params_, sequence_, batch);
    score_mod.apply(scores, rows_first(derivatives), row_and_key(thread), row_and_key(0), row0,
                    key0_, [&](int row) { return PackGqa::HeadAndQuery{head, row}; });
  }

  // The log-sum-exps of this thread's rows, for to_weights.
  using Lse = decltype(cute::make_tensor<float>(cute::Int<kBlockM / 4>{}));
  CUTE_DEVICE Lse lse_of_rows(const RowGradStats* stats) const {
    using namespace cute;
    Lse lse_log2;
    for_each_row(stats, [&](int c, const RowGradStats& of_row) { lse_log2(c) = of_row.lse_log2; });
    return lse_log2;
  }

  // P from S of the query rows from `row0` on. The mask goes onto the exponent: the weight of a key
  // that its row does not see may be inf.
  template <class S>
  CUTE_DEVICE void to_weights(const Lse& lse_log2, int row0, S& tSrS) const {
    using namespace cute;
    auto weights = as_matrix(tSrS);
    const float scale_log2 = params_.scale.signed_log2();
    CUTE_UNROLL
    for (int c = 0; c < size<1>(weights); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(weights); ++r) {
        weights(r, c) = fmaf(weights(r, c), scale_log2, -lse_log2(c));
        if constexpr (Traits::kReadsBias && kMask == MaskKind::kScored) {
          weights(r, c) = not_above_0(weights(r, c));
        }
      }
    }
    // Made anew: it would hold registers through the loop.
    const TileMask mask(params_, sequence_, UnpackedRows{});
    if (mask.cuts(row0, kBlockM, key0_, Traits::kConsumerKeys)) {
      auto rows = rows_first(tSrS);
      const int thread = platform::rematerialize(hopper::thread_in_warpgroup());
      mask.apply(rows, row_and_key(thread), row_and_key(0), row0, kBlockM, key0_,
                 Traits::kConsumerKeys);
    }
    CUTE_UNROLL
    for (int i = 0; i < size(tSrS); ++i) tSrS(i) = platform::exp2(tSrS(i));
  }

  // dS from dP, in its place.
  template <class P, class Dp>
  CUTE_DEVICE void to_score_gradients(const RowGradStats* stats, P& tSrP, Dp& tSrDp) const {
    using namespace cute;
    const auto weights = as_matrix(tSrP);
    auto ds = as_matrix(tSrDp);
    for_each_row(stats, [&](int c, const RowGradStats& of_row) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(ds); ++r) ds(r, c) = weights(r, c) * (ds(r, c) - of_row.delta);
    });
  }

 private:
  // A fragment as a matrix of (query rows, keys).
  template <class Fragment>
  static CUTE_DEVICE auto rows_first(Fragment& fragment) {
    auto matrix = as_matrix(fragment);
    return make_tensor(matrix.data(), cute::select<1, 0>(matrix.layout()));
  }

  static CUTE_DEVICE auto key_and_row(int thread) {
    return as_matrix(MmaSt{}.get_slice(thread).partition_C(cute::make_identity_tensor(ShapeSt{})));
  }
  // (columns, rows) -> (query row, key), as masks know them
  static CUTE_DEVICE auto row_and_key(int thread) {
    return [at = key_and_row(thread)](int c, int r) {
      const auto key_row = at(r, c);
      return cute::make_coord(cute::get<1>(key_row), cute::get<0>(key_row));
    };
  }

  // f(column of the fragment, statistics) of each query row. Two rows lie side by side.
  template <class F>
  CUTE_DEVICE void for_each_row(const RowGradStats* stats, F&& f) const {
    using namespace cute;
    const auto at = key_and_row(platform::rematerialize(hopper::thread_in_warpgroup()));
    CUTE_UNROLL
    for (int c = 0; c < kBlockM / 4; c += 2) {
      struct alignas(16) Two {
        RowGradStats rows[2];
      };
      const int row = get<1>(at(0, c));
      const Two two = *reinterpret_cast<const Two*>(stats + row);
      f(c, two.rows[0]);
      f(c + 1, two.rows[1]);
    }
  }

  const BwdParams& params_;
  const Sequence& sequence_;
  int key0_;
};

}  // namespace flash_cute::sm90
