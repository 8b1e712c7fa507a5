// P^T and dS^T of 64 keys of a warpgroup: (rows, columns) of a fragment are (keys, query rows). The
// statistics of a query row come from shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/row_grad_stats.h"
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
  // Whether log-sum-exps are loaded ahead of the wait for S. Where scores change, ptxas would
  // spill.
  static constexpr bool kLoadsLseEarly = kMask != MaskKind::kScored;

  // `key0`: the warpgroup's first.
  CUTE_DEVICE TransposedScores(const BwdParams& params, const Sequence& sequence, int key0)
      : params_(params), sequence_(sequence), key0_(key0) {
    if constexpr (kMask != MaskKind::kFull) {
      const TileMask mask(params_, sequence_, UnpackedRows{});
      uncut_ = mask.uncut_origins(kBlockM, key0_, Traits::kConsumerKeys);
    }
  }

  // MaskKind::kScored: changes S of the query rows from `row0` on, of a head. `derivatives`: of
  // the changed scores by S, but for the scale.
  template <class S, class Derivatives>
  CUTE_DEVICE void change(int batch, int head, int row0, S& tSrS, Derivatives& derivatives) const {
    auto scores = rows_first(tSrS);
    const int thread = hopper::thread_in_warpgroup_here();
    using Element = typename Traits::Element;
    const ScoreMod<Element, Traits::kReadsBias, true, true> score_mod(params_, sequence_, batch);
    score_mod.apply(scores, rows_first(derivatives), row_and_key(thread), row_and_key(0), row0,
                    key0_, [&](int row) { return PackGqa::HeadAndQuery{head, row}; });
  }

  // Of this thread's rows: the log-sum-exps, for to_weights; delta, for to_score_gradients.
  using OfRows = decltype(cute::make_tensor<float>(cute::Int<kBlockM / 4>{}));
  CUTE_DEVICE OfRows lse_of_rows(const TwoRowGradStats* stats) const {
    return of_rows(stats, &TwoRowGradStats::lse_log2);
  }
  CUTE_DEVICE OfRows delta_of_rows(const TwoRowGradStats* stats) const {
    return of_rows(stats, &TwoRowGradStats::delta);
  }

  // Whether the mask hides any key of this tile from the kBlockM query rows from `row0` on. Asked
  // ahead of the wait for S.
  CUTE_DEVICE bool is_cut(int row0) const {
    if constexpr (kMask == MaskKind::kFull) {
      const TileMask mask(params_, sequence_, UnpackedRows{});
      return mask.cuts(row0, kBlockM, key0_, Traits::kConsumerKeys);
    } else {
      return row0 < uncut_.begin || row0 >= uncut_.end;
    }
  }

  // Whether the sequence reaches into these keys.
  CUTE_DEVICE bool has_keys() const { return key0_ < sequence_.key_end; }

  // P from S of the query rows from `row0` on; `is_cut`: of the same rows. The mask goes onto the
  // exponent: the weight of a key that its row does not see may be inf.
  template <class S>
  CUTE_DEVICE void to_weights(const OfRows& lse_log2, int row0, bool is_cut, S& tSrS) const {
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
    if (is_cut) {
      const TileMask mask(params_, sequence_, UnpackedRows{});  // anew: it would hold registers
      auto rows = rows_first(tSrS);
      const int thread = hopper::thread_in_warpgroup_here();
      mask.apply(rows, row_and_key(thread), row_and_key(0), row0, kBlockM, key0_,
                 Traits::kConsumerKeys);
    }
    CUTE_UNROLL
    for (int i = 0; i < size(tSrS); ++i) tSrS(i) = platform::exp2(tSrS(i));
  }

  // dS from dP, in its place.
  template <class P, class Dp>
  CUTE_DEVICE void to_score_gradients(const OfRows& delta, P& tSrP, Dp& tSrDp) const {
    using namespace cute;
    const auto weights = as_matrix(tSrP);
    auto ds = as_matrix(tSrDp);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(ds); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(ds); ++r) ds(r, c) = weights(r, c) * (ds(r, c) - delta(c));
    }
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

  // One number of each query row of this thread. Two rows lie side by side.
  CUTE_DEVICE OfRows of_rows(const TwoRowGradStats* stats,
                             float (TwoRowGradStats::*number)[2]) const {
    using namespace cute;
    const auto at = key_and_row(hopper::thread_in_warpgroup_here());
    OfRows numbers;
    CUTE_UNROLL
    for (int c = 0; c < size(numbers); c += 2) {
      struct alignas(8) Two {
        float rows[2];
      };
      const TwoRowGradStats& of_two = stats[get<1>(at(0, c)) / 2];
      const Two two = reinterpret_cast<const Two&>(of_two.*number);
      numbers(c) = two.rows[0];
      numbers(c + 1) = two.rows[1];
    }
    return numbers;
  }

  const BwdParams& params_;
  const Sequence& sequence_;
  int key0_;
  // Where blocks of rows begin that the mask does not cut: asked in each step, and so computed
  // once.
  BlockRange uncut_;
};

}  // namespace flash_cute::sm90
