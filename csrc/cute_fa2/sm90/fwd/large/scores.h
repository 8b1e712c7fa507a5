// The warpgroup that computes S = Q K^T and the softmax, one key block at a time. It hands P, and
// by what rows of O are multiplied, to those that compute O.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/platform.h"
#include "sm90/fwd/arguments.h"
#include "sm90/fwd/epilogue.h"
#include "sm90/fwd/pipeline.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"
#include "sm90/shared_operand.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class ScoresMainloop {
  using Pipeline = sm90::Pipeline<Traits, kMask>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Softmax = OnlineSoftmax<2>;  // a thread has two rows of 64 x N
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHalf = Traits::kChunksOfGroup;       // chunks of half of Q or K
  static constexpr int kSteps = Traits::kChunkColumns / 16;  // of a chunk

 public:
  CUTE_DEVICE ScoresMainloop(const Arguments& arguments, SharedMemory& smem)
      : arguments_(arguments),
        smem_(smem),
        q_operand_(Traits::fragment_q(smem.q[0])),
        k_operand_(Traits::fragment_k(smem.k[0])),
        // Where this lane's chunk of columns 0 to 15 lies among a warp's rows, see FwdEpilogue.
        first_(typename Traits::SmemLayoutO{}(platform::thread_index() % 16,
                                              platform::thread_index() % 32 / 16 * 8)),
        warp_(hopper::warp_in_warpgroup()) {}

  // Works on the tiles that the producer announces.
  CUTE_DEVICE void run() {
    using namespace cute;
    Softmax softmax(arguments_.params);
    while (true) {
      smem_.tile_full[tile_.stage].wait(tile_.parity);  // `tile` is written
      const WorkTile tile = smem_.tile[tile_.stage];
      smem_.tile_empty[tile_.stage].arrive();  // each thread: each has read `tile`
      tile_.advance();
      if (tile.row0 == WorkTile::kNoRow) return;
      process_tile(tile, softmax);
    }
  }

 private:
  CUTE_DEVICE void process_tile(const WorkTile& tile, Softmax& softmax) {
    using namespace cute;
    // ((2, 2, 2), 1, kHeadDimV / 16): the first half of Q, two elements a word
    auto q_words = make_tensor<uint32_t>(Int<4 * kHalf * kSteps>{});
    auto tSrQ = make_tensor(recast_ptr<Element>(q_words.data()),
                            make_layout(Shape<Shape<_2, _2, _2>, _1, Int<kHalf * kSteps>>{}));
    load_q(q_words);
    smem_.q_full.wait(q_parity_);  // the second has arrived
    q_parity_ ^= 1;
    // ((2, 2, kBlockN / 8), 1, 1)
    auto tSrS = partition_fragment_C(typename Traits::MmaS{}, typename Traits::ShapeS{});
    auto scores = as_matrix(tSrS);                           // (rows, columns)
    auto words = make_tensor<uint32_t>(Int<kBlockN / 4>{});  // P, two elements a word
    auto factors = make_tensor<float>(Shape<_2, _1>{});      // (rows, 1)

    const Mask<kMask> mask = Pipeline::mask(arguments_, tile);
    const BlockRange blocks = Pipeline::blocks_of(arguments_, tile);
    const BlockRange whole = mask.whole_blocks(tile.row0, Traits::kConsumerRows, kBlockN);
    // (rows, columns) -> (row, key)
    const auto coords = [](int thread) {
      return as_matrix(typename Traits::MmaS{}.get_slice(thread).partition_C(
          make_identity_tensor(typename Traits::ShapeS{})));
    };
    typename Softmax::Bounds bounds;
    CUTE_NO_UNROLL
    for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) {
      const bool is_first = n_block == blocks.end - 1;
      gemm_qk(tSrQ, tSrS);
      // Without a mask only the last keys may be cut off, and they come first.
      if (n_block < whole.begin || n_block >= whole.end) {
        mask.apply(scores, coords(platform::rematerialize(hopper::thread_in_warpgroup())),
                   coords(0), tile.row0, Traits::kConsumerRows, n_block * kBlockN, kBlockN);
      }
      fill(factors, 1.f);
      if (is_first) {
        softmax.start(scores);
        bounds = softmax.bounds();
      } else if (platform::any_in_warp(softmax.may_exceed(scores, bounds)) &&
                 softmax.update_limits(scores, /*may_exceed=*/true, /*is_first=*/false)) {
        softmax.rescale(factors);
        bounds = softmax.bounds();
      }
      softmax.apply_exp2(scores, bounds);
      convert_to_words<Element>(tSrS, words);
      smem_.p_empty[p_.stage].wait(p_.parity ^ 1);  // P and factors there are read
      store_p(words);
      hand_over(factors);
    }
    hopper::arrive_of_warp(smem_.q_empty, /*after_accesses=*/true);
    // Behind the last block: by what O is normalised.
    fill(factors, 1.f);
    softmax.normalize(factors);
    if (arguments_.params.sink) {
      FwdEpilogue<Traits>::join_sink(arguments_, tile, tile.row0, factors, softmax);
    }
    smem_.p_empty[p_.stage].wait(p_.parity ^ 1);
    hand_over(factors);
    FwdEpilogue<Traits>::store_lse(arguments_, tile, tile.row0 + warp_ * Traits::kWarpRows,
                                   Pipeline::sequence(arguments_, tile), softmax);
  }

  // The first half of Q to registers, 16 columns at a time.
  template <class Words>
  CUTE_DEVICE void load_q(Words& words) {
    CUTE_UNROLL
    for (int chunk = 0; chunk < kHalf; ++chunk) {
      smem_.k_full[k_.stage].wait(k_.parity);  // it has arrived
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const int strip = step * 16 / Traits::kStrip, column = step * 16 % Traits::kStrip;
        const Element* rows =
            smem_.k[k_.stage] + (strip * kBlockN + warp_ * Traits::kWarpRows) * Traits::kStrip;
        const int i = 4 * (chunk * kSteps + step);
        platform::LoadMatrix::copy(
            *reinterpret_cast<const cute::uint128_t*>(rows + (first_ ^ column)), words(i),
            words(i + 1), words(i + 2), words(i + 3));
      }
      // TMA must not write before the lanes have read. An arrival alone does not wait for ldmatrix.
      hopper::fence_async_proxy();
      hopper::sync_warp();
      release_k();
    }
  }

  // S = Q K^T, and releases K, the first chunks as soon as they are read.
  template <class Query, class Scores>
  CUTE_DEVICE void gemm_qk(const Query& tSrQ, Scores& tSrS) {
    using namespace cute;
    typename Traits::MmaSFirst first;
    typename Traits::MmaS second;
    first.accumulate_ = GMMA::ScaleOut::Zero;
    typename Pipeline::KVState k = k_;
    warpgroup_fence_operand(tSrS);
    CUTE_UNROLL
    for (int chunk = 0; chunk < 2 * kHalf; ++chunk) {
      smem_.k_full[k.stage].wait(k.parity);  // the chunk of K has arrived
      hopper::wgmma_fence();                 // Q is in its registers, and S has been read
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (chunk < kHalf) {
          gemm(first, tSrQ(_, _, chunk * kSteps + step),
               k_operand_.template descriptor<false>(k.stage, step), tSrS);
          first.accumulate_ = GMMA::ScaleOut::One;
        } else {
          gemm(second, q_operand_.template descriptor<true>(chunk - kHalf, step),
               k_operand_.template descriptor<true>(k.stage, step), tSrS);
        }
      }
      hopper::wgmma_commit();
      k.advance();
    }
    [&]<int... kChunk>(std::integer_sequence<int, kChunk...>) {
      ((hopper::wgmma_wait<2 * kHalf - 1 - kChunk>(), release_k()), ...);
    }(std::make_integer_sequence<int, 2 * kHalf>{});
    warpgroup_fence_operand(tSrS);  // S is complete
  }

  CUTE_DEVICE void release_k() {
    hopper::arrive_of_warp(smem_.k_empty[k_.stage], /*after_accesses=*/true);
    k_.advance();
  }

  template <class Words>
  CUTE_DEVICE void store_p(const Words& words) const {
    Element* rows = smem_.p[p_.stage] + warp_ * Traits::kWarpRows * kBlockN;
    CUTE_UNROLL
    for (int column = 0; column < kBlockN; column += 16) {
      uint32_t block[4];  // (2 rows, 2 x 8 columns)
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) block[i] = words(column / 4 + i);
      hopper::stmatrix(rows + (first_ ^ column), block);
    }
    hopper::fence_async_proxy();  // P is visible to wgmma once the barrier is passed
  }

  template <class Factors>
  CUTE_DEVICE void hand_over(const Factors& factors) {
    const int lane = hopper::thread_in_warpgroup() % 32, mine = lane % 4;
    if (mine < Softmax::kRows) {  // each of two lanes has one of the rows
      const int row = warp_ * Traits::kWarpRows + lane / 4 + 8 * mine;
      smem_.factors[p_.stage][row] = mine == 0 ? factors(0, 0) : factors(1, 0);
    }
    hopper::sync_warp();
    hopper::arrive_of_warp(smem_.p_full[p_.stage], /*after_accesses=*/true);
    p_.advance();
  }

  const Arguments& arguments_;
  SharedMemory& smem_;
  // (1, 1, kSteps) descriptors of each chunk
  SharedOperand<decltype(Traits::fragment_q(nullptr)), sizeof SharedMemory::q[0]> q_operand_;
  SharedOperand<decltype(Traits::fragment_k(nullptr)), sizeof SharedMemory::k[0]> k_operand_;
  int first_;
  int warp_;
  uint32_t q_parity_ = 0;
  typename Pipeline::KVState k_;
  PipelineState<Traits::kPStages> p_;
  typename Pipeline::QState tile_;
};

}  // namespace flash_cute::sm90
