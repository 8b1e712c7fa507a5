// The producer is one thread. For each tile it has TMA bring K and V, and block after block of Q,
// dO and the rows' statistics, ahead of the consumers.
#pragma once

#include <cute/config.hpp>

#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/tile_queue.h"
#include "sm90/hopper.h"
#include "sm90/kv_source.h"

namespace flash_cute::sm90 {

template <class Traits, bool kIsPacked>
class BwdProducer {
  using SharedMemory = typename Traits::SharedMemory;

 public:
  CUTE_DEVICE BwdProducer(const BwdArguments& arguments, SharedMemory& smem)
      : arguments_(arguments), smem_(smem) {}

  // Loads for one tile.
  CUTE_DEVICE void run(const KeyTile& tile) {
    const QueryWalk& walk = tile.walk;
    if (walk.is_empty()) return;
    const BwdParams& params = arguments_.params;
    const int key0 = tile.at.m_block * Traits::kBlockN;
    QueryBlock block = walk.first();
    load(tile, block);
    // All consumers are done with the tile before.
    smem_.kv_empty.wait((block_ & kKvParity) != 0 ? 0 : 1);
    block_ ^= kKvParity;
    smem_.k_full.arrive_and_expect(sizeof smem_.k);
    tma_load_rows_of<kIsPacked, Traits::kBlockN, Traits::kHeadDim, Traits::kStrip, kBoxRows>(
        arguments_.maps.k, arguments_.maps.ragged_k, params.k, smem_.k, smem_.k_full, key0,
        keys_of(tile), tile.at.head, tile.at.batch);
    smem_.v_full.arrive_and_expect(sizeof smem_.v);
    tma_load_rows_of<kIsPacked, Traits::kBlockN, Traits::kHeadDimV, Traits::kStripV, kBoxRows>(
        arguments_.maps.v, arguments_.maps.ragged_v, params.v, smem_.v, smem_.v_full, key0,
        keys_of(tile), tile.at.head, tile.at.batch);
    while (true) {
      block = walk.next(block);
      if (!walk.has(block)) return;
      load(tile, block);
    }
  }

 private:
  static constexpr int kBoxRows = BwdTensorMaps::kRows;
  static_assert(Traits::kBlockM == kBoxRows);  // so a block's box begins inside of its sequence

  CUTE_DEVICE RowsOfSequence keys_of(const KeyTile& tile) const {
    return {tile.sequence.first_k, tile.sequence.len_k, arguments_.params.len_k};
  }
  CUTE_DEVICE RowsOfSequence queries_of(const KeyTile& tile) const {
    return {tile.sequence.first_q, tile.sequence.len_q, arguments_.params.len_q};
  }

  CUTE_DEVICE void load(const KeyTile& tile, QueryBlock block) {
    const BwdParams& params = arguments_.params;
    const unsigned stage = block_ % Traits::kStages, parity = block_ / Traits::kStages % 2;
    ++block_;
    const int row0 = block.m_block * Traits::kBlockM;

    hopper::Barrier& q_full = smem_.q_full[stage];
    smem_.q_empty[stage].wait(parity ^ 1);  // all consumers are done with the stage
    q_full.arrive_and_expect(sizeof smem_.q[0] + sizeof smem_.stats[0]);
    const int64_t index = index_of(params, tile.first_index, block);
    hopper::bulk_load(params.workspace.stats + index * Traits::kBlockM, smem_.stats[stage],
                      sizeof smem_.stats[0], q_full);
    tma_load_rows_of<kIsPacked, Traits::kBlockM, Traits::kHeadDim, Traits::kStrip, kBoxRows, true>(
        arguments_.maps.q, arguments_.maps.ragged_q, params.q, smem_.q[stage], q_full, row0,
        queries_of(tile), block.head, tile.at.batch);

    hopper::Barrier& dout_full = smem_.dout_full[stage];
    smem_.dout_empty[stage].wait(parity ^ 1);  // as above
    dout_full.arrive_and_expect(sizeof smem_.dout[0]);
    tma_load_rows_of<kIsPacked, Traits::kBlockM, Traits::kHeadDimV, Traits::kStripV, kBoxRows,
                     true>(arguments_.maps.dout, arguments_.maps.ragged_dout, params.dout,
                           smem_.dout[stage], dout_full, row0, queries_of(tile), block.head,
                           tile.at.batch);
  }

  const BwdArguments& arguments_;
  SharedMemory& smem_;
  // Counts blocks of all its tiles, which gives stage and parity; the highest bit is the parity of
  // K and V. One register for all, as the producer has few.
  static constexpr unsigned kKvParity = 1u << 31;
  unsigned block_ = 0;
};

}  // namespace flash_cute::sm90
