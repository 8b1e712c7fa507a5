// A consumer's main loop along a stretch (Stretch). It has every second block of keys, the other
// consumer those between. With each it goes through the three blocks of rows that see it, as a
// consumer of one pass does (BwdMainloop). Numbers (i, j) are of blocks of keys and rows:
//
//   consumer 0   (2, 0) (2, 1) (2, 2) | dK dV of 2, (4, 2) (4, 3) (4, 4) | dK dV of 4, (6, 4) ..
//   consumer 1          (3, 1) (3, 2)   (3, 3) | dK dV of 3, (5, 3) (5, 4)  (5, 5) | ..
//
// dQ of rows j is whole once (j, j), (j + 1, j) and (j + 2, j) are there. Who has the first and the
// last of them computes it, amid (j + 2, j + 1).
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/gradient.h"
#include "common/platform.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/products.h"
#include "sm90/bwd/transposed_scores.h"
#include "sm90/bwd/window/store.h"
#include "sm90/bwd/window/stretch.h"
#include "sm90/hopper.h"
#include "sm90/shared_operand.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class WindowMainloop {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using MmaSt = typename Traits::MmaSt;
  using MmaDq = typename Traits::MmaDq;
  using ShapeSt = typename Traits::ShapeSt;
  using Scores = TransposedScores<Traits, kMask>;
  static constexpr int kBlock = Stretch::kBlock;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kKStages = Traits::kKStages;
  static constexpr int kSpan = Traits::kSpan;
  static_assert(kStages == 2 && Traits::kConsumers == 2 && kSpan == 3);

 public:
  CUTE_DEVICE WindowMainloop(const BwdArguments& arguments, const BwdArguments::PlacedTile& tile,
                             const Stretch& stretch, SharedMemory& smem, int consumer)
      : arguments_(arguments),
        params_(arguments.params),
        tile_(tile),
        stretch_(stretch),
        smem_(smem),
        consumer_(consumer),
        address_(base_address(Traits::fragment_q(smem.q[0]))) {}

  CUTE_DEVICE void run() {
    using namespace cute;
    // No dQ of this consumer reads the first block of keys, which is the other's.
    if (consumer_ == 1) hopper::arrive_of_warp(smem_.k_empty[0]);
    // ((2, 2, kHeadDim / 8), 1, 1)
    auto tdKrdK = partition_fragment_C(typename Traits::MmaDk{}, typename Traits::ShapeDk{});
    auto tdVrdV = partition_fragment_C(typename Traits::MmaDv{}, typename Traits::ShapeDv{});
    CUTE_NO_UNROLL
    for (int i = consumer_; i < stretch_.keys(); i += Traits::kConsumers) {
      clear(tdKrdK);
      clear(tdVrdV);
      const int begin = max(i - Stretch::kMore, 0), end = min(i + 1, stretch_.reading);
      const Scores scores(params_, tile_.sequence, stretch_.key0(i));
      smem_.k_full[i % kKStages].wait(i / kKStages % 2);  // K has arrived
      CUTE_NO_UNROLL
      for (int j = begin; j < end; ++j) {
        if (is_seen(i, j)) {
          step(scores, i, j, tdKrdK, tdVrdV);
        } else {
          step_over(i, j);
        }
      }
      // The rows end ahead of the step that makes it.
      if (end < i && i >= Stretch::kMore) make_dq(i - Stretch::kMore);
      if (stretch_.owns_keys(i)) store_keys(i, tdKrdK, tdVrdV);
    }
  }

 private:
  // Whether any of rows j sees any of keys i.
  CUTE_DEVICE bool is_seen(int i, int j) const {
    return stretch_.has_keys(i) && j + Stretch::kMore - i <= arguments_.window.reach();
  }
  // Whether dQ of the block of rows before is due in this step.
  static CUTE_DEVICE bool makes_dq(int i, int j) { return j == i - 1 && i >= Stretch::kMore; }

  template <class Dk, class Dv>
  CUTE_DEVICE void step(const Scores& scores, int i, int j, Dk& tdKrdK, Dv& tdVrdV) {
    using namespace cute;
    const int stage = j % kStages;
    const uint32_t parity = j / kStages % 2;
    auto tSrS = partition_fragment_C(MmaSt{}, ShapeSt{});   // ((2, 2, kBlock / 8), 1, 1)
    auto tSrDp = partition_fragment_C(MmaSt{}, ShapeSt{});  // ((2, 2, kBlock / 8), 1, 1)
    // P and dS, two elements a word; as elements, ((2, 2, kBlock / 8), 1, 1).
    using Words = decltype(make_tensor<uint32_t>(Int<decltype(size(tSrS))::value / 2>{}));
    Words p_words, ds_words;
    auto tSrP = make_tensor(recast_ptr<Element>(p_words.data()), tSrS.layout());
    auto tSrDs = make_tensor(recast_ptr<Element>(ds_words.data()), tSrS.layout());

    smem_.q_full[stage].wait(parity);  // Q has arrived
    gemm_ss<Traits::kHeadDim>(MmaSt{}, k_operand(i), q_operand(stage), tSrS);
    const auto lse = scores.lse_of_rows(smem_.stats[stage]);
    const int row0 = stretch_.row0(j);
    const bool is_cut = scores.is_cut(row0);
    smem_.v_full[consumer_].wait(i / Traits::kConsumers % 2);  // V has arrived
    smem_.dout_full[stage].wait(parity);                       // so has dO
    gemm_ss<Traits::kHeadDim>(MmaSt{}, v_operand(), dout_operand(stage), tSrDp);
    hopper::wgmma_wait<1>();  // S is complete
    warpgroup_fence_operand(tSrS);
    scores.to_weights(lse, row0, is_cut, tSrS);
    convert_to_words<Element>(tSrS, p_words);
    const bool is_ds_empty = smem_.ds_empty[stage].is_over(parity ^ 1);
    hopper::wgmma_wait<0>();  // dP is complete
    warpgroup_fence_operand(tSrDp);
    if (j == i) hopper::arrive_of_warp(smem_.v_empty[consumer_]);
    scores.to_score_gradients(scores.delta_of_rows(smem_.stats[stage]), tSrS, tSrDp);
    convert_to_words<Element>(tSrDp, ds_words);

    gemm_rs(typename Traits::MmaDv{}, tSrP, doutt_operand(stage), tdVrdV);
    smem_.ds_empty[stage].wait(parity ^ 1, is_ds_empty);  // fault: window-ds-empty
    store_shared(ds_words, i, j);
    const auto release_dout = [&] {
      warpgroup_fence_operand(tdVrdV);
      if (j < i) hopper::arrive_of_warp(smem_.dout_empty[stage]);
    };
    const auto gemm_dk = [&] {
      gemm_rs(typename Traits::MmaDk{}, tSrDs, qt_operand(stage), tdKrdK);
    };
    if (makes_dq(i, j)) {
      const bool is_ds_full = is_full(j - 1);
      // ((2, 2, kHeadDim / 8), 1, 1)
      auto tdQrdQ = partition_fragment_C(MmaDq{}, typename Traits::ShapeQ{});
      hopper::wgmma_wait<0>();  // dV is complete
      release_dout();
      gemm_dq(j - 1, tdQrdQ, is_ds_full);
      gemm_dk();
      hand_over_ds(stage);
      hopper::wgmma_wait<1>();  // dQ is complete
      store_dq(j - 1, tdQrdQ);  // under dK
    } else {
      gemm_dk();
      hand_over_ds(stage);
      hopper::wgmma_wait<1>();  // dV is complete
      release_dout();
    }
    hopper::wgmma_wait<0>();  // dK is complete
    warpgroup_fence_operand(tdKrdK);
    if (j < i) hopper::arrive_of_warp(smem_.q_empty[stage], /*after_accesses=*/true);
  }

  // A step without products, as none of these rows sees these keys: it hands over a dS of zeros.
  CUTE_DEVICE void step_over(int i, int j) {
    using namespace cute;
    const int stage = j % kStages;
    const uint32_t parity = j / kStages % 2;
    smem_.q_full[stage].wait(parity);
    smem_.dout_full[stage].wait(parity);
    smem_.v_full[consumer_].wait(i / Traits::kConsumers % 2);
    smem_.ds_empty[stage].wait(parity ^ 1);
    // (kBlock / 4), two elements a word
    auto zeros = make_tensor<uint32_t>(Int<decltype(size(ShapeSt{}))::value / 256>{});
    clear(zeros);
    store_shared(zeros, i, j);
    hand_over_ds(stage);  // all lanes are past the waits
    if (j == i) hopper::arrive_of_warp(smem_.v_empty[consumer_]);
    if (j < i) {
      hopper::arrive_of_warp(smem_.dout_empty[stage]);
      hopper::arrive_of_warp(smem_.q_empty[stage], /*after_accesses=*/true);
    }
    if (makes_dq(i, j)) make_dq(j - 1);
  }

  // -- operands ----------------------------------------------------------------------------------

  template <class Fragment>
  CUTE_DEVICE auto operand(const Fragment& fragment, const Element* tile) const {
    return operand_at(fragment, tile, smem_.q[0], address_);
  }
  CUTE_DEVICE auto k_operand(int i) const {
    return operand(Traits::fragment_k(smem_.k[0]), smem_.k[i % kKStages]);
  }
  CUTE_DEVICE auto kt_operand(int i) const {
    return operand(Traits::fragment_kt(smem_.k[0]), smem_.k[i % kKStages]);
  }
  CUTE_DEVICE auto v_operand() const {
    return operand(Traits::fragment_v(smem_.v[0]), smem_.v[consumer_]);
  }
  CUTE_DEVICE auto q_operand(int stage) const {
    return operand(Traits::fragment_q(smem_.q[0]), smem_.q[stage]);
  }
  CUTE_DEVICE auto qt_operand(int stage) const {
    return operand(Traits::fragment_qt(smem_.q[0]), smem_.q[stage]);
  }
  CUTE_DEVICE auto dout_operand(int stage) const {
    return operand(Traits::fragment_dout(smem_.dout[0]), smem_.dout[stage]);
  }
  CUTE_DEVICE auto doutt_operand(int stage) const {
    return operand(Traits::fragment_doutt(smem_.dout[0]), smem_.dout[stage]);
  }
  CUTE_DEVICE auto ds_operand(int i, int j) const {
    return operand(Traits::fragment_ds(smem_.ds[0][0]), smem_.ds[j % kStages][i - j]);
  }

  // -- dS and dQ ---------------------------------------------------------------------------------

  // dS^T in shared memory: a row is a key, with kBlock query rows.
  template <class Words>
  CUTE_DEVICE void store_shared(const Words& words, int i, int j) {
    const int thread = hopper::thread_in_warpgroup_here();
    const int lane = thread % 32;
    const int chunk = thread / 32 * (kBlock / 4) * kBlock +
                      typename Traits::SmemLayoutDst{}(lane % 16, lane / 16 * 8);
    Element* const ds = smem_.ds[j % kStages][i - j];
    CUTE_UNROLL
    for (int column = 0; column < kBlock; column += 16) {
      uint32_t block[4];  // (2 rows, 2 x 8 columns)
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) block[n] = words(column / 4 + n);
      hopper::stmatrix(ds + (chunk ^ column), block);
    }
  }
  CUTE_DEVICE void hand_over_ds(int stage) {
    // Visible to wgmma, once all lanes are here. And all of them have read the statistics.
    hopper::fence_async_proxy();
    hopper::sync_warp();
    hopper::arrive_of_warp(smem_.ds_full[stage]);
  }
  // Whether dS of rows j is there with all that they see.
  CUTE_DEVICE bool is_full(int j) const {
    return smem_.ds_full[j % kStages].is_over(j / kStages % 2);
  }

  // dQ of rows j, with nothing beside it.
  CUTE_DEVICE void make_dq(int j) {
    // ((2, 2, kHeadDim / 8), 1, 1)
    auto tdQrdQ = cute::partition_fragment_C(MmaDq{}, typename Traits::ShapeQ{});
    gemm_dq(j, tdQrdQ, false);
    hopper::wgmma_wait<0>();  // dQ is complete
    store_dq(j, tdQrdQ);
  }
  // Issues it.
  template <class Dq>
  CUTE_DEVICE void gemm_dq(int j, Dq& tdQrdQ, bool is_ds_full) {
    smem_.ds_full[j % kStages].wait(j / kStages % 2, is_ds_full);   // fault: window-ds-full
    smem_.k_full[(j + 1) % kKStages].wait((j + 1) / kKStages % 2);  // the other consumer's keys
    gemm_ss<kBlock>(MmaDq{}, ds_operand(j, j), kt_operand(j), tdQrdQ);
    CUTE_UNROLL
    for (int i = 1; i < kSpan; ++i) {
      gemm_ss<kBlock, true>(MmaDq{}, ds_operand(j + i, j), kt_operand(j + i), tdQrdQ);
    }
  }
  // dQ is complete: releases dS of the rows, and those keys that no dQ of this consumer reads
  // again.
  template <class Dq>
  CUTE_DEVICE void store_dq(int j, Dq& tdQrdQ) {
    warpgroup_fence_operand(tdQrdQ);
    hopper::arrive_of_warp(smem_.ds_empty[j % kStages]);
    hopper::arrive_of_warp(smem_.k_empty[j % kKStages]);        // its own
    hopper::arrive_of_warp(smem_.k_empty[(j + 1) % kKStages]);  // the other's
    const TileCoord& at = tile_.at;
    store_gradient_of_quads<Element>(place_of_dq(params_, tile_.sequence, at.batch, at.head),
                                     stretch_.row0(j), params_.scale.scale, tdQrdQ,
                                     hopper::thread_in_warpgroup_here());
  }

  template <class Dk, class Dv>
  CUTE_DEVICE void store_keys(int i, Dk& tdKrdK, Dv& tdVrdV) {
    const TileCoord& at = tile_.at;
    const Sequence& sequence = tile_.sequence;
    const int thread = hopper::thread_in_warpgroup_here(), key0 = stretch_.key0(i);
    store_gradient_of_quads<Element>(
        {params_.dk, at.batch, at.head, sequence.first_k, sequence.len_k, params_.head_dim}, key0,
        params_.scale.scale, tdKrdK, thread);
    store_gradient_of_quads<Element>(
        {params_.dv, at.batch, at.head, sequence.first_k, sequence.len_k, params_.head_dim_v}, key0,
        1.f, tdVrdV, thread);
  }

  const BwdArguments& arguments_;
  const BwdParams& params_;
  const BwdArguments::PlacedTile& tile_;
  const Stretch& stretch_;
  SharedMemory& smem_;
  int consumer_;
  int address_;  // of smem_.q, as SharedOperand counts
};

}  // namespace flash_cute::sm90
