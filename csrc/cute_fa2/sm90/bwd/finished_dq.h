// A consumer's side of the lists of finished blocks (DqAdder): it makes dQ of their sums.
#pragma once

#include <cute/tensor.hpp>

#include "common/gradient.h"
#include "sm90/bwd/adder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/pipeline.h"
#include "sm90/bwd/sums.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class FinishedDq {
  using SharedMemory = typename Traits::SharedMemory;
  using State = typename BwdPipeline<Traits>::ConsumerState;

 public:
  CUTE_DEVICE FinishedDq(const BwdArguments& arguments, SharedMemory& smem, int consumer,
                         State& state)
      : arguments_(arguments),
        params_(arguments.params),
        smem_(smem),
        consumer_(consumer),
        state_(state) {}

  // At the end of a tile: of the blocks that the adder has listed at the end of the one before.
  CUTE_DEVICE void run() {
    if (state_.has_list) run_list();
  }
  // Behind it: from now on this tile is the one before.
  CUTE_DEVICE void end_tile() { state_.has_list = arguments_.dq_by == DqBy::kSums; }

  // Behind the last tile: its list, then blocks that are left.
  CUTE_DEVICE void run_rest() {
    while (arguments_.dq_by == DqBy::kSums && run_list()) {
    }
  }

 private:
  // Returns whether another list comes.
  CUTE_DEVICE bool run_list() {
    using namespace cute;
    const int stage = state_.list.stage;
    // A list is there, and the sums of its blocks are visible.
    smem_.list_full[stage][consumer_].wait(state_.list.parity);
    state_.list.advance();
    int index = smem_.list[stage][consumer_];
    hopper::sync_warp();
    hopper::arrive_of_warp(smem_.list_empty[stage][consumer_], /*after_accesses=*/true);
    const bool is_more = index != DqAdder<Traits>::kNoMoreLists;
    CUTE_NO_UNROLL
    while (index >= 0) {
      constexpr int kSize = decltype(size(typename Traits::ShapeQ{}))::value;
      const int next = params_.workspace.adders[index].next;
      int batch_head, m_block, batch, head;
      arguments_.m_blocks(batch_head, m_block, index);
      arguments_.heads_q(batch, head, batch_head);
      const int row0 = m_block * Traits::kBlockM;
      SequenceBlock rows = {batch, row0, params_.len_q - row0, 0};
      if constexpr (has_sequences(kMask)) rows = params_.row_blocks[m_block];
      typename WarpgroupSums::Rows<Traits::kHeadDim> sums;  // in flight while that is looked at
      WarpgroupSums::load_rows<Traits::kHeadDim>(params_.workspace.dq + int64_t{index} * kSize,
                                                 sums);
      const GradientPlace place = {params_.dq, rows.batch, head,
                                   rows.first, rows.count, params_.head_dim};
      WarpgroupSums::store_rounded<typename Traits::Element, Traits::kHeadDim>(sums, place,
                                                                               params_.scale.scale);
      index = next;
    }
    return is_more;
  }

  const BwdArguments& arguments_;
  const BwdParams& params_;
  SharedMemory& smem_;
  int consumer_;
  State& state_;
};

}  // namespace flash_cute::sm90
