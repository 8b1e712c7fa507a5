// The walk over the keys: S = Q K^T, online softmax, O += P V, one block of keys at a time. One
// warpgroup, the producer, copies tiles to shared memory ahead of the others, the consumers, which
// compute on 64 query rows each.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/layout.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/platform.h"
#include "common/schedule.h"
#include "common/sequence.h"
#include "sm90/arguments.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

// Which stage of a ring comes next, and the parity of the phase in which its barriers are.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Traits, MaskKind kMask>
struct FwdMainloop {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr bool kInTurns = Traits::kConfig.in_turns && kConsumers > 1;
  static constexpr int kWarps = hopper::kWarpgroup / 32;

  using Softmax = OnlineSoftmax<2, false>;  // the two rows of a thread's part of 64 x N
  using Ring = RingPosition<Traits::kStages>;
  using QRing = RingPosition<Traits::kQStages>;

  static CUTE_DEVICE void init_barriers(SharedMemory& smem) {
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      for (int i = 0; i < kConsumers; ++i) {
        smem.q_full[stage][i].init(1);        // the producer, and the bytes that it expects
        smem.q_empty[stage][i].init(kWarps);  // each warp of the consumer
      }
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.v_full[stage].init(1);
      smem.k_empty[stage].init(kConsumers * kWarps);
      smem.v_empty[stage].init(kConsumers * kWarps);
    }
  }

  // The key blocks of which any row of the tile sees a key; empty where end <= begin.
  static CUTE_DEVICE BlockRange visible_blocks(const Arguments& arguments, TileCoord tile) {
    const Sequence sequence(arguments.params);
    const int row0 = tile.m_block * kBlockM;
    const int row_end = cute::min(row0 + kBlockM, arguments.rows.count(sequence.len_q));
    return Mask<kMask, QueryRows>(arguments.params, sequence, arguments.rows)
        .visible_blocks(row0, row_end, kBlockN);
  }

  // -- producer: one thread ----------------------------------------------------------------------

  class Producer {
   public:
    CUTE_DEVICE Producer(const Arguments& arguments, SharedMemory& smem)
        : arguments_(arguments), smem_(smem) {}

    CUTE_DEVICE void load_tile(TileCoord tile) {
      const FwdParams& params = arguments_.params;
      const int row0 = tile.m_block * kBlockM;
      const BlockRange blocks = visible_blocks(arguments_, tile);
      if (blocks.end <= blocks.begin) return;

      // In the order in which the consumers need them: K, Q; the next K before V.
      load_keys(tile, blocks.end - 1);
      CUTE_UNROLL
      for (int i = 0; i < kConsumers; ++i) {
        smem_.q_empty[q_.stage][i].wait(q_.parity ^ 1);  // that consumer is done with the stage
        smem_.q_full[q_.stage][i].arrive_and_expect(sizeof smem_.q[0][0]);
        load_rows<Traits::kRows>(
            arguments_.q, params.q, smem_.q[q_.stage][i], smem_.q_full[q_.stage][i],
            arguments_.rows.query(row0 + i * Traits::kRows), tile.head, tile.batch);
      }
      q_.advance();
      for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) {
        if (n_block > blocks.begin) load_keys(tile, n_block - 1);
        load_values(tile, n_block);
      }
    }

   private:
    CUTE_DEVICE void load_keys(TileCoord tile, int n_block) {
      smem_.k_empty[k_.stage].wait(k_.parity ^ 1);  // all consumers are done with the stage
      smem_.k_full[k_.stage].arrive_and_expect(sizeof smem_.k[0]);
      load_rows<kBlockN>(arguments_.k, arguments_.params.k, smem_.k[k_.stage],
                         smem_.k_full[k_.stage], n_block * kBlockN, kv_head(tile), tile.batch);
      k_.advance();
    }
    // Rows past the last key become zeros: their weight is 0, but 0 x NaN would be NaN.
    CUTE_DEVICE void load_values(TileCoord tile, int n_block) {
      smem_.v_empty[v_.stage].wait(v_.parity ^ 1);  // all consumers are done with the stage
      smem_.v_full[v_.stage].arrive_and_expect(sizeof smem_.v[0]);
      load_rows<kBlockN>(arguments_.v, arguments_.params.v, smem_.v[v_.stage],
                         smem_.v_full[v_.stage], n_block * kBlockN, kv_head(tile), tile.batch);
      v_.advance();
    }

    // kRows whole rows, a box for each strip of columns. An expanded dimension has one entry in the
    // map.
    template <int kRows, class View>
    CUTE_DEVICE void load_rows(const CUtensorMap& map, const View& view, Element* target,
                               hopper::Barrier& arrival, int row, int head, int batch) const {
      CUTE_UNROLL
      for (int column = 0; column < Traits::kHeadDim; column += Traits::kStrip) {
        hopper::load_box(map, target + column * kRows, arrival, column, 0, row,
                         view.stride_head != 0 ? head : 0, view.stride_batch != 0 ? batch : 0);
      }
    }

    CUTE_DEVICE int kv_head(TileCoord tile) const { return arguments_.rows.kv_head(tile.head); }

    const Arguments& arguments_;
    SharedMemory& smem_;
    Ring k_, v_;
    QRing q_;
  };

  // -- consumer: a warpgroup ---------------------------------------------------------------------

  class Consumer {
   public:
    CUTE_DEVICE Consumer(const Arguments& arguments, SharedMemory& smem, int index)
        : arguments_(arguments), smem_(smem), index_(index) {
      // The first consumer has the first turn, as if the last one had passed it on.
      if (kInTurns && index == kConsumers - 1) pass_turn();
    }

    // Leaves the weighted sum of V in `tOrO` and its statistics in `softmax`.
    //   row0   the consumer's first query row, of which `rows_q` exist
    //   tOrO   ((2, 2, kHeadDimV / 8), 1, 1), cleared here
    template <class Out>
    CUTE_DEVICE void run(TileCoord tile, int row0, int rows_q, Softmax& softmax, Out& tOrO) {
      using namespace cute;
      clear(tOrO);
      const BlockRange blocks = visible_blocks(arguments_, tile);
      if (blocks.end <= blocks.begin) return;

      const Mask<kMask, QueryRows> mask(arguments_.params, Sequence(arguments_.params),
                                        arguments_.rows);
      // Of the tile's blocks this consumer's rows may see fewer.
      BlockRange own = {blocks.begin, blocks.begin}, unmasked = own;
      if (rows_q > 0) {
        const BlockRange visible = mask.visible_blocks(row0, row0 + rows_q, kBlockN);
        if (visible.begin < visible.end) own = visible;
        unmasked = mask.fully_visible_blocks(row0, row0 + rows_q, kBlockN);
      }

      // Two elements of P a word; seen as elements, ((2, 2, N / 8), 1, 1).
      auto words = make_tensor<uint32_t>(Int<Traits::kRows * kBlockN / hopper::kWarpgroup / 2>{});
      auto tSrP = make_tensor(
          recast_ptr<Element>(words.data()),
          partition_fragment_C(typename Traits::MmaS{}, typename Traits::ShapeS{}).layout());
      auto out = as_matrix(tOrO);  // (rows, columns)

      // One block of keys, with its softmax under the product of the block before with V. P of this
      // block is left in tSrP.
      auto step = [&](int n_block, auto is_first) {
        auto tSrS = partition_fragment_C(typename Traits::MmaS{}, typename Traits::ShapeS{});
        smem_.k_full[k_.stage].wait(k_.parity);  // K has arrived
        wait_turn();
        warpgroup_fence_operand(tSrS);
        multiply_keys(tSrS);
        if constexpr (!is_first) multiply_values(tSrP, tOrO);
        pass_turn();
        warpgroup_wait<is_first ? 0 : 1>();  // S is there
        warpgroup_fence_operand(tSrS);
        release(smem_.k_empty[k_.stage]);
        k_.advance();
        if (n_block == own.begin) release_queries();

        auto scores = as_matrix(tSrS);  // (rows, columns)
        if (!unmasked.contains(n_block)) {
          // (rows, columns) -> (row, key)
          auto coords = [](int thread) {
            return as_matrix(typename Traits::MmaS{}.get_slice(thread).partition_C(
                make_identity_tensor(typename Traits::ShapeS{})));
          };
          mask.apply(scores, coords(platform::computed_here(hopper::thread_in_warpgroup())),
                     coords(0), row0, Traits::kRows, n_block * kBlockN, kBlockN);
        }
        const bool rises = softmax.raise(scores);
        softmax.weigh(scores);

        if constexpr (!is_first) finish_values(tOrO);
        if (rises) softmax.rescale(out);
        convert_to_words<Element>(tSrS, words);
      };

      smem_.q_full[q_.stage][index_].wait(q_.parity);  // Q has arrived
      CUTE_NO_UNROLL
      for (int i = blocks.end - own.end; i > 0; --i) skip();
      if (own.begin < own.end) {
        step(own.end - 1, true_type{});
        CUTE_NO_UNROLL
        for (int n_block = own.end - 2; n_block >= own.begin; --n_block) {
          step(n_block, false_type{});
        }
        multiply_values(tSrP, tOrO);
        finish_values(tOrO);
      } else {
        release_queries();
      }
      CUTE_NO_UNROLL
      for (int i = own.begin - blocks.begin; i > 0; --i) skip();
    }

   private:
    // S = Q K^T, asynchronously.
    template <class Scores>
    CUTE_DEVICE void multiply_keys(Scores& tSrS) {
      using namespace cute;
      typename Traits::MmaS mma;
      auto thread_mma = mma.get_slice(hopper::thread_in_warpgroup());
      auto sQ =
          make_tensor(make_smem_ptr(smem_.q[q_.stage][index_]), typename Traits::SmemLayoutQ{});
      auto sK = make_tensor(make_smem_ptr(smem_.k[k_.stage]), typename Traits::SmemLayoutK{});
      auto tSrQ = thread_mma.partition_fragment_A(sQ);  // (1, 1, D / 16), descriptors
      auto tSrK = thread_mma.partition_fragment_B(sK);  // (1, 1, D / 16), descriptors
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      warpgroup_arrive();
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tSrQ); ++k) {
        gemm(mma, tSrQ(_, _, k), tSrK(_, _, k), tSrS);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    }

    // O += P V, asynchronously.
    template <class Weights, class Out>
    CUTE_DEVICE void multiply_values(Weights& tSrP, Out& tOrO) {
      using namespace cute;
      typename Traits::MmaO mma;
      auto thread_mma = mma.get_slice(hopper::thread_in_warpgroup());
      auto sVt = make_tensor(make_smem_ptr(smem_.v[v_.stage]), typename Traits::SmemLayoutVt{});
      auto tOrVt = thread_mma.partition_fragment_B(sVt);  // (1, 1, N / 16), descriptors
      auto tOrP = as_a_operand(tSrP);                     // ((2, 2, 2), 1, N / 16)
      smem_.v_full[v_.stage].wait(v_.parity);             // V has arrived
      warpgroup_fence_operand(tOrO);
      warpgroup_fence_operand(tSrP);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tOrP); ++k) gemm(mma, tOrP(_, _, k), tOrVt(_, _, k), tOrO);
      warpgroup_commit_batch();
    }

    template <class Out>
    CUTE_DEVICE void finish_values(Out& tOrO) {
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(tOrO);
      release(smem_.v_empty[v_.stage]);
      v_.advance();
    }

    // A block that the tile's other consumers see.
    CUTE_DEVICE void skip() {
      wait_turn();
      pass_turn();
      smem_.k_full[k_.stage].wait(k_.parity);  // only now is it this round's stage that is released
      release(smem_.k_empty[k_.stage]);
      k_.advance();
      smem_.v_full[v_.stage].wait(v_.parity);
      release(smem_.v_empty[v_.stage]);
      v_.advance();
    }

    // Each warp says for itself that it has read what it needed.
    static CUTE_DEVICE void release(hopper::Barrier& empty) {
      if (hopper::is_first_lane()) empty.arrive();
    }

    CUTE_DEVICE void release_queries() {
      release(smem_.q_empty[q_.stage][index_]);
      q_.advance();
    }

    CUTE_DEVICE void wait_turn() const {
      if constexpr (kInTurns) hopper::wait_at(kFirstTurnBarrier + index_);
    }
    CUTE_DEVICE void pass_turn() const {
      if constexpr (kInTurns) hopper::arrive_at(kFirstTurnBarrier + (index_ + 1) % kConsumers);
    }
    static constexpr int kFirstTurnBarrier = 1;  // barrier 0 is that of __syncthreads

    const Arguments& arguments_;
    SharedMemory& smem_;
    int index_;
    Ring k_, v_;
    QRing q_;
  };
};

}  // namespace flash_cute::sm90
