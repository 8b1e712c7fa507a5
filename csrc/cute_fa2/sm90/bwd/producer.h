// The producer is one thread. For each tile it has TMA bring K and V, and block after block of Q, dO
// and the rows' statistics, ahead of the consumers.
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
  CUTE_DEVICE BwdProducer(const BwdArguments& arguments, SharedMemory& smem)
      : arguments_(arguments), smem_(smem) {}

  // Loads for one tile.
  CUTE_DEVICE void run(TileCoord tile, const Sequence& sequence, const QueryWalk& walk) {
    if (walk.is_empty()) return;
    tile_ = tile;
    first_q_ = static_cast<int>(sequence.first_q);
    const BwdParams& params = arguments_.params;
    const int key0 = tile.m_block * Traits::kBlockN + static_cast<int>(sequence.first_k);
    QueryBlock block = walk.first();
    load(block);
    smem_.kv_empty.wait(kv_parity_ ^ 1);  // all consumers are done with the tile before
    kv_parity_ ^= 1;
    smem_.k_full.arrive_and_expect(sizeof smem_.k);
    tma_load_rows<Traits::kBlockN, Traits::kHeadDim, Traits::kStrip, BwdTensorMaps::kRows>(
        arguments_.maps.k, params.k, smem_.k, smem_.k_full, key0, tile.head, tile.batch);
    smem_.v_full.arrive_and_expect(sizeof smem_.v);
    tma_load_rows<Traits::kBlockN, Traits::kHeadDimV, Traits::kStripV, BwdTensorMaps::kRows>(
        arguments_.maps.v, params.v, smem_.v, smem_.v_full, key0, tile.head, tile.batch);
    while (true) {
      block = walk.next(block);
      if (!walk.has(block)) return;
      load(block);
    }
  }

 private:
  CUTE_DEVICE int row_of(QueryBlock block) const {
    return block.m_block * Traits::kBlockM + first_q_;
  }

  CUTE_DEVICE void load(QueryBlock block) {
    load_q(block);
    load_dout(block);
    stage_.advance();
  }

  CUTE_DEVICE void load_q(QueryBlock block) {
    const BwdParams& params = arguments_.params;
    hopper::Barrier& full = smem_.q_full[stage_.stage];
    smem_.q_empty[stage_.stage].wait(stage_.parity ^ 1);  // all consumers are done with the stage
    full.arrive_and_expect(sizeof smem_.q[0] + sizeof smem_.stats[0]);
    tma_load_rows<Traits::kBlockM, Traits::kHeadDim, Traits::kStrip>(
        arguments_.maps.q, params.q, smem_.q[stage_.stage], full, row_of(block), block.head,
        tile_.batch);
    hopper::bulk_load(params.workspace.stats + int64_t{index_of(params, tile_, block)} * Traits::kBlockM,
                      smem_.stats[stage_.stage], sizeof smem_.stats[0], full);
  }

  CUTE_DEVICE void load_dout(QueryBlock block) {
    hopper::Barrier& full = smem_.dout_full[stage_.stage];
    smem_.dout_empty[stage_.stage].wait(stage_.parity ^ 1);  // as above
    full.arrive_and_expect(sizeof smem_.dout[0]);
    tma_load_rows<Traits::kBlockM, Traits::kHeadDimV, Traits::kStripV>(
        arguments_.maps.dout, arguments_.params.dout, smem_.dout[stage_.stage], full, row_of(block),
        block.head, tile_.batch);
  }

  const BwdArguments& arguments_;
  SharedMemory& smem_;
  TileCoord tile_;
  int first_q_;
  State stage_;
  uint32_t kv_parity_ = 0;
};

}  // namespace flash_cute::sm90
