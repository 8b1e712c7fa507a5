// The producer is one thread. It has TMA bring K and V of the tile, and then block after block of
// Q, dO and the rows' statistics, ahead of the consumers.
#pragma once

#include <cute/config.hpp>

#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/hopper.h"
#include "sm90/kv_source.h"
#include "sm90/pipeline_state.h"

namespace flash_cute::sm90 {

template <class Traits>
class BwdProducer {
  using SharedMemory = typename Traits::SharedMemory;
  using State = PipelineState<Traits::kStages>;

 public:
  CUTE_DEVICE BwdProducer(const BwdArguments& arguments, TileCoord tile, const Sequence& sequence,
                          SharedMemory& smem)
      : arguments_(arguments), tile_(tile), sequence_(sequence), smem_(smem) {}

  CUTE_DEVICE void run(const QueryWalk& walk) {
    if (walk.is_empty()) return;
    const BwdParams& params = arguments_.params;
    const int key0 = tile_.m_block * Traits::kBlockN + static_cast<int>(sequence_.first_k);
    QueryBlock block = walk.first();
    smem_.k_full.arrive_and_expect(sizeof smem_.k);
    tma_load_rows<Traits::kBlockN, Traits::kHeadDim, Traits::kStrip, BwdTensorMaps::kRows>(
        arguments_.maps.k, params.k, smem_.k, smem_.k_full, key0, tile_.head, tile_.batch);
    load_q(block);
    smem_.v_full.arrive_and_expect(sizeof smem_.v);
    tma_load_rows<Traits::kBlockN, Traits::kHeadDimV, Traits::kStripV, BwdTensorMaps::kRows>(
        arguments_.maps.v, params.v, smem_.v, smem_.v_full, key0, tile_.head, tile_.batch);
    while (true) {
      load_dout(block);
      block = walk.next(block);
      if (!walk.has(block)) return;
      load_q(block);
    }
  }

 private:
  CUTE_DEVICE int row_of(QueryBlock block) const {
    return block.m_block * Traits::kBlockM + static_cast<int>(sequence_.first_q);
  }

  CUTE_DEVICE void load_q(QueryBlock block) {
    const BwdParams& params = arguments_.params;
    hopper::Barrier& full = smem_.q_full[q_.stage];
    smem_.q_empty[q_.stage].wait(q_.parity ^ 1);  // all consumers are done with the stage
    full.arrive_and_expect(sizeof smem_.q[0] + sizeof smem_.stats[0]);
    tma_load_rows<Traits::kBlockM, Traits::kHeadDim, Traits::kStrip>(
        arguments_.maps.q, params.q, smem_.q[q_.stage], full, row_of(block), block.head,
        tile_.batch);
    hopper::bulk_load(params.workspace.stats + index_of(params, tile_, block) * Traits::kBlockM,
                      smem_.stats[q_.stage], sizeof smem_.stats[0], full);
    q_.advance();
  }

  CUTE_DEVICE void load_dout(QueryBlock block) {
    hopper::Barrier& full = smem_.dout_full[dout_.stage];
    smem_.dout_empty[dout_.stage].wait(dout_.parity ^ 1);  // as above
    full.arrive_and_expect(sizeof smem_.dout[0]);
    tma_load_rows<Traits::kBlockM, Traits::kHeadDimV, Traits::kStripV>(
        arguments_.maps.dout, arguments_.params.dout, smem_.dout[dout_.stage], full, row_of(block),
        block.head, tile_.batch);
    dout_.advance();
  }

  const BwdArguments& arguments_;
  TileCoord tile_;
  const Sequence& sequence_;
  SharedMemory& smem_;
  State q_, dout_;
};

}  // namespace flash_cute::sm90
