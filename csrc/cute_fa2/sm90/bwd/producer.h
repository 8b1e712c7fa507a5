// A producer is one thread. Of each tile it first has TMA bring the first block of Q, dO and the
// rows' statistics, for which a free stage is enough. K and V follow once all consumers are done
// with the tile before, then the other blocks.
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

// What a producer loads. Where one consumer releases Q and another dO, each has its own producer.
// So no load waits for the other's stage.
enum class Loads { kAll, kKAndQ, kVAndDout };

template <class Traits, bool kIsPacked, Loads kLoads = Loads::kAll>
class BwdProducer {
  using SharedMemory = typename Traits::SharedMemory;
  using Walk = typename Traits::Walk;
  using KeyTile = sm90::KeyTile<Walk>;

 public:
  CUTE_DEVICE BwdProducer(const BwdArguments& arguments, SharedMemory& smem)
      : arguments_(arguments), smem_(smem) {}

  // Loads for one tile.
  CUTE_DEVICE void run(const KeyTile& tile) {
    const Walk& walk = tile.walk;
    if (walk.is_empty()) return;
    const BwdParams& params = arguments_.params;
    const int key0 = tile.at.m_block * Traits::kBlockN;
    // In registers: shared memory would be read again behind each wait.
    const TileCoord at = tile.at;
    const RowsOfSequence queries = {tile.sequence.first_q, tile.sequence.len_q, params.len_q};
    const RowsOfSequence keys = {tile.sequence.first_k, tile.sequence.len_k, params.len_k};
    const int first_index = tile.first_index;
    QueryBlock block = walk.first();
    load(at.batch, queries, first_index, block);
    // All consumers are done with the tile before.
    smem_.kv_empty.wait((block_ & kKvParity) != 0 ? 0 : 1);
    block_ ^= kKvParity;
    if constexpr (kHasQ) {
      smem_.k_full.arrive_and_expect(sizeof smem_.k);
      tma_load_rows_of<kIsPacked, Traits::kBlockN, Traits::kHeadDim, Traits::kStrip, kBoxRows>(
          arguments_.maps.k, arguments_.maps.ragged_k, params.k, smem_.k, smem_.k_full, key0, keys,
          at.head, at.batch);
    }
    if constexpr (kHasDout) {
      smem_.v_full.arrive_and_expect(sizeof smem_.v);
      tma_load_rows_of<kIsPacked, Traits::kBlockN, Traits::kHeadDimV, Traits::kStripV, kBoxRows>(
          arguments_.maps.v, arguments_.maps.ragged_v, params.v, smem_.v, smem_.v_full, key0, keys,
          at.head, at.batch);
    }
    while (true) {
      block = walk.next(block);
      if (!walk.has(block)) return;
      load(at.batch, queries, first_index, block);
    }
  }

 private:
  static constexpr bool kHasQ = kLoads != Loads::kVAndDout;
  static constexpr bool kHasDout = kLoads != Loads::kKAndQ;
  static constexpr int kBoxRows = BwdTensorMaps::kRows;
  static_assert(Traits::kBlockM == kBoxRows);  // so a block's box begins inside of its sequence

  CUTE_DEVICE void load(int batch, const RowsOfSequence& queries, int first_index,
                        QueryBlock block) {
    const BwdParams& params = arguments_.params;
    // With stages in a power of two the highest bit does no harm, and a register is saved.
    constexpr bool kMasks = (Traits::kStages & (Traits::kStages - 1)) != 0;
    const unsigned count = kMasks ? block_ & ~kKvParity : block_;
    const unsigned stage = count % Traits::kStages, parity = count / Traits::kStages % 2;
    ++block_;
    const int row0 = block.m_block * Traits::kBlockM;

    if constexpr (kHasQ) {
      hopper::Barrier& full = smem_.q_full[stage];
      smem_.q_empty[stage].wait(parity ^ 1);  // all consumers are done with the stage
      full.arrive_and_expect(sizeof smem_.q[0] + sizeof smem_.stats[0]);
      const int64_t index = index_of(params, first_index, block);
      hopper::bulk_load(params.workspace.stats + index * Traits::kBlockM, smem_.stats[stage],
                        sizeof smem_.stats[0], full);
      tma_load_rows_of<kIsPacked, Traits::kBlockM, Traits::kHeadDim, Traits::kStrip, kBoxRows,
                       true>(arguments_.maps.q, arguments_.maps.ragged_q, params.q, smem_.q[stage],
                             full, row0, queries, block.head, batch);
    }
    if constexpr (kHasDout) {
      hopper::Barrier& full = smem_.dout_full[stage];
      smem_.dout_empty[stage].wait(parity ^ 1);  // as above
      full.arrive_and_expect(sizeof smem_.dout[0]);
      tma_load_rows_of<kIsPacked, Traits::kBlockM, Traits::kHeadDimV, Traits::kStripV, kBoxRows,
                       true>(arguments_.maps.dout, arguments_.maps.ragged_dout, params.dout,
                             smem_.dout[stage], full, row0, queries, block.head, batch);
    }
  }

  const BwdArguments& arguments_;
  SharedMemory& smem_;
  // Counts blocks of all its tiles, which gives stage and parity; the highest bit is the parity of
  // K and V. One register for all, as the producer has few.
  static constexpr unsigned kKvParity = 1u << 31;
  unsigned block_ = 0;
};

}  // namespace flash_cute::sm90
