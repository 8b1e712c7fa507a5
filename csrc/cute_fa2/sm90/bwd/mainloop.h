// A consumer's main loop of one pass: dK and dV of its keys, and dQ's part of the tile, one block
// of query rows at a time. A consumer is a warpgroup with 64 keys. Where dQ has a kernel of its
// own, this one leaves it out.
//
//   S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)    dV += P^T dO
//   dP^T = V dO^T   dS^T = P^T * (dP^T - delta)            dK += dS^T Q     dQ += dS K
//
// The scale goes onto the sums: onto dS, it could leave fp16's range.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/gradient.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/pipeline.h"
#include "sm90/bwd/products.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/store_keys.h"
#include "sm90/bwd/sums.h"
#include "sm90/bwd/transposed_scores.h"
#include "sm90/hopper.h"
#include "sm90/shared_operand.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class BwdMainloop {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Walk = typename Traits::Walk;
  using MmaSt = typename Traits::MmaSt;
  using MmaDq = typename Traits::MmaDq;
  using ShapeSt = typename Traits::ShapeSt;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kConsumers = Traits::kConsumers;
  static_assert(Traits::kStages >= 2);  // a step waits for the next Q, then releases its own
  // Whether a consumer computes nothing where all of its keys are behind the sequence's end. In a
  // dense band few rows see the last tile: there the question costs more than it saves.
  static constexpr bool kStepsOver =
      Traits::kConsumers == 3 && (kMask == MaskKind::kFull || kMask == MaskKind::kPacked);

 public:
  using Scores = TransposedScores<Traits, kMask>;
  using State = typename BwdPipeline<Traits>::ConsumerState;
  using DsState = typename BwdPipeline<Traits>::DsState;
  using StageState = typename BwdPipeline<Traits>::State;

  // For one tile. `state` goes on from the tile before.
  CUTE_DEVICE BwdMainloop(const BwdArguments& arguments, const TileCoord& tile,
                          const Sequence& sequence, SharedMemory& smem, int consumer, State& state)
      : arguments_(arguments),
        params_(arguments.params),
        tile_(tile),
        sequence_(sequence),
        smem_(smem),
        consumer_(consumer),
        scores_(params_, sequence, tile.m_block * kBlockN + consumer * Traits::kConsumerKeys),
        address_(base_address(Traits::fragment_q(smem.q[0]))),
        state_(state) {}

  // Leaves the sums in tdKrdK, ((2, 2, kHeadDim / 8), 1, 1), and tdVrdV, likewise of kHeadDimV.
  template <class Dk, class Dv>
  CUTE_DEVICE void run(const Walk& walk, Dk& tdKrdK, Dv& tdVrdV) {
    using namespace cute;
    clear(tdKrdK);
    clear(tdVrdV);
    KeysStore<Traits, has_sequences(kMask)>::wait_until_read();  // of the tile before
    if (walk.is_empty()) return;
    smem_.k_full.wait(state_.kv_parity);  // K has arrived
    smem_.v_full.wait(state_.kv_parity);  // so has V
    state_.kv_parity ^= 1;
    QueryBlock before{};
    wait_for_rows(false);
    typename Scores::OfRows lse;  // of the next block
    if constexpr (Scores::kLoadsLseEarly)
      lse = scores_.lse_of_rows(smem_.stats[state_.stage.stage]);
    QueryBlock block = walk.first();
    [[maybe_unused]] const int has_keys = scores_.has_keys() ? 1 : 0;
    CUTE_NO_UNROLL
    while (true) {
      QueryBlock next;
      if constexpr (kStepsOver) {
        // The answer is the same for all blocks. Two loops would spill, and one end of the loop for
        // both kinds of step would be slower (notes/sm90_backward.md).
        if (platform::rematerialize(has_keys) == 0) {
          const bool is_last = step_over(walk, block, before, next);
          before = block;
          if (is_last) break;
          block = next;
          continue;
        }
      }
      const bool is_last = step(walk, block, before, next, lse, tdKrdK, tdVrdV);
      before = block;
      if (is_last) break;
      block = next;
    }
    if (dq_consumer_ == consumer_) {
      // ((2, 2, kHeadDim / 8), 1, 1)
      auto tdQrdQ = partition_fragment_C(MmaDq{}, typename Traits::ShapeQ{});
      gemm_dq(tdQrdQ, false);
      wait_until_part_is_read();
      hopper::wgmma_wait<0>();  // dQ is complete
      add_dq(before, tdQrdQ);
    }
    hopper::arrive_of_warp(smem_.kv_empty);  // done with K and V of this tile
  }

  // Behind the last block: this warp's share of where parts of dQ are staged, once the last one has
  // been read. Where none are staged (dq_by), the barrier is new, and nobody waits.
  CUTE_DEVICE Element* wait_for_staging() {
    smem_.dq_empty[consumer_].wait(state_.dq_parity ^ 1);
    constexpr int kSize = decltype(cute::size(typename Traits::ShapeQ{}))::value;
    // dK and dV of 16 bits have the space of a part, which has 32.
    static_assert(Traits::kHeadDim == Traits::kHeadDimV && Traits::kConsumerKeys == kBlockM);
    return reinterpret_cast<Element*>(WarpgroupSums::of_warp<kSize>(smem_.dq[consumer_]));
  }

 private:
  // Whether Q, dO and the statistics of a block have arrived.
  CUTE_DEVICE bool have_rows(const StageState& at) {
    const bool has_q = smem_.q_full[at.stage].is_over(at.parity);
    return smem_.dout_full[at.stage].is_over(at.parity) && has_q;
  }
  // Waits for those of the stage, unless `are_there` says that they have arrived.
  CUTE_DEVICE void wait_for_rows(bool are_there) {
    smem_.q_full[state_.stage.stage].wait(state_.stage.parity, are_there);
    smem_.dout_full[state_.stage.stage].wait(state_.stage.parity, are_there);
  }

  // One block of query rows, and dQ of the block `before`. `lse`, where it is loaded early: of
  // the block; then of the next. `next`: becomes the next block. Returns whether there is none.
  template <class Dk, class Dv>
  CUTE_DEVICE bool step(const Walk& walk, QueryBlock block, QueryBlock before, QueryBlock& next,
                        typename Scores::OfRows& lse, Dk& tdKrdK, Dv& tdVrdV) {
    using namespace cute;
    auto tSrS = partition_fragment_C(MmaSt{}, ShapeSt{});   // ((2, 2, kBlockM / 8), 1, 1)
    auto tSrDp = partition_fragment_C(MmaSt{}, ShapeSt{});  // ((2, 2, kBlockM / 8), 1, 1)
    // P and dS, two elements a word; as elements, ((2, 2, kBlockM / 8), 1, 1).
    using Words = decltype(make_tensor<uint32_t>(Int<decltype(size(tSrS))::value / 2>{}));
    Words p_words, ds_words;
    auto tSrP = make_tensor(recast_ptr<Element>(p_words.data()), tSrS.layout());
    auto tSrDs = make_tensor(recast_ptr<Element>(ds_words.data()), tSrS.layout());

    gemm_ss<Traits::kHeadDim>(MmaSt{}, k_operand(), q_operand(), tSrS);
    const auto gemm_dp = [&] {
      gemm_ss<Traits::kHeadDimV>(MmaSt{}, v_operand(), dout_operand(), tSrDp);
    };
    const int row0 = block.m_block * kBlockM;
    if constexpr (kMask == MaskKind::kScored) {
      // The derivatives have the registers of dP, which comes later.
      auto derivatives = make_fragment_like<Derivative<Element>>(tSrS);
      hopper::wgmma_wait<0>();  // S is complete
      warpgroup_fence_operand(tSrS);
      scores_.change(tile_.batch, block.head, row0, tSrS, derivatives);
      lse = scores_.lse_of_rows(smem_.stats[state_.stage.stage]);
      scores_.to_weights(lse, row0, scores_.is_cut(row0), tSrS);
      convert_to_words<Element>(tSrS, p_words);
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) *= float(derivatives(i));
      gemm_dp();
    } else {
      const bool is_cut = scores_.is_cut(row0);  // under S
      gemm_dp();
      hopper::wgmma_wait<1>();  // S is complete
      warpgroup_fence_operand(tSrS);
      scores_.to_weights(lse, row0, is_cut, tSrS);
      convert_to_words<Element>(tSrS, p_words);
    }
    // Under dP: answers that take long.
    next = walk.next(block);  // it reads shared memory
    const bool is_last = !walk.has(next);
    const bool has_dq = arguments_.dq_by != DqBy::kOwnKernel;
    hopper::Barrier& ds_empty = smem_.ds_empty[state_.ds.stage];
    const bool is_ds_empty = has_dq && ds_empty.is_over(state_.ds.parity ^ 1);
    const int ds_chunk = chunk_of_ds();
    hopper::wgmma_wait<0>();  // dP is complete
    warpgroup_fence_operand(tSrDp);
    scores_.to_score_gradients(scores_.delta_of_rows(smem_.stats[state_.stage.stage]), tSrS, tSrDp);
    convert_to_words<Element>(tSrDp, ds_words);

    gemm_rs(typename Traits::MmaDv{}, tSrP, doutt_operand(), tdVrdV);
    bool is_ds_full = false;  // dS of the step before, of all consumers; asked in vain by most
    if (has_dq) {
      ds_empty.wait(state_.ds.parity ^ 1, is_ds_empty);  // dS of two steps before has been read
      is_ds_full = smem_.ds_full[ds_before().stage].is_over(ds_before().parity);
      store_shared(ds_words, ds_chunk);
    }
    const auto hand_over_ds = [&] {
      // Visible to wgmma, once all lanes are here.
      if (has_dq) hopper::fence_async_proxy();  // fault: bwd90-ds-fence
      hopper::sync_warp();  // all lanes have read the statistics, and written dS
      if (has_dq) hopper::arrive_of_warp(smem_.ds_full[state_.ds.stage]);
    };
    const auto release_dout = [&] {
      warpgroup_fence_operand(tdVrdV);
      hopper::arrive_of_warp(smem_.dout_empty[state_.stage.stage]);
    };
    const auto gemm_dk = [&] { gemm_rs(typename Traits::MmaDk{}, tSrDs, qt_operand(), tdKrdK); };
    StageState next_stage = state_.stage;
    next_stage.advance();
    bool are_there;  // rows of the next block
    // The consumers compute dQ in turns, of the block before: dS of the others is likely there.
    if (dq_consumer_ == consumer_) {
      // ((2, 2, kHeadDim / 8), 1, 1)
      auto tdQrdQ = partition_fragment_C(MmaDq{}, typename Traits::ShapeQ{});
      hopper::wgmma_wait<0>();  // dV is complete: ptxas has no registers for it beside dQ
      release_dout();
      gemm_dq(tdQrdQ, is_ds_full);
      gemm_dk();
      hand_over_ds();
      wait_until_part_is_read();
      hopper::wgmma_wait<1>();  // dQ is complete
      are_there = have_rows(next_stage);
      add_dq(before, tdQrdQ);  // under dK
    } else {
      gemm_dk();
      are_there = have_rows(next_stage);
      hand_over_ds();
      hopper::wgmma_wait<1>();  // dV is complete
      release_dout();
    }
    const int stage = state_.stage.stage;
    state_.stage = next_stage;
    if (!is_last) {  // under dK
      wait_for_rows(are_there);
      if constexpr (Scores::kLoadsLseEarly)
        lse = scores_.lse_of_rows(smem_.stats[state_.stage.stage]);
    }
    hopper::wgmma_wait<0>();  // dK is complete
    warpgroup_fence_operand(tdKrdK);
    hopper::arrive_of_warp(smem_.q_empty[stage], /*after_accesses=*/true);
    if (has_dq) {
      state_.ds.advance();
      if (++dq_consumer_ == kConsumers) dq_consumer_ = 0;
    }
    return is_last;
  }

  // A step of a consumer whose keys are all behind the sequence's end: it hands over a dS of zeros.
  // No wgmma is in flight from one step to the next, so there may be a branch around it.
  CUTE_DEVICE bool step_over(const Walk& walk, QueryBlock block, QueryBlock before,
                             QueryBlock& next) {
    using namespace cute;
    hopper::sync_warp();  // all lanes have read the statistics, and are past the waits for the rows
    hopper::arrive_of_warp(smem_.dout_empty[state_.stage.stage]);  // done with dO, unread, and Q
    hopper::arrive_of_warp(smem_.q_empty[state_.stage.stage], /*after_accesses=*/true);
    if (arguments_.dq_by != DqBy::kOwnKernel) {
      smem_.ds_empty[state_.ds.stage].wait(state_.ds.parity ^ 1);  // dS of two steps before is read
      // (kBlockM / 4), two elements a word
      auto zeros = make_tensor<uint32_t>(Int<decltype(size(ShapeSt{}))::value / 256>{});
      clear(zeros);
      store_shared(zeros, chunk_of_ds());
      hopper::fence_async_proxy();  // visible to wgmma of all consumers, once all lanes are here
      hopper::sync_warp();
      hopper::arrive_of_warp(smem_.ds_full[state_.ds.stage]);
      if (dq_consumer_ == consumer_) {  // as in run: a function for both would be slower
        // ((2, 2, kHeadDim / 8), 1, 1)
        auto tdQrdQ = partition_fragment_C(MmaDq{}, typename Traits::ShapeQ{});
        gemm_dq(tdQrdQ, false);
        wait_until_part_is_read();
        hopper::wgmma_wait<0>();  // dQ is complete
        add_dq(before, tdQrdQ);
      }
      state_.ds.advance_of_two();
      if (++dq_consumer_ == kConsumers) dq_consumer_ = 0;
    }
    state_.stage.advance_of_two();
    next = walk.next(block);
    if (!walk.has(next)) return true;
    wait_for_rows(false);
    return false;
  }

  // -- products ----------------------------------------------------------------------------------

  template <class Fragment>
  CUTE_DEVICE auto operand(const Fragment& fragment, const Element* tile) const {
    return operand_at(fragment, tile, smem_.q[0], address_);
  }
  CUTE_DEVICE auto k_operand() const {
    return operand(Traits::fragment_k(smem_.k),
                   smem_.k + consumer_ * Traits::kConsumerKeys * Traits::kStrip);
  }
  CUTE_DEVICE auto v_operand() const {
    return operand(Traits::fragment_v(smem_.v),
                   smem_.v + consumer_ * Traits::kConsumerKeys * Traits::kStripV);
  }
  CUTE_DEVICE auto q_operand() const {
    return operand(Traits::fragment_q(smem_.q[0]), smem_.q[state_.stage.stage]);
  }
  CUTE_DEVICE auto dout_operand() const {
    return operand(Traits::fragment_dout(smem_.dout[0]), smem_.dout[state_.stage.stage]);
  }
  CUTE_DEVICE auto qt_operand() const {
    return operand(Traits::fragment_qt(smem_.q[0]), smem_.q[state_.stage.stage]);
  }
  CUTE_DEVICE auto doutt_operand() const {
    return operand(Traits::fragment_doutt(smem_.dout[0]), smem_.dout[state_.stage.stage]);
  }
  CUTE_DEVICE auto ds_operand(int stage) const {
    return operand(Traits::fragment_ds(smem_.ds[0]), smem_.ds[stage]);
  }
  CUTE_DEVICE auto kt_operand() const { return operand(Traits::fragment_kt(smem_.k), smem_.k); }

  // -- dS and dQ ----------------------------------------------------------------------------------

  // Where dS of the block before is.
  CUTE_DEVICE DsState ds_before() const {
    static_assert(Traits::kDsStages == 2);
    const int stage = state_.ds.stage ^ 1;
    return {stage, state_.ds.parity ^ static_cast<uint32_t>(stage)};
  }

  // Issues dQ of the block before.
  template <class Dq>
  CUTE_DEVICE void gemm_dq(Dq& tdQrdQ, bool is_ds_full) {
    const DsState ds = ds_before();
    smem_.ds_full[ds.stage].wait(ds.parity, is_ds_full);  // dS of all; fault: bwd90-ds-full
    gemm_ss<kBlockN>(MmaDq{}, ds_operand(ds.stage), kt_operand(), tdQrdQ);
  }

  // dS^T in shared memory: a row is a key, with kBlockM query rows. Where this lane's chunk of
  // columns 0 to 15 lies; `chunk ^ column` is that of later columns.
  CUTE_DEVICE int chunk_of_ds() const {
    constexpr int kWarpKeys = Traits::kConsumerKeys / 4;
    const int thread = hopper::thread_in_warpgroup_here();
    const int lane = thread % 32;
    return (consumer_ * Traits::kConsumerKeys + thread / 32 * kWarpKeys) * kBlockM +
           typename Traits::SmemLayoutDst{}(lane % 16, lane / 16 * 8);
  }
  template <class Words>
  CUTE_DEVICE void store_shared(const Words& words, int chunk) {
    CUTE_UNROLL
    for (int column = 0; column < kBlockM; column += 16) {
      uint32_t block[4];  // (2 rows, 2 x 8 columns)
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) block[i] = words(column / 4 + i);
      hopper::stmatrix(smem_.ds[state_.ds.stage] + (chunk ^ column), block);
    }
  }

  // Ahead of add_dq: the part of dQ that this consumer has staged before has been read.
  CUTE_DEVICE void wait_until_part_is_read() {
    if (arguments_.dq_by == DqBy::kTile) return;
    smem_.dq_empty[consumer_].wait(state_.dq_parity ^ 1);
    state_.dq_parity ^= 1;
  }

  // Releases dS of the block before, whose dQ is complete. Hands this tile's part of dQ to who adds
  // it (DqAdder), or stores it where it is the whole.
  template <class Dq>
  CUTE_DEVICE void add_dq(QueryBlock block, Dq& tdQrdQ) {
    warpgroup_fence_operand(tdQrdQ);
    hopper::arrive_of_warp(smem_.ds_empty[ds_before().stage]);
    if (arguments_.dq_by == DqBy::kTile) {
      return store_gradient<Element, MmaDq, typename Traits::ShapeQ>(
          place_of_dq(params_, sequence_, tile_.batch, block.head), block.m_block * kBlockM,
          params_.scale.scale, tdQrdQ, hopper::thread_in_warpgroup());
    }
    constexpr bool kShuffles =
        kMask == MaskKind::kScored && Traits::kHeadDim == 128;  // or it spills
    WarpgroupSums::store_to_shared<kShuffles>(smem_.dq[consumer_], tdQrdQ);
    // Visible to the bulk copy, once all lanes are here.
    hopper::fence_async_proxy();
    hopper::sync_warp();
    hopper::arrive_of_warp(smem_.dq_full[consumer_], /*after_accesses=*/true);
  }

  const BwdArguments& arguments_;
  const BwdParams& params_;
  const TileCoord& tile_;
  const Sequence& sequence_;
  SharedMemory& smem_;
  int consumer_;
  Scores scores_;
  int address_;  // of smem_.q, as SharedOperand counts
  State& state_;
  static constexpr int kNobody = -1;
  // Whose turn it is to compute dQ of the block before: nobody's in a tile's first step, then that
  // of consumers 0, 1, .. (DqAdder::run counts likewise).
  int dq_consumer_ = kNobody;
};

}  // namespace flash_cute::sm90
