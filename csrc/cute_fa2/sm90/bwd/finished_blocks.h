// The blocks of dQ's sums to which all tiles have added, until somebody makes dQ of them: a queue
// in global memory. Any CTA puts blocks there and takes others. Nobody waits but for the store of a
// CTA that is just putting a block. Each step is one atomic addition: with a swap that may fail,
// hundreds of CTAs at one word take turns.
#pragma once

#include <cute/config.hpp>

#include "common/platform.h"
#include "host/params.h"

namespace flash_cute::sm90 {

class FinishedBlocks {
  using Queue = DqFinished;

 public:
  static constexpr int kNone = -1;

  explicit CUTE_DEVICE FinishedBlocks(const BwdWorkspace& workspace) : workspace_(workspace) {}

  // Who takes the block sees what this thread saw, if it has called `publish`.
  CUTE_DEVICE void put(int block) {
    const int place = platform::next_number(workspace_.finished + Queue::kPut);
    platform::store_number(workspace_.finished + Queue::kBlocks + place, block);
    platform::fetch_add(workspace_.finished + Queue::kWaiting, 1);
  }

  // Or kNone. A thread that has put blocks and then finds none may go: if one of them is still
  // there, another thread is about to take it.
  CUTE_DEVICE int take() {
    int* const waiting = workspace_.finished + Queue::kWaiting;
    if (platform::load_acquire(waiting) <= 0) return kNone;
    // A claim that finds none is taken back. Meanwhile it may have hidden a block from another
    // thread. So who leaves the counter above 0 tries again.
    while (platform::fetch_add(waiting, -1) <= 0) {
      const int others = platform::fetch_add(waiting, 1);  // fault: bwd90-claim
      if (others < 0) return kNone;
    }
    const int place = platform::next_number(workspace_.finished + Queue::kTaken);
    return platform::wait_for_number(workspace_.finished + Queue::kBlocks + place);
  }

 private:
  const BwdWorkspace& workspace_;
};

}  // namespace flash_cute::sm90
