// A consumer's main loop for dQ: its 64 query rows, one block of keys at a time.
//
//   S = Q K^T     P = 2^(scale_log2 S - lse_log2)
//   dP = dO V^T   dS = P * (dP - delta)              dQ += dS K
//
// While the warpgroup computes P of a block, the tensor cores have its dP; before, dQ of the block
// before and its S.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/row_grad_stats.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/products.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"
#include "sm90/shared_operand.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class DqMainloop {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using MmaS = typename Traits::MmaS;
  using MmaDq = typename Traits::MmaDq;
  using ShapeS = typename Traits::ShapeS;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kRows = Traits::kConsumerRows;

 public:
  using TileMask = Mask<kMask, UnpackedRows>;

  CUTE_DEVICE DqMainloop(const BwdArguments& arguments, TileCoord tile, const Sequence& sequence,
                         int first_index, SharedMemory& smem, int consumer)
      : params_(arguments.params),
        tile_(tile),
        mask_(params_, sequence, UnpackedRows{}),
        sequence_(sequence),
        first_index_(first_index),
        smem_(smem),
        consumer_(consumer),
        row0_(tile.m_block * Traits::kBlockM + consumer * kRows),
        address_(base_address(Traits::fragment_q(smem.q[0]))) {}

  // The blocks of keys that any of the rows [row0, row0 + rows) sees.
  static CUTE_DEVICE BlockRange visible(const TileMask& mask, const Sequence& sequence, int row0,
                                        int rows) {
    const int row_end = cute::min(row0 + rows, sequence.len_q);
    return row_end > row0 ? mask.visible_blocks(row0, row_end, kBlockN) : BlockRange{0, 0};
  }

  // Leaves the sums in tdQrdQ, ((2, 2, kHeadDim / 8), 1, 1). `keys`: the blocks of the tile.
  template <class Dq>
  CUTE_DEVICE void run(BlockRange keys, Dq& tdQrdQ) {
    using namespace cute;
    clear(tdQrdQ);
    warpgroup_fence_operand(tdQrdQ);  // ahead of the first products, or ptxas serializes them
    const BlockRange own = visible(mask_, sequence_, row0_, kRows);
    if (own.end <= own.begin) return skip(keys.end - keys.begin);
    skip(keys.end - own.end);
    smem_.q_full.wait(0);     // Q has arrived
    smem_.dout_full.wait(0);  // so has dO
    load_statistics();

    auto tSrS = partition_fragment_C(MmaS{}, ShapeS{});   // ((2, 2, kBlockN / 8), 1, 1)
    auto tSrDp = partition_fragment_C(MmaS{}, ShapeS{});  // ((2, 2, kBlockN / 8), 1, 1)
    // dS, two elements a word; as elements, ((2, 2, kBlockN / 8), 1, 1).
    auto words = make_tensor<uint32_t>(Int<decltype(size(tSrS))::value / 2>{});
    auto tSrDs = make_tensor(recast_ptr<Element>(words.data()), tSrS.layout());

    smem_.k_full[k_.stage].wait(k_.parity);  // K has arrived
    gemm_ss<Traits::kHeadDim>(MmaS{}, q_operand(), k_operand(), tSrS);
    smem_.v_full[v_.stage].wait(v_.parity);  // V has arrived
    gemm_ss<Traits::kHeadDimV>(MmaS{}, dout_operand(), v_operand(), tSrDp);
    hopper::wgmma_wait<1>();  // S is complete
    int before = -1;          // the stage of K whose dQ is in flight
    CUTE_NO_UNROLL
    for (int n_block = own.end - 1;; --n_block) {
      // Or ptxas makes each descriptor ahead of the loop, and has no registers for them.
      address_ = platform::rematerialize(address_, n_block);
      warpgroup_fence_operand(tSrS);
      to_weights(n_block * kBlockN, tSrS);
      hopper::wgmma_wait<0>();  // dP is complete
      warpgroup_fence_operand(tSrDp);
      release(smem_.v_empty[v_.stage]);
      v_.advance();
      to_score_gradients(tSrS, tSrDp);
      convert_to_words<Element>(tSrDp, words);
      const auto kt = kt_operand();
      before = k_.stage;
      k_.advance();
      gemm_rs(MmaDq{}, tSrDs, kt, tdQrdQ);
      if (n_block == own.begin) break;
      smem_.k_full[k_.stage].wait(k_.parity);  // K has arrived
      gemm_ss<Traits::kHeadDim>(MmaS{}, q_operand(), k_operand(), tSrS);
      smem_.v_full[v_.stage].wait(v_.parity);  // V has arrived
      gemm_ss<Traits::kHeadDimV>(MmaS{}, dout_operand(), v_operand(), tSrDp);
      hopper::wgmma_wait<1>();  // S is complete, and dQ
      warpgroup_fence_operand(tdQrdQ);
      release(smem_.k_empty[before]);
    }
    hopper::wgmma_wait<0>();  // dQ is complete
    warpgroup_fence_operand(tdQrdQ);
    release(smem_.k_empty[before]);
    skip(own.begin - keys.begin);
  }

 private:
  // Blocks that this consumer has no use for. All lanes have to be past a wait before the stage is
  // released: a lane that looked only later could see the next phase, and wait for ever.
  CUTE_DEVICE void skip(int blocks) {
    CUTE_NO_UNROLL
    for (int i = 0; i < blocks; ++i) {
      smem_.k_full[k_.stage].wait(k_.parity);  // the block has arrived, though nobody reads it
      smem_.v_full[v_.stage].wait(v_.parity);
      hopper::sync_warp();
      release(smem_.k_empty[k_.stage]);
      release(smem_.v_empty[v_.stage]);
      k_.advance();
      v_.advance();
    }
  }

  static CUTE_DEVICE void release(hopper::Barrier& empty) { hopper::arrive_of_warp(empty); }

  // -- operands ----------------------------------------------------------------------------------

  template <class Fragment>
  CUTE_DEVICE auto operand(const Fragment& fragment, const Element* tile) const {
    return operand_at(fragment, tile, smem_.q[0], address_);
  }
  CUTE_DEVICE auto q_operand() const {
    return operand(Traits::fragment_q(smem_.q[0]), smem_.q[consumer_]);
  }
  CUTE_DEVICE auto dout_operand() const {
    return operand(Traits::fragment_dout(smem_.dout[0]), smem_.dout[consumer_]);
  }
  CUTE_DEVICE auto k_operand() const {
    return operand(Traits::fragment_k(smem_.k[0]), smem_.k[k_.stage]);
  }
  CUTE_DEVICE auto kt_operand() const {
    return operand(Traits::fragment_kt(smem_.k[0]), smem_.k[k_.stage]);
  }
  CUTE_DEVICE auto v_operand() const {
    return operand(Traits::fragment_v(smem_.v[0]), smem_.v[v_.stage]);
  }

  // -- the scores --------------------------------------------------------------------------------

  // (rows, columns) of a fragment -> (row, key)
  static CUTE_DEVICE auto row_and_key(int thread) {
    return as_matrix(MmaS{}.get_slice(thread).partition_C(cute::make_identity_tensor(ShapeS{})));
  }

  // Those of this thread's rows.
  CUTE_DEVICE void load_statistics() {
    const auto at = row_and_key(hopper::thread_in_warpgroup());
    const int64_t first = index_of(params_, first_index_, {.head = tile_.head, .m_block = 0});
    const TwoRowGradStats* const of_head =
        in_pairs(params_.workspace.stats + first * BwdConfigSm90::kBlockM);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = row0_ + static_cast<int>(cute::get<0>(at(r, 0)));
      stats_[r] = row < sequence_.len_q ? stats_of_row(of_head, row) : RowGradStats{INFINITY, 0.f};
    }
  }

  // P from S. The mask goes onto the exponent: the weight of a key that its row does not see may be
  // inf.
  template <class S>
  CUTE_DEVICE void to_weights(int key0, S& tSrS) const {
    using namespace cute;
    auto weights = as_matrix(tSrS);
    auto derivatives = make_fragment_like<Derivative<Element>>(
        tSrS);  // MaskKind::kScored: of the changed scores by S
    if constexpr (kMask == MaskKind::kScored) {
      const int thread = hopper::thread_in_warpgroup_here();
      const ScoreMod<Element, Traits::kReadsBias, true, true> score_mod(params_, sequence_,
                                                                        tile_.batch);
      score_mod.apply(weights, as_matrix(derivatives), row_and_key(thread), row_and_key(0), row0_,
                      key0, [&](int row) { return PackGqa::HeadAndQuery{tile_.head, row}; });
    }
    const float scale_log2 = params_.scale.signed_log2();
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(weights); ++c) {
        weights(r, c) = fmaf(weights(r, c), scale_log2, -stats_[r].lse_log2);
        if constexpr (Traits::kReadsBias && kMask == MaskKind::kScored) {
          weights(r, c) = not_above_0(weights(r, c));
        }
      }
    }
    if (mask_.cuts(row0_, kRows, key0, kBlockN)) {
      const int thread = hopper::thread_in_warpgroup_here();
      mask_.apply(weights, row_and_key(thread), row_and_key(0), row0_, kRows, key0, kBlockN);
    }
    CUTE_UNROLL
    for (int i = 0; i < size(tSrS); ++i) tSrS(i) = platform::exp2(tSrS(i));
    if constexpr (kMask == MaskKind::kScored) {
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) *= float(derivatives(i));
    }
  }

  // dS from dP, in its place.
  template <class P, class Dp>
  CUTE_DEVICE void to_score_gradients(P& tSrP, Dp& tSrDp) const {
    using namespace cute;
    const auto weights = as_matrix(tSrP);
    auto ds = as_matrix(tSrDp);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(ds); ++c) {
        ds(r, c) = weights(r, c) * (ds(r, c) - stats_[r].delta);
      }
    }
  }

  const BwdParams& params_;
  TileCoord tile_;
  TileMask mask_;
  const Sequence& sequence_;
  int first_index_;
  SharedMemory& smem_;
  int consumer_;
  int row0_;     // the consumer's first
  int address_;  // of smem_.q, as SharedOperand counts
  RowGradStats stats_[2];
  PipelineState<Traits::kStagesK> k_;
  PipelineState<Traits::kStagesV> v_;
};

}  // namespace flash_cute::sm90
