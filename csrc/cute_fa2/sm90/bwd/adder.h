// Adds a consumer's parts of dQ to their sums in memory, beside the consumer: one thread of a warp
// of the producer's warpgroup. A part comes from shared memory by a bulk copy. Who adds first to a
// block stores instead, so sums need no zeros ahead. Only for that one do the others wait, and it
// waits for nobody: a CTA may run or not.
//
// Who adds last has a finished block. Where all walk over the same rows, the CTA that lags behind
// the others of its head has nearly all of them. So it keeps a few, and any CTA takes the rest. At
// the end of a tile the adder hands its consumer a list of blocks. The consumer makes dQ of them at
// the end of its next tile.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/finished_blocks.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/tile_queue.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <class Traits>
class DqAdder {
  using SharedMemory = typename Traits::SharedMemory;
  using Walk = typename Traits::Walk;
  static constexpr int kSize = decltype(cute::size(typename Traits::ShapeQ{}))::value;

 public:
  static constexpr int kNoMoreLists = FinishedBlocks::kNone - 1;  // in place of a list

  CUTE_DEVICE DqAdder(const BwdArguments& arguments, SharedMemory& smem, int consumer)
      : arguments_(arguments),
        params_(arguments.params),
        finished_(params_.workspace),
        smem_(smem),
        consumer_(consumer) {}

  // The parts of one tile.
  CUTE_DEVICE void run(const KeyTile<Walk>& tile) {
    const Walk& walk = tile.walk;
    int list = FinishedBlocks::kNone;
    int kept = 0;
    int turn = 0;  // the consumer that computes this block's dQ: BwdMainloop::dq_consumer_
    for (QueryBlock block = walk.first(); !walk.is_empty() && walk.has(block);
         block = walk.next(block)) {
      if (turn == consumer_) {
        smem_.dq_full[consumer_].wait(count_ & 1);  // a part of dQ is there
        count_ ^= 1;
        const int index = index_of(params_, tile.first_index, block);
        if (add(index)) {
          if (kept < arguments_.dq_share) {
            list = prepend(index, list);
            ++kept;
          } else {
            finished_.put(index);
          }
        }
      }
      if (++turn == Traits::kConsumers) turn = 0;
    }
    for (int taken = 0; taken < 2 * arguments_.dq_share; ++taken) {
      const int index = finished_.take();
      if (index == FinishedBlocks::kNone) break;
      list = prepend(index, list);
    }
    hand_over(list);
  }

  // Behind the last tile: what is left, a block at a time, as other CTAs take them too. What this
  // one has put there it takes itself, or another does.
  CUTE_DEVICE void take_rest() {
    while (true) {
      const int index = finished_.take();  // fault: bwd90-rest
      if (index == FinishedBlocks::kNone) return hand_over(kNoMoreLists);
      hand_over(prepend(index, FinishedBlocks::kNone));
    }
  }

 private:
  CUTE_DEVICE int prepend(int index, int list) {
    params_.workspace.adders[index].next = list;
    return index;
  }

  CUTE_DEVICE void hand_over(int list) {
    platform::publish();  // to the consumer too: it shows what others have added
    const unsigned lists = count_ / 2, stage = lists % Traits::kLists;
    count_ += 2;
    smem_.list_empty[stage][consumer_].wait((lists / Traits::kLists % 2) ^ 1);
    smem_.list[stage][consumer_] = list;
    smem_.list_full[stage][consumer_].arrive();
  }

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
    platform::publish();  // this thread sees what others have added ahead of `counted`
    return true;
  }

  const BwdArguments& arguments_;
  const BwdParams& params_;
  FinishedBlocks finished_;
  SharedMemory& smem_;
  int consumer_;
  // Twice the lists so far, and the parity of the consumer's parts: one register, as the producer's
  // warpgroup has few.
  unsigned count_ = 0;
};

}  // namespace flash_cute::sm90
