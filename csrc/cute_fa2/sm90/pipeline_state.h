// The state of a pipeline of shared-memory stages, on either side of it.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

namespace flash_cute::sm90 {

// The stage that comes next, and the parity of the phase in which its barriers are. A consumer
// waits for the "full" barrier with `parity`. The producer waits for the "empty" one with `parity ^
// 1`: the stages of a new pipeline count as empty.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;  // fault: parity
    }
  }
  // The same, without a branch.
  CUTE_DEVICE void advance_of_two() {
    static_assert(kStages == 2);
    parity ^= static_cast<uint32_t>(stage);
    stage ^= 1;
  }
};

}  // namespace flash_cute::sm90
