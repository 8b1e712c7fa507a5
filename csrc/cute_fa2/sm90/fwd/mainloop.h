// A consumer's main loop: S = Q K^T, online softmax, O += P V, one key block at a time. A consumer
// is a warpgroup with 64 rows.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/platform.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "sm90/fwd/arguments.h"
#include "sm90/fwd/pipeline.h"
#include "sm90/hopper.h"
#include "sm90/shared_operand.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class FwdMainloop {
  using Pipeline = sm90::Pipeline<Traits, kMask>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Softmax = OnlineSoftmax<2>;  // a thread has two rows of 64 x N
  using KVState = typename Pipeline::KVState;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr bool kPingPong = Traits::kConfig.ping_pong;

 public:
  CUTE_DEVICE FwdMainloop(const Arguments& arguments, SharedMemory& smem, int index)
      : arguments_(arguments),
        smem_(smem),
        index_(index),
        q_operand_(Traits::fragment_q(smem.q[0][index])),
        k_operand_(Traits::fragment_k(smem.k[0])),
        v_operand_(Traits::fragment_vt(smem.v[0])) {
    // The first consumer goes first, as if the last one had let it.
    if (index == kConsumers - 1) scheduler_barrier_arrive();
  }

  // Works on the tiles that the producer loads. `finish_tile(tile, row0, softmax, tOrO)` takes the
  // result for this consumer's rows of a tile, from `row0` on. `tOrO` is the weighted sum of V,
  // ((2, 2, kHeadDimV / 8), 1, 1); `softmax` has its statistics.
  template <class FinishTile>
  CUTE_DEVICE void run(FinishTile&& finish_tile) {
    using namespace cute;
    // ((2, 2, kBlockN / 8), 1, 1) and ((2, 2, kHeadDimV / 8), 1, 1)
    auto tSrS = partition_fragment_C(typename Traits::MmaS{}, typename Traits::ShapeS{});
    auto tOrO = partition_fragment_C(typename Traits::MmaO{}, typename Traits::ShapeO{});
    Softmax softmax(arguments_.params);
    ConsumerTile work;
    if (!next(work)) return;
    gemm_qk_of_first_block(work, tSrS);
    while (true) {
      wait_for_scores<0>(tSrS);
      process_tile(work, tSrS, softmax, tOrO);
      const ConsumerTile done = work;
      if (!next(work)) return finish_tile(done.tile, done.row0, softmax, tOrO);
      // The epilogue of a tile runs under the first product of the next. Not all lanes store. The
      // last line tells ptxas that they are together again. Without it ptxas would use no uniform
      // registers from there on.
      gemm_qk_of_first_block(work, tSrS);
      finish_tile(done.tile, done.row0, softmax, tOrO);
      hopper::sync_warp();
    }
  }

 private:
  // This consumer's rows of a tile.
  struct ConsumerTile {
    typename Traits::Tile tile;
    int row0;           // its first row
    BlockRange blocks;  // key blocks that these rows see
    int skipped;        // key blocks of the tile behind them
  };

  // The next tile in which this consumer has rows.
  CUTE_DEVICE bool next(ConsumerTile& work) {
    while (true) {
      smem_.q_full[q_.stage][index_].wait(q_.parity);  // `tile` is written, and Q has arrived
      work.tile = smem_.tile[q_.stage][index_];
      if (work.tile.row0 == WorkTile::kNoRow) return false;
      const typename Pipeline::TileMask mask = Pipeline::mask(arguments_, work.tile);
      work.row0 = work.tile.row0 + index_ * Traits::kConsumerRows;
      work.blocks = Pipeline::blocks_of(arguments_, work.tile);
      const int rows_left = work.tile.row_end - work.row0;
      if (rows_left > 0) {
        const int row_end = work.row0 + cute::min(+Traits::kConsumerRows, rows_left);
        const int visible_end = mask.visible_blocks(work.row0, row_end, kBlockN).end;
        // There is always a block to work on.
        const int end = cute::min(work.blocks.end, cute::max(work.blocks.begin + 1, visible_end));
        work.skipped = work.blocks.end - end;
        work.blocks.end = end;
        return true;
      }
      skip_blocks(work.blocks.end - work.blocks.begin);
      release_q();
    }
  }

  // Blocks that this consumer has no use for. It takes its turns all the same.
  CUTE_DEVICE void skip_blocks(int blocks) {
    CUTE_NO_UNROLL
    for (int i = 0; i < blocks; ++i) {
      scheduler_barrier_sync();
      scheduler_barrier_arrive();
      consumer_skip(smem_.k_full[k_.stage], smem_.k_empty[k_.stage], k_);
      consumer_skip(smem_.v_full[v_.stage], smem_.v_empty[v_.stage], v_);
    }
  }

  // Waits for a stage and releases it unread. All lanes have to be past the wait first. Once it is
  // released, the stage may be filled again. A lane that looked only then would see the old parity
  // and wait for ever. (Elsewhere the lanes meet at a product in between.)
  static CUTE_DEVICE void consumer_skip(hopper::Barrier& full, hopper::Barrier& empty,
                                        KVState& state) {
    full.wait(state.parity);
    hopper::sync_warp();
    consumer_release(empty);
    state.advance();
  }

  template <class Scores>
  CUTE_DEVICE void gemm_qk_of_first_block(const ConsumerTile& work, Scores& tSrS) {
    skip_blocks(work.skipped);
    smem_.k_full[k_.stage].wait(k_.parity);  // K has arrived
    scheduler_barrier_sync();
    gemm_qk(tSrS);
    scheduler_barrier_arrive();
  }

  // From the first scores of a tile to its last product.
  template <class Scores, class Out>
  CUTE_DEVICE void process_tile(const ConsumerTile& work, Scores& tSrS, Softmax& softmax,
                                Out& tOrO) {
    using namespace cute;
    const typename Pipeline::TileMask mask = Pipeline::mask(arguments_, work.tile);
    // P, two elements a word; as elements, ((2, 2, N / 8), 1, 1).
    auto words =
        make_tensor<uint32_t>(Int<Traits::kConsumerRows * kBlockN / hopper::kWarpgroup / 2>{});
    auto tSrP = make_tensor(recast_ptr<Element>(words.data()), tSrS.layout());
    auto scores = as_matrix(tSrS);  // (rows, columns)
    auto out = as_matrix(tOrO);     // (rows, columns)

    // Once a tile. Else nvcc computes it again in each step of a packed kernel, between products.
    BlockRange whole = mask.whole_blocks(work.row0, Traits::kConsumerRows, kBlockN);
    whole = {platform::rematerialize(whole.begin), platform::rematerialize(whole.end)};
    // (rows, columns) -> (row, key)
    const auto coords = [](int thread) {
      return as_matrix(typename Traits::MmaS{}.get_slice(thread).partition_C(
          make_identity_tensor(typename Traits::ShapeS{})));
    };
    const auto change = [&](int n_block) {
      if constexpr (kMask == MaskKind::kScored) {
        // From shared memory: it would hold registers.
        const typename Traits::Tile& tile = smem_.tile[q_.stage][index_];
        constexpr bool kHasRoom = Traits::kConsumers < 4 && kBlockN < 128;
        const ScoreMod<Element, Traits::kReadsBias, kHasRoom, true> score_mod(
            arguments_.params, tile.sequence, tile.batch);
        score_mod.apply(scores, NoDerivatives{},
                        coords(platform::rematerialize(hopper::thread_in_warpgroup())), coords(0),
                        work.row0, n_block * kBlockN,
                        [&](int row) { return arguments_.pack_gqa.query_of(tile.head, row); });
      }
    };
    const auto apply_mask = [&](int n_block) {
      if (n_block >= whole.begin && n_block < whole.end) return;
      mask.apply(scores, coords(platform::rematerialize(hopper::thread_in_warpgroup())), coords(0),
                 work.row0, Traits::kConsumerRows, n_block * kBlockN, kBlockN);
    };

    clear(tOrO);
    const int first_block = work.blocks.end - 1;
    change(first_block);
    apply_mask(first_block);
    softmax.start(scores);
    auto bounds = softmax.bounds();
    // The newest block that raised a limit. O lacks that raise: its product was in flight.
    int updated = -1;
    CUTE_NO_UNROLL
    for (int n_block = first_block;; --n_block) {
      softmax.apply_exp2(scores, bounds);
      // The exponentials run under the product P V of the block before. For that they have to stand
      // before the wait in the machine code too. ptxas moves the wait ahead of arithmetic, but not
      // ahead of a branch that needs the results.
      warpgroup_fence_operand(tSrS);
      softmax.fence_exp2();
      hopper::wgmma_wait<0>();  // O of the blocks before is complete
      warpgroup_fence_operand(tOrO);
      if (n_block != first_block) release_v();
      if (n_block == updated) softmax.rescale(out);  // fault: rescale
      convert_to_words<Element>(tSrS, words);
      if (n_block == work.blocks.begin) break;

      smem_.k_full[k_.stage].wait(k_.parity);  // K has arrived
      scheduler_barrier_sync();
      gemm_qk(tSrS);
      gemm_pv(tSrP, tOrO);
      scheduler_barrier_arrive();  // fault: turn
      wait_for_scores<1>(tSrS);
      change(n_block - 1);
      // Without a mask only the last keys may be cut off, and they come first.
      if constexpr (kMask != MaskKind::kFull) apply_mask(n_block - 1);
      if (platform::any_in_warp(softmax.may_exceed(scores, bounds)) &&
          softmax.update_limits(scores, /*may_exceed=*/true, /*is_first=*/false)) {
        bounds = softmax.bounds();
        updated = n_block - 1;
      }
    }
    release_q();
    gemm_pv(tSrP, tOrO);
    hopper::wgmma_wait<0>();  // O is complete
    warpgroup_fence_operand(tOrO);
    release_v();
  }

  template <int kInFlight, class Scores>
  CUTE_DEVICE void wait_for_scores(Scores& tSrS) {
    hopper::wgmma_wait<kInFlight>();  // S is complete; P V may still run; fault: wgmma-wait
    cute::warpgroup_fence_operand(tSrS);
    release_k();
  }

  CUTE_DEVICE void release_k() {
    consumer_release(smem_.k_empty[k_.stage]);
    k_.advance();
  }

  CUTE_DEVICE void release_v() {
    consumer_release(smem_.v_empty[v_.stage]);
    v_.advance();
  }

  // S = Q K^T, asynchronously.
  template <class Scores>
  CUTE_DEVICE void gemm_qk(Scores& tSrS) {
    using namespace cute;
    typename Traits::MmaS mma;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(tSrS);
    hopper::wgmma_fence();  // the threads' reads of S come before the products
    CUTE_UNROLL
    for (int k = 0; k < Traits::kHeadDim / 16; ++k) {
      gemm(mma, q_operand_.template descriptor<true>(q_.stage * kConsumers, k),
           k_operand_.template descriptor<true>(k_.stage, k), tSrS);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    hopper::wgmma_commit();
  }

  // O += P V, asynchronously.
  template <class Weights, class Out>
  CUTE_DEVICE void gemm_pv(Weights& tSrP, Out& tOrO) {
    using namespace cute;
    typename Traits::MmaO mma;
    auto tOrP = as_a_operand(tSrP);          // ((2, 2, 2), 1, N / 16)
    smem_.v_full[v_.stage].wait(v_.parity);  // V has arrived; fault: v-wait
    warpgroup_fence_operand(tOrO);
    warpgroup_fence_operand(tSrP);
    hopper::wgmma_fence();  // shows P and O to the products; fault: wgmma-fence
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tOrP); ++k) {
      gemm(mma, tOrP(_, _, k), v_operand_.template descriptor<false>(v_.stage, k), tOrO);
    }
    hopper::wgmma_commit();
  }

  // Each warp arrives for itself: it has read the stage.
  static CUTE_DEVICE void consumer_release(hopper::Barrier& empty) {
    if (hopper::is_first_lane()) empty.arrive();
  }

  CUTE_DEVICE void release_q() {
    smem_.q_empty[q_.stage][index_].arrive();  // each thread: each has read `tile`
    q_.advance();
  }

  // Ping-pong scheduling: these order the consumers' products. They make no data visible.
  CUTE_DEVICE void scheduler_barrier_sync() const {
    if constexpr (kPingPong) {
      hopper::named_barrier_sync(kFirstSchedulerBarrier + index_);
    }
  }
  CUTE_DEVICE void scheduler_barrier_arrive() const {
    if constexpr (kPingPong) {
      hopper::named_barrier_arrive(kFirstSchedulerBarrier + (index_ + 1) % kConsumers);
    }
  }
  static constexpr int kFirstSchedulerBarrier = 1;  // barrier 0 is that of __syncthreads

  const Arguments& arguments_;
  SharedMemory& smem_;
  int index_;
  // This consumer's tiles of Q, kConsumers apart, and all of K and V: (1, 1, D / 16) descriptors of
  // Q and K, (1, 1, N / 16) of V.
  SharedOperand<decltype(Traits::fragment_q(nullptr)), sizeof SharedMemory::q[0][0]> q_operand_;
  SharedOperand<decltype(Traits::fragment_k(nullptr)), sizeof SharedMemory::k[0]> k_operand_;
  SharedOperand<decltype(Traits::fragment_vt(nullptr)), sizeof SharedMemory::v[0]> v_operand_;
  KVState k_, v_;
  typename Pipeline::QState q_;
};

}  // namespace flash_cute::sm90
