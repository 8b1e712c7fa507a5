// The main loop of one consumer of two, which has one gradient of the tile's keys: dV or dK. Both
// walk over the query rows, one block at a time.
//
//   dV: S^T = K Q^T    P^T = 2^(scale_log2 S^T - lse_log2)   dV += P^T dO
//   dK: dP^T = V dO^T  dS^T = P^T * (dP^T - delta)           dK += dS^T Q
//
// P^T goes from the one to the other by shared memory, in fp32: dS is rounded once. While P is
// computed, the tensor cores have dV of the block before. dK is issued ahead of the next dP, and is
// complete before dS. So Q is released early.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/products.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/sums.h"
#include "sm90/bwd/transposed_scores.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"
#include "sm90/shared_operand.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask, bool kIsDv>
class DkvMainloop {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Stage = PipelineState<Traits::kStages>;
  using WeightsStage = PipelineState<Traits::kWeightsStages>;
  using MmaSt = typename Traits::MmaSt;
  using ShapeSt = typename Traits::ShapeSt;
  using Scores = TransposedScores<Traits, kMask>;
  // The gradient's product, and how deep that of S or dP is.
  using MmaDx = std::conditional_t<kIsDv, typename Traits::MmaDv, typename Traits::MmaDk>;
  static constexpr int kDepth = kIsDv ? Traits::kHeadDim : Traits::kHeadDimV;
  static constexpr int kBlockM = Traits::kBlockM;
  static_assert(Traits::kStages >= 2);  // dK's consumer waits for the next dO, then releases Q

 public:
  // Where the consumer is in the pipelines, from one tile to the next.
  struct State {
    Stage stage;           // of Q and dO
    WeightsStage weights;  // of P
    uint32_t kv_parity = 0;
  };

  // For one tile. `state` goes on from the tile before.
  CUTE_DEVICE DkvMainloop(const BwdArguments& arguments, const TileCoord& tile,
                          const Sequence& sequence, SharedMemory& smem, State& state)
      : scores_(arguments.params, sequence, tile.m_block * Traits::kBlockN),
        smem_(smem),
        batch_(tile.batch),
        address_(base_address(Traits::fragment_q(smem.q[0]))),
        stage_(state.stage),
        weights_(state.weights),
        kv_parity_(state.kv_parity) {}

  // Leaves the sums in tdXrdX, ((2, 2, columns / 8), 1, 1).
  template <class Dx>
  CUTE_DEVICE void run(const QueryWalk& walk, Dx& tdXrdX) {
    using namespace cute;
    clear(tdXrdX);
    warpgroup_fence_operand(tdXrdX);  // ahead of the first products, or ptxas serializes them
    if (walk.is_empty()) return;
    auto tSrS = partition_fragment_C(MmaSt{}, ShapeSt{});  // S or dP; ((2, 2, kBlockM / 8), 1, 1)
    // P or dS, two elements a word; as elements, ((2, 2, kBlockM / 8), 1, 1).
    auto words = make_tensor<uint32_t>(Int<decltype(size(tSrS))::value / 2>{});
    auto tSrP = make_tensor(recast_ptr<Element>(words.data()), tSrS.layout());

    (kIsDv ? smem_.k_full : smem_.v_full).wait(kv_parity_);  // K or V has arrived
    kv_parity_ ^= 1;
    QueryBlock block = walk.first();
    Stage before;                            // whose product of the gradient is in flight
    first_full(stage_).wait(stage_.parity);  // Q or dO has arrived
    gemm_ss<kDepth>(MmaSt{}, key_operand(), first_operand(), tSrS);
    typename Scores::OfRows lse;  // kIsDv: of the next block
    if constexpr (kIsDv && Scores::kLoadsLseEarly) {
      lse = scores_.lse_of_rows(smem_.stats[stage_.stage]);
    }
    bool is_cut = kIsDv && scores_.is_cut(block.m_block * kBlockM);
    hopper::wgmma_wait<0>();  // S or dP is complete
    CUTE_NO_UNROLL
    for (bool is_first = true;; is_first = false) {
      const QueryBlock next = walk.next(block);  // early: it reads shared memory
      const bool is_last = !walk.has(next);
      // Or ptxas makes each descriptor ahead of the loop, and has no registers for them.
      address_ = platform::rematerialize(address_, block.m_block);
      warpgroup_fence_operand(tSrS);
      if constexpr (kIsDv) {
        if constexpr (kMask == MaskKind::kScored) {
          auto derivatives = make_fragment_like<Derivative<Element>>(tSrS);
          scores_.change(batch_, block.head, block.m_block * kBlockM, tSrS, derivatives);
          scores_.to_weights(scores_.lse_of_rows(smem_.stats[stage_.stage]),
                             block.m_block * kBlockM, is_cut, tSrS);
          auto products = make_fragment_like(tSrS);  // of which dS is one with dP - delta
          CUTE_UNROLL
          for (int i = 0; i < size(tSrS); ++i) products(i) = tSrS(i) * float(derivatives(i));
          hand_over(products);
        } else {
          scores_.to_weights(lse, block.m_block * kBlockM, is_cut, tSrS);
          hand_over(tSrS);
        }
        // S is complete, and P handed over: done with Q.
        hopper::arrive_of_warp(smem_.q_empty[stage_.stage], /*after_accesses=*/true);
      } else {
        hopper::arrive_of_warp(smem_.dout_empty[stage_.stage]);  // dP is complete: done with dO
        // It waits for P, and for the statistics, which came with Q.
        to_score_gradients(tSrS);
      }
      if constexpr (kIsDv) {
        hopper::wgmma_wait<0>();  // dV of the block before is complete
        warpgroup_fence_operand(tdXrdX);
        if (!is_first) release_second(before);
      }
      convert_to_words<Element>(tSrS, words);
      const auto second = second_operand();
      before = stage_;
      stage_.advance();
      block = next;
      if (is_last) {
        second_full(before).wait(before.parity);  // dO or Q has arrived
        gemm_rs(MmaDx{}, tSrP, second, tdXrdX);
        break;
      }
      if constexpr (kIsDv) {
        first_full(stage_).wait(stage_.parity);  // Q has arrived
        gemm_ss<kDepth>(MmaSt{}, key_operand(), first_operand(), tSrS);
        second_full(before).wait(before.parity);  // dO has arrived
        gemm_rs(MmaDx{}, tSrP, second, tdXrdX);
        if constexpr (Scores::kLoadsLseEarly) lse = scores_.lse_of_rows(smem_.stats[stage_.stage]);
        is_cut = scores_.is_cut(block.m_block * kBlockM);
        hopper::wgmma_wait<1>();  // S is complete
      } else {
        // Q has arrived: statistics came with it.
        gemm_rs(MmaDx{}, tSrP, second, tdXrdX);
        first_full(stage_).wait(stage_.parity);  // dO has arrived
        gemm_ss<kDepth>(MmaSt{}, key_operand(), first_operand(), tSrS);
        hopper::wgmma_wait<1>();  // dK is complete
        warpgroup_fence_operand(tdXrdX);
        release_second(before);
        hopper::wgmma_wait<0>();  // dP is complete
      }
    }
    hopper::wgmma_wait<0>();  // the gradient is complete
    warpgroup_fence_operand(tdXrdX);
    release_second(before);
    hopper::arrive_of_warp(smem_.kv_empty);  // done with K or V of this tile
  }

