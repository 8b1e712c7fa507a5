// Two threads of the first warpgroup are producers: one has TMA bring half of Q and K, one the
// other half and V.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/mask.h"
#include "common/sequence.h"
#include "sm90/fwd/arguments.h"
#include "sm90/fwd/pipeline.h"
#include "sm90/hopper.h"
#include "sm90/kv_source.h"
#include "sm90/pipeline_state.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class LargeFwdProducer {
  using Pipeline = sm90::Pipeline<Traits, kMask>;
  using SharedMemory = typename Traits::SharedMemory;
  using Element = typename Traits::Element;
  using Iterator = typename Pipeline::Scheduler::Iterator;

 public:
  CUTE_DEVICE LargeFwdProducer(const Arguments& arguments, SharedMemory& smem)
      : arguments_(arguments), smem_(smem) {}

  // Half of Q of each tile, then K from the last block to the first. Tells the consumers the tiles.
  CUTE_DEVICE void run_keys(Iterator tiles) {
    PipelineState<Traits::kStages> k;
    for_each_tile(tiles, [&](const WorkTile& tile, BlockRange blocks) {
      announce(tile);
      const int query = arguments_.pack_gqa.query(tile.row0);
      CUTE_NO_UNROLL
      for (int chunk = 0; chunk < Traits::kChunksOfGroup; ++chunk) {
        load_k(arguments_.maps.q, arguments_.params.q, k, query, tile.head, tile.batch, chunk);
      }
      for_each_chunk<Traits::kGroups * Traits::kChunksOfGroup>(blocks, [&](int row, int chunk) {
        load_k(arguments_.maps.k, arguments_.params.k, k, row,
               arguments_.pack_gqa.kv_head(tile.head), tile.batch, chunk);
      });
    });
    WorkTile none{};
    none.row0 = WorkTile::kNoRow;
    announce(none);
  }

  // The other half of Q, which waits for the last S of the tile before, then V. Each group of V's
  // columns has a ring of its own: its consumer has to see all phases of a barrier.
  CUTE_DEVICE void run_values(Iterator tiles) {
    PipelineState<Traits::kVStages> v;
    uint32_t q_parity = 1;
    for_each_tile(tiles, [&](const WorkTile& tile, BlockRange blocks) {
      smem_.q_empty.wait(q_parity);  // the products of the tile before are done with it
      q_parity ^= 1;
      smem_.q_full.arrive_and_expect(sizeof smem_.q);
      CUTE_NO_UNROLL
      for (int chunk = 0; chunk < Traits::kChunksOfGroup; ++chunk) {
        load(arguments_.maps.q, arguments_.params.q, smem_.q[chunk], smem_.q_full,
             arguments_.pack_gqa.query(tile.row0), tile.head, tile.batch,
             Traits::kChunksOfGroup + chunk);
      }
      for_each_chunk<Traits::kChunksOfGroup>(blocks, [&](int row, int chunk) {
        CUTE_NO_UNROLL
        for (int group = 0; group < Traits::kGroups; ++group) {
          hopper::Barrier& full = smem_.v_full[group][v.stage];
          smem_.v_empty[group][v.stage].wait(v.parity ^ 1);  // the consumer is done with the stage
          full.arrive_and_expect(sizeof smem_.v[0][0]);
          load(arguments_.maps.v, arguments_.params.v, smem_.v[group][v.stage], full, row,
               arguments_.pack_gqa.kv_head(tile.head), tile.batch,
               group * Traits::kChunksOfGroup + chunk);
        }
        v.advance();
      });
    });
  }

 private:
  template <class Visit>
  CUTE_DEVICE void for_each_tile(Iterator tiles, const Visit& visit) const {
    const auto& scheduler = Pipeline::scheduler(arguments_);
    const unsigned count = scheduler.count();
    for (unsigned i = tiles.first(scheduler); i < count; i = tiles.next(scheduler)) {
      WorkTile tile = scheduler.tile(i);
      tile.row_end = cute::min(tile.row_end, arguments_.pack_gqa.rows(arguments_.params.len_q));
      if (tile.row0 < tile.row_end) visit(tile, Pipeline::blocks_of(arguments_, tile));
    }
  }

  // visit(first key, number) of kCount chunks of each block, from the last block on.
  template <int kCount, class Visit>
  static CUTE_DEVICE void for_each_chunk(BlockRange blocks, const Visit& visit) {
    CUTE_NO_UNROLL
    for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) {
      CUTE_NO_UNROLL
      for (int chunk = 0; chunk < kCount; ++chunk) {
        visit(n_block * Traits::kBlockN, chunk);
      }
    }
  }

  // Writes which tile comes next, ahead of the arrival that makes it visible to the consumers.
  CUTE_DEVICE void announce(const WorkTile& tile) {
    smem_.tile_empty[tile_.stage].wait(tile_.parity ^ 1);  // all consumers have read the stage
    smem_.tile[tile_.stage] = tile;
    smem_.tile_full[tile_.stage].arrive();
    tile_.advance();
  }

  template <class View>
  CUTE_DEVICE void load_k(const CUtensorMap& map, const View& view,
                          PipelineState<Traits::kStages>& k, int row, int head, int batch,
                          int chunk) {
    smem_.k_empty[k.stage].wait(k.parity ^ 1);  // the consumer is done with the stage
    smem_.k_full[k.stage].arrive_and_expect(sizeof smem_.k[0]);
    load(map, view, smem_.k[k.stage], smem_.k_full[k.stage], row, head, batch, chunk);
    k.advance();
  }

  // The chunk of columns of that number of 64 rows, from row `row` of (batch, head) on.
  template <class View>
  static CUTE_DEVICE void load(const CUtensorMap& map, const View& view, Element* target,
                               hopper::Barrier& full, int row, int head, int batch, int chunk) {
    tma_load_rows<Traits::kBlockN, Traits::kChunkColumns, Traits::kStrip>(
        map, view, target, full, row, head, batch, 0, chunk * Traits::kChunkColumns);
  }

  const Arguments& arguments_;
  SharedMemory& smem_;
  typename Pipeline::QState tile_;
};

}  // namespace flash_cute::sm90
