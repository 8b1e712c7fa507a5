// Adds a consumer's parts of dQ to their sums in memory, beside the consumer: one thread of a warp
// of the producer's warpgroup. A part comes from shared memory by a bulk copy. Who adds first to a
// block stores instead, so sums need no zeros ahead. Only for that one do the others wait, and it
// waits for nobody: a CTA may run or not. Who adds last leaves the block to its consumer, which
// makes dQ of the sums at the end of its next tile.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/tile_queue.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"

namespace flash_cute::sm90 {

template <class Traits>
class DqAdder {
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kSize = decltype(cute::size(typename Traits::ShapeQ{}))::value;

 public:
  CUTE_DEVICE DqAdder(const BwdArguments& arguments, SharedMemory& smem, int consumer)
      : params_(arguments.params), smem_(smem), consumer_(consumer) {}

  // The parts of one tile.
  CUTE_DEVICE void run(const KeyTile& tile) {
    const QueryWalk& walk = tile.walk;
    int finished = -1;
    int turn = 0;
    bool had_turn = false;
    for (QueryBlock block = walk.first(); !walk.is_empty() && walk.has(block);
         block = walk.next(block)) {
      if (turn == consumer_) {
        smem_.dq_full[consumer_].wait(parity_);  // a part of dQ is there
        parity_ ^= 1;
        had_turn = true;
        const int index = index_of(params_, tile.first_index, block);
        if (add(index)) {
          params_.workspace.adders[index].next = finished;
          finished = index;
        }
      }
      if (++turn == Traits::kConsumers) turn = 0;
    }
    if (!had_turn) return;
    // The consumer has read the list of two tiles before: this one's parts came later.
    smem_.finished[list_.stage][consumer_] = finished;
    smem_.dq_done[list_.stage][consumer_].arrive();
    list_.advance();
  }

 private:
  // Returns whether all parts of the block are there.
  CUTE_DEVICE bool add(int index) {
    DqAdders& adders = params_.workspace.adders[index];
    float* const sums = params_.workspace.dq + int64_t{index} * kSize;
    const bool is_first = platform::next_number(&adders.begun) == 0;
    if (is_first) {
      hopper::bulk_store(sums, smem_.dq[consumer_], sizeof smem_.dq[0]);
    } else {
      platform::wait_for_flag(&adders.stored);
      hopper::fence_async_proxy_global();
      hopper::bulk_reduce_add(sums, smem_.dq[consumer_], sizeof smem_.dq[0]);
    }
    hopper::tma_store_commit();
    hopper::tma_store_wait<0>();  // the part has been read; fault: bwd90-staged
    smem_.dq_empty[consumer_].arrive();
    hopper::bulk_wait_complete();  // fault: bwd90-dq-complete
    platform::publish();
    if (is_first) platform::raise_flag(&adders.stored);
    if (platform::next_number(&adders.counted) != 0) return false;
    platform::publish();  // to the consumer too, it shows what others have added
    return true;
  }

  const BwdParams& params_;
  SharedMemory& smem_;
  int consumer_;
  uint32_t parity_ = 0;  // of the consumer's parts
  PipelineState<Traits::kLists> list_;
};

}  // namespace flash_cute::sm90