 private:
  // -- what the loop calls first and second: Q and dO, or dO and Q --------------------------------

  CUTE_DEVICE hopper::Barrier& first_full(Stage state) {
    return (kIsDv ? smem_.q_full : smem_.dout_full)[state.stage];
  }
  CUTE_DEVICE hopper::Barrier& second_full(Stage state) {
    return (kIsDv ? smem_.dout_full : smem_.q_full)[state.stage];
  }
  CUTE_DEVICE void release_second(Stage state) {
    if constexpr (kIsDv) {
      hopper::arrive_of_warp(smem_.dout_empty[state.stage]);
    } else {
      hopper::sync_warp();  // all lanes have read the statistics
      hopper::arrive_of_warp(smem_.q_empty[state.stage], /*after_accesses=*/true);
    }
  }
  template <class Fragment>
  CUTE_DEVICE auto operand(const Fragment& fragment, const Element* tile) const {
    return operand_at(fragment, tile, smem_.q[0], address_);
  }
  CUTE_DEVICE auto key_operand() const {
    if constexpr (kIsDv) {
      return operand(Traits::fragment_k(smem_.k), smem_.k);
    } else {
      return operand(Traits::fragment_v(smem_.v), smem_.v);
    }
  }
  CUTE_DEVICE auto first_operand() const {
    if constexpr (kIsDv) {
      return operand(Traits::fragment_q(smem_.q[0]), smem_.q[stage_.stage]);
    } else {
      return operand(Traits::fragment_dout(smem_.dout[0]), smem_.dout[stage_.stage]);
    }
  }
  CUTE_DEVICE auto second_operand() const {
    if constexpr (kIsDv) {
      return operand(Traits::fragment_doutt(smem_.dout[0]), smem_.dout[stage_.stage]);
    } else {
      return operand(Traits::fragment_qt(smem_.q[0]), smem_.q[stage_.stage]);
    }
  }

  // -- the weights, from one consumer to the other ------------------------------------------------

  template <class P>
  CUTE_DEVICE void hand_over(const P& tSrP) {
    // P of two blocks before has been read.
    smem_.weights_empty[weights_.stage].wait(weights_.parity ^ 1);
    WarpgroupSums::store_to_shared(smem_.weights[weights_.stage], tSrP);
    hopper::sync_warp();
    hopper::arrive_of_warp(smem_.weights_full[weights_.stage], /*after_accesses=*/true);
    weights_.advance();
  }

  // dS from dP, in its place.
  template <class Dp>
  CUTE_DEVICE void to_score_gradients(Dp& tSrDp) {
    using namespace cute;
    auto tSrP = make_tensor<float>(tSrDp.layout());
    hopper::Barrier& q_full = smem_.q_full[stage_.stage];
    const bool has_q = q_full.is_over(stage_.parity);          // early: an answer takes long
    smem_.weights_full[weights_.stage].wait(weights_.parity);  // P is there
    q_full.wait(stage_.parity, has_q);                         // so are the statistics
    WarpgroupSums::load_from_shared(smem_.weights[weights_.stage], tSrP);
    const auto delta = scores_.delta_of_rows(smem_.stats[stage_.stage]);
    hopper::sync_warp();
    hopper::arrive_of_warp(smem_.weights_empty[weights_.stage], /*after_accesses=*/true);
    weights_.advance();
    scores_.to_score_gradients(delta, tSrP, tSrDp);
  }

  Scores scores_;
  SharedMemory& smem_;
  int batch_;
  int address_;  // of smem_.q, as SharedOperand counts
  Stage& stage_;
  WeightsStage& weights_;
  uint32_t& kv_parity_;
};

}  // namespace flash_cute::sm90
