// The pipelines of shared-memory stages: through them the backward's producer hands blocks of Q and
// dO to the consumers, the consumers hand dS to the one that computes dQ, that one hands its part
// of dQ to its adder, and the adder hands lists of finished blocks back.
#pragma once

#include <type_traits>

#include "sm90/bwd/arguments.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"

namespace flash_cute::sm90 {

template <class Traits>
struct BwdPipeline {
  using SharedMemory = typename Traits::SharedMemory;
  using State = PipelineState<Traits::kStages>;
  using DsState = PipelineState<Traits::kDsStages>;

  // Where a consumer is in the pipelines, from one tile to the next.
  struct ConsumerState {
    State stage;  // of Q and dO
    DsState ds;
    uint32_t kv_parity = 0;
    uint32_t dq_parity = 0;                // of this consumer's parts
    PipelineState<Traits::kLists> list{};  // of blocks to make dQ of
    // Of the tile before. Where scores change ptxas spills a bool at 64, an int at 128.
    std::conditional_t<Traits::kHeadDim == 64, int, bool> has_list = false;
  };

  static CUTE_DEVICE void init_barriers(SharedMemory& smem, DqBy dq_by) {
    constexpr int kWarps = Traits::kConsumers * hopper::kWarpgroup / 32;
    // Full: what TMA brought is visible to all consumers. The producer arrives, and the bytes.
    smem.k_full.init(1);
    smem.v_full.init(1);
    smem.kv_empty.init(kWarps);  // all warps are done with the tile
    const int adders = dq_by == DqBy::kSums ? Traits::kConsumers : 0;
    smem.queue.init(hopper::kArrivalsOfWarp * kWarps + adders);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      smem.q_full[stage].init(1);
      smem.dout_full[stage].init(1);
      // Empty: all warps of all consumers are done with the stage; the producer may fill it again.
      // Lanes read the statistics, which come and go with Q: for racecheck they all arrive there.
      smem.q_empty[stage].init(hopper::kArrivalsOfWarp * kWarps);
      smem.dout_empty[stage].init(kWarps);
    }
    for (int stage = 0; stage < Traits::kDsStages; ++stage) {
      // dS of all warps is visible to the wgmma of the consumer that computes dQ. Empty: that dQ is
      // complete, and all consumers may write the stage again.
      smem.ds_full[stage].init(kWarps);
      smem.ds_empty[stage].init(hopper::kWarpgroup / 32);
    }
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      // Full, by the consumer's warps: a part of dQ is there, visible to TMA. Empty, by its adder:
      // the bulk copy has read it. The other way round: the adder has a list, and its blocks' sums
      // are visible; the consumer's warps have read where it begins.
      smem.dq_full[consumer].init(hopper::kArrivalsOfWarp * hopper::kWarpgroup / 32);
      smem.dq_empty[consumer].init(1);
      for (int list = 0; list < Traits::kLists; ++list) {
        smem.list_full[list][consumer].init(1);
        smem.list_empty[list][consumer].init(hopper::kArrivalsOfWarp * hopper::kWarpgroup / 32);
      }
    }
  }
};

}  // namespace flash_cute::sm90
