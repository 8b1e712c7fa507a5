// A consumer's main loop in the backward: dK and dV of its keys, and dQ's part of the tile, one
// block of query rows at a time. A consumer is a warpgroup with 64 keys.
//
//   S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)    dV += P^T dO
//   dP^T = V dO^T   dS^T = P^T * (dP^T - delta)            dK += dS^T Q     dQ += dS K
//
// The scale goes onto the sums: onto dS, it could leave fp16's range.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/gradient.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/pipeline.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/sums.h"
#include "sm90/hopper.h"
#include "sm90/shared_operand.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class BwdMainloop {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using State = typename BwdPipeline<Traits>::State;
  using MmaSt = typename Traits::MmaSt;
  using MmaDq = typename Traits::MmaDq;
  using ShapeSt = typename Traits::ShapeSt;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kConsumers = Traits::kConsumers;

 public:
  using TileMask = Mask<kMask, UnpackedRows>;

  CUTE_DEVICE BwdMainloop(const BwdArguments& arguments, TileCoord tile, const Sequence& sequence,
                          SharedMemory& smem, int consumer)
      : arguments_(arguments),
        params_(arguments.params),
        tile_(tile),
        mask_(params_, sequence, UnpackedRows{}),
        sequence_(sequence),
        smem_(smem),
        consumer_(consumer),
        key0_(tile.m_block * kBlockN + consumer * Traits::kConsumerKeys),
        address_(platform::warp_uniform(
            static_cast<int>(Operand<decltype(Traits::fragment_q(nullptr))>::address_of(
                Traits::fragment_q(smem.q[0]))))) {}

  // Leaves the sums in tdKrdK, ((2, 2, kHeadDim / 8), 1, 1), and tdVrdV, likewise of kHeadDimV.
  template <class Dk, class Dv>
  CUTE_DEVICE void run(const QueryWalk& walk, Dk& tdKrdK, Dv& tdVrdV) {
    cute::clear(tdKrdK);
    cute::clear(tdVrdV);
    if (walk.is_empty()) return;
    smem_.k_full.wait(0);  // K has arrived; fault: bwd90-kv
    smem_.v_full.wait(0);  // so has V
    CUTE_NO_UNROLL
    for (QueryBlock block = walk.first(); walk.has(block); block = walk.next(block)) {
      step(block, tdKrdK, tdVrdV);
    }
    WarpgroupSums::wait_until_read();
  }

 private:
  template <class Dk, class Dv>
  CUTE_DEVICE void step(QueryBlock block, Dk& tdKrdK, Dv& tdVrdV) {
    using namespace cute;
    auto tSrS = partition_fragment_C(MmaSt{}, ShapeSt{});   // ((2, 2, kBlockM / 8), 1, 1)
    auto tSrDp = partition_fragment_C(MmaSt{}, ShapeSt{});  // ((2, 2, kBlockM / 8), 1, 1)
    // P and dS, two elements a word; as elements, ((2, 2, kBlockM / 8), 1, 1).
    using Words = decltype(make_tensor<uint32_t>(Int<decltype(size(tSrS))::value / 2>{}));
    Words p_words, ds_words;
    auto tSrP = make_tensor(recast_ptr<Element>(p_words.data()), tSrS.layout());
    auto tSrDs = make_tensor(recast_ptr<Element>(ds_words.data()), tSrS.layout());

    smem_.q_full[stage_.stage].wait(stage_.parity);  // Q and the statistics have arrived
    gemm_ss<Traits::kHeadDim>(MmaSt{}, k_operand(), q_operand(), tSrS);
    smem_.dout_full[stage_.stage].wait(stage_.parity);  // dO has arrived
    gemm_ss<Traits::kHeadDimV>(MmaSt{}, v_operand(), dout_operand(), tSrDp);

    hopper::wgmma_wait<1>();  // S is complete
    warpgroup_fence_operand(tSrS);
    to_weights(block.m_block * kBlockM, tSrS);
    convert_to_words<Element>(tSrS, p_words);
    hopper::wgmma_wait<0>();  // dP is complete
    warpgroup_fence_operand(tSrDp);
    to_score_gradients(tSrS, tSrDp);
    convert_to_words<Element>(tSrDp, ds_words);

    gemm_rs(typename Traits::MmaDv{}, tSrP, doutt_operand(), tdVrdV);
    // dS of two steps before has been read.
    smem_.ds_empty[ds_.stage].wait(ds_.parity ^ 1);  // fault: bwd90-ds-empty
    store_shared(ds_words);
    // Visible to wgmma, once all lanes are here.
    hopper::fence_async_proxy();  // fault: bwd90-ds-fence
    hopper::sync_warp();
    arrive(smem_.ds_full[ds_.stage]);
    gemm_rs(typename Traits::MmaDk{}, tSrDs, qt_operand(), tdKrdK);
    hopper::wgmma_wait<1>();  // dV is complete
    warpgroup_fence_operand(tdVrdV);
    arrive(smem_.dout_empty[stage_.stage]);
    // The consumers compute dQ in turns. The others go on to the next block meanwhile.
    const auto release_q = [&] {
      warpgroup_fence_operand(tdKrdK);
      arrive(smem_.q_empty[stage_.stage]);
    };
    if (dq_consumer_ == consumer_) {
      // ((2, 2, kHeadDim / 8), 1, 1)
      auto tdQrdQ = partition_fragment_C(MmaDq{}, typename Traits::ShapeQ{});
      // dS is there, of all consumers.
      smem_.ds_full[ds_.stage].wait(ds_.parity);  // fault: bwd90-ds-full
      gemm_ss<kBlockN>(MmaDq{}, ds_operand(), kt_operand(), tdQrdQ);
      hopper::wgmma_wait<1>();  // dK is complete
      release_q();
      hopper::wgmma_wait<0>();  // dQ is complete
      warpgroup_fence_operand(tdQrdQ);
      arrive(smem_.ds_empty[ds_.stage]);
      add_dq(block, tdQrdQ);
    } else {
      hopper::wgmma_wait<0>();  // dK is complete
      release_q();
    }
    stage_.advance();
    if (++dq_consumer_ == kConsumers) dq_consumer_ = 0;
    ds_.advance();
  }

  // -- products ----------------------------------------------------------------------------------

  // The operand `fragment` at `first` in shared memory. All operands have their addresses from one
  // register.
  template <class Fragment>
  using Operand = SharedOperand<Fragment, 0>;
  template <class Fragment>
  CUTE_DEVICE auto operand(const Fragment& fragment, const Element* first) const {
    const auto chunks = (first - smem_.q[0]) * static_cast<int>(sizeof(Element)) / 16;
    return Operand<Fragment>(fragment, static_cast<uint32_t>(address_ + static_cast<int>(chunks)));
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
    return operand(Traits::fragment_q(smem_.q[0]), smem_.q[stage_.stage]);
  }
  CUTE_DEVICE auto dout_operand() const {
    return operand(Traits::fragment_dout(smem_.dout[0]), smem_.dout[stage_.stage]);
  }
  CUTE_DEVICE auto qt_operand() const {
    return operand(Traits::fragment_qt(smem_.q[0]), smem_.q[stage_.stage]);
  }
  CUTE_DEVICE auto doutt_operand() const {
    return operand(Traits::fragment_doutt(smem_.dout[0]), smem_.dout[stage_.stage]);
  }
  CUTE_DEVICE auto ds_operand() const {
    return operand(Traits::fragment_ds(smem_.ds[0]), smem_.ds[ds_.stage]);
  }
  CUTE_DEVICE auto kt_operand() const { return operand(Traits::fragment_kt(smem_.k), smem_.k); }

  // C = A B, asynchronously, over kDepth.
  template <int kDepth, class Mma, class A, class B, class C>
  CUTE_DEVICE void gemm_ss(Mma mma, const A& a, const B& b, C& rC) {
    using namespace cute;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(rC);
    hopper::wgmma_fence();
    CUTE_UNROLL
    for (int k = 0; k < kDepth / 16; ++k) {
      gemm(mma, a.template descriptor<true>(0, k), b.template descriptor<true>(0, k), rC);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    hopper::wgmma_commit();
  }

  // C += A B, asynchronously, where A is in registers and has the rows of a block.
  template <class Mma, class A, class B, class C>
  CUTE_DEVICE void gemm_rs(Mma mma, A& fragment, const B& b, C& rC) {
    using namespace cute;
    auto rA = as_a_operand(fragment);  // ((2, 2, 2), 1, kBlockM / 16)
    warpgroup_fence_operand(rC);
    warpgroup_fence_operand(fragment);
    hopper::wgmma_fence();
    CUTE_UNROLL
    for (int k = 0; k < kBlockM / 16; ++k) {
      gemm(mma, rA(_, _, k), b.template descriptor<true>(0, k), rC);
    }
    hopper::wgmma_commit();
  }

  // -- the scores: (rows, columns) of a fragment are (keys, query rows) ---------------------------

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

  // P from S. The mask goes onto the exponent: the weight of a key that its row does not see may be
  // inf.
  template <class S>
  CUTE_DEVICE void to_weights(int row0, S& tSrS) const {
    using namespace cute;
    auto weights = as_matrix(tSrS);
    const float scale_log2 = params_.scale.signed_log2();
    for_each_row(weights, [&](int c, const RowGradStats& stats) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(weights); ++r) {
        weights(r, c) = fmaf(weights(r, c), scale_log2, -stats.lse_log2);
      }
    });
    if (mask_.cuts(row0, kBlockM, key0_, Traits::kConsumerKeys)) {
      auto rows_first = make_tensor(weights.data(), select<1, 0>(weights.layout()));
      const int thread = platform::rematerialize(hopper::thread_in_warpgroup());
      mask_.apply(rows_first, row_and_key(thread), row_and_key(0), row0, kBlockM, key0_,
                  Traits::kConsumerKeys);
    }
    CUTE_UNROLL
    for (int i = 0; i < size(tSrS); ++i) tSrS(i) = platform::exp2(tSrS(i));
  }

  // dS from dP, in its place.
  template <class P, class Dp>
  CUTE_DEVICE void to_score_gradients(P& tSrP, Dp& tSrDp) const {
    using namespace cute;
    const auto weights = as_matrix(tSrP);
    auto ds = as_matrix(tSrDp);
    for_each_row(ds, [&](int c, const RowGradStats& stats) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(ds); ++r) ds(r, c) = weights(r, c) * (ds(r, c) - stats.delta);
    });
  }

  // f(column of the fragment, statistics) of each query row. Two rows lie side by side.
  template <class Scores, class F>
  CUTE_DEVICE void for_each_row(const Scores& scores, F&& f) const {
    using namespace cute;
    const auto at = key_and_row(platform::rematerialize(hopper::thread_in_warpgroup()));
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); c += 2) {
      struct alignas(16) Two {
        RowGradStats rows[2];
      };
      const int row = get<1>(at(0, c));
      const Two two = *reinterpret_cast<const Two*>(&smem_.stats[stage_.stage][row]);
      f(c, two.rows[0]);
      f(c + 1, two.rows[1]);
    }
  }

  // dS^T to shared memory: a row is a key, with kBlockM query rows.
  template <class Words>
  CUTE_DEVICE void store_shared(const Words& words) {
    constexpr int kWarpKeys = Traits::kConsumerKeys / 4;
    const int warp = hopper::warp_in_warpgroup();
    const int lane = hopper::thread_in_warpgroup() % 32;
    Element* const rows =
        smem_.ds[ds_.stage] + (consumer_ * Traits::kConsumerKeys + warp * kWarpKeys) * kBlockM;
    // Where this lane's chunk of columns 0 to 15 lies; `first ^ column` is that of later columns.
    const int first = typename Traits::SmemLayoutDst{}(lane % 16, lane / 16 * 8);
    CUTE_UNROLL
    for (int column = 0; column < kBlockM; column += 16) {
      uint32_t block[4];  // (2 rows, 2 x 8 columns)
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) block[i] = words(column / 4 + i);
      hopper::stmatrix(rows + (first ^ column), block);
    }
  }

  // Adds this tile's part of dQ to the sums of the block. Where they are in order, after the parts
  // of all earlier keys that the block sees.
  template <class Dq>
  CUTE_DEVICE void add_dq(QueryBlock block, Dq& tdQrdQ) const {
    using namespace cute;
    const int row0 = block.m_block * kBlockM;
    const BwdWorkspace& workspace = params_.workspace;
    if (!workspace.dq) {
      const GradientPlace place = {params_.dq,        tile_.batch,     block.head,
                                   sequence_.first_q, sequence_.len_q, params_.head_dim};
      store_gradient<Element, MmaDq, typename Traits::ShapeQ>(
          place, row0, params_.scale.scale, tdQrdQ, hopper::thread_in_warpgroup());
      return;
    }
    const int64_t index = index_of(params_, tile_, block);
    float* const sums = workspace.dq + index * size(typename Traits::ShapeQ{});
    if (!workspace.tickets) {
      return WarpgroupSums::bulk_add_to(sums, smem_.dq[consumer_], tdQrdQ);
    }
    int* const added = workspace.added + index;
    const bool is_first = hopper::thread_in_warpgroup() == 0;
    if (is_first) {
      const int row_end = cute::min(row0 + kBlockM, sequence_.len_q);
      const int turn = tile_.m_block - mask_.visible_blocks(row0, row_end, kBlockN).begin;
      platform::wait_for_turn(added, turn);
    }
    hopper::named_barrier_sync(kTurnBarrier + consumer_, 1);  // it is this tile's turn
    WarpgroupSums::add_to(sums, tdQrdQ);
    platform::publish();
    hopper::named_barrier_sync(kTurnBarrier + consumer_, 1);  // all threads have added
    if (is_first) platform::pass_turn(added);
  }

  // Each warp arrives for itself.
  static CUTE_DEVICE void arrive(hopper::Barrier& barrier) {
    if (hopper::is_first_lane()) barrier.arrive();
  }

  static constexpr int kTurnBarrier = 1;  // and one for each consumer; 0 is that of __syncthreads

  const BwdArguments& arguments_;
  const BwdParams& params_;
  TileCoord tile_;
  TileMask mask_;
  const Sequence& sequence_;
  SharedMemory& smem_;
  int consumer_;
  int key0_;     // the consumer's first
  int address_;  // of smem_.q, as SharedOperand counts
  State stage_;  // of Q and dO
  typename BwdPipeline<Traits>::DsState ds_;
  int dq_consumer_ = 0;  // whose turn it is to compute dQ
};

}  // namespace flash_cute::sm90
