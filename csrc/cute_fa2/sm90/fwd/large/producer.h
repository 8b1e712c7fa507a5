// Two threads of the first warpgroup are producers: one has TMA bring Q and K, one V.
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
  static constexpr int kGroups = Traits::kGroups;

 public:
  CUTE_DEVICE LargeFwdProducer(const Arguments& arguments, SharedMemory& smem)
      : arguments_(arguments), smem_(smem) {}

  // Q of each tile, then K from the last block to the first. Tells the consumers the tiles.
  CUTE_DEVICE void run_keys(Iterator tiles) {
    const FwdParams& params = arguments_.params;
    const PackGqa& pack_gqa = arguments_.pack_gqa;
    for_each_tile(tiles, [&](const WorkTile& tile, BlockRange blocks) {
      announce(tile);
      load(arguments_.maps.q, params.q, smem_.k, smem_.k_full, smem_.k_empty,
           pack_gqa.query(tile.row0), tile.head, tile.batch);
      for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) {
        load(arguments_.maps.k, params.k, smem_.k, smem_.k_full, smem_.k_empty,
             n_block * Traits::kBlockN, pack_gqa.kv_head(tile.head), tile.batch);
      }
    });
    WorkTile none{};
    none.row0 = Pipeline::kNoRow;
    announce(none);
  }

  CUTE_DEVICE void run_values(Iterator tiles) {
    for_each_tile(tiles, [&](const WorkTile& tile, BlockRange blocks) {
      for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) {
        load(arguments_.maps.v, arguments_.params.v, smem_.v, smem_.v_full, smem_.v_empty,
             n_block * Traits::kBlockN, arguments_.pack_gqa.kv_head(tile.head), tile.batch);
      }
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

  // Writes which tile comes next, ahead of the arrival that makes it visible to the consumers.
  CUTE_DEVICE void announce(const WorkTile& tile) {
    smem_.tile_empty[tile_.stage].wait(tile_.parity ^ 1);  // all consumers have read the stage
    smem_.tile[tile_.stage] = tile;
    smem_.tile_full[tile_.stage].arrive();
    tile_.advance();
  }

  // 64 rows, from row `row` of (batch, head) on: a chunk for each group of columns.
  template <class View>
  CUTE_DEVICE void load(const CUtensorMap& map, const View& view,
                        Element (&chunks)[Traits::kStages][Traits::kBlockN * Traits::kHeadDimV],
                        hopper::Barrier (&full)[Traits::kStages],
                        hopper::Barrier (&empty)[Traits::kStages], int row, int head, int batch) {
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      empty[chunk_.stage].wait(chunk_.parity ^ 1);  // its reader is done with the stage
      full[chunk_.stage].arrive_and_expect(sizeof chunks[0]);
      tma_load_rows<Traits::kBlockN, Traits::kHeadDimV, Traits::kStrip>(
          map, view, chunks[chunk_.stage], full[chunk_.stage], row, head, batch, 0,
          group * Traits::kHeadDimV);
      chunk_.advance();
    }
  }

  const Arguments& arguments_;
  SharedMemory& smem_;
  typename Pipeline::KVState chunk_;
  typename Pipeline::QState tile_;
};

}  // namespace flash_cute::sm90
