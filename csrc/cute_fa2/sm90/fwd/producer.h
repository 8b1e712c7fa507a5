// The producer: one thread, which has the copy engine bring the tiles of Q, K and V to shared
// memory ahead of the consumers that need them.
#pragma once

#include <cute/config.hpp>

#include "common/mask.h"
#include "sm90/fwd/arguments.h"
#include "sm90/hopper.h"
#include "sm90/pipeline.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class FwdProducer {
  using Pipeline = sm90::Pipeline<Traits, kMask>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kBlockN = Traits::kBlockN;

 public:
  CUTE_DEVICE FwdProducer(const Arguments& arguments, SharedMemory& smem)
      : arguments_(arguments), smem_(smem) {}

  // Loads what the consumers need for the block's tiles, and tells them which these are.
  CUTE_DEVICE void run(TileScheduler::Tiles tiles) {
    for (int i; arguments_.scheduler.has(i = tiles.next(arguments_.scheduler));) load_tile(i);
    for (int i = 0; i < kConsumers; ++i) {
      announce(i, Pipeline::kNoTile);
      smem_.q_full[q_.stage][i].arrive();
    }
  }

 private:
  CUTE_DEVICE void load_tile(int index) {
    const FwdParams& params = arguments_.params;
    const WorkTile tile = arguments_.scheduler.tile(index, arguments_.pack_gqa.count(params.len_q));
    if (tile.row0 >= tile.row_end) return;
    const BlockRange blocks = Pipeline::blocks_of(arguments_, tile);
    const int batch = Traits::kSplits ? arguments_.scheduler.sequence(tile) : tile.batch;
    // In the order in which the consumers need them: K, Q; the next K before V.
    load_k(tile.head, batch, blocks.end - 1);
    CUTE_UNROLL
    for (int i = 0; i < kConsumers; ++i) {
      announce(i, tile);
      const int row0 = tile.row0 + i * Traits::kConsumerRows;
      if (row0 < tile.row_end) {
        smem_.q_full[q_.stage][i].arrive_and_expect(sizeof smem_.q[0][0]);
        load_rows<Traits::kConsumerRows>(arguments_.q, params.q, smem_.q[q_.stage][i],
                                         smem_.q_full[q_.stage][i], arguments_.pack_gqa.query(row0),
                                         tile.head, batch);
      } else {
        smem_.q_full[q_.stage][i].arrive();
      }
    }
    q_.advance();
    for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) {
      if (n_block > blocks.begin) load_k(tile.head, batch, n_block - 1);
      load_v(tile.head, batch, n_block);
    }
  }

  CUTE_DEVICE void announce(int consumer, WorkTile tile) {
    smem_.q_empty[q_.stage][consumer].wait(q_.parity ^ 1);  // it is done with the stage
    smem_.tile[q_.stage][consumer] = tile;
  }

  CUTE_DEVICE void load_k(int head, int batch, int n_block) {
    load_block(arguments_.k, arguments_.params.k, smem_.k, smem_.k_full, smem_.k_empty, k_, head,
               batch, n_block);
  }
  // Rows past the last key become zeros, as they are outside of the map: their weight is 0, but
  // 0 x NaN would be NaN. (Packed sequences, which have neighbours there, would have to see to
  // it.)
  CUTE_DEVICE void load_v(int head, int batch, int n_block) {
    load_block(arguments_.v, arguments_.params.v, smem_.v, smem_.v_full, smem_.v_empty, v_, head,
               batch, n_block);
  }

  template <class View, class Stages>
  CUTE_DEVICE void load_block(const CUtensorMap& map, const View& view, Stages& stages,
                              hopper::Barrier* full, hopper::Barrier* empty,
                              typename Pipeline::KVState& ring, int head, int batch, int n_block) {
    empty[ring.stage].wait(ring.parity ^ 1);  // all consumers are done with the stage
    full[ring.stage].arrive_and_expect(sizeof stages[0]);
    load_rows<kBlockN>(map, view, stages[ring.stage], full[ring.stage], n_block * kBlockN,
                       arguments_.pack_gqa.kv_head(head), batch);
    ring.advance();
  }

  // kRows whole rows, a box for each strip of columns. An expanded dimension has one entry in the
  // map.
  template <int kRows, class View>
  CUTE_DEVICE void load_rows(const CUtensorMap& map, const View& view, Element* target,
                             hopper::Barrier& arrival, int row, int head, int batch) const {
    CUTE_UNROLL
    for (int column = 0; column < Traits::kHeadDim; column += Traits::kStrip) {
      hopper::tma_load(map, target + column * kRows, arrival, column, 0, row,
                       view.stride_head != 0 ? head : 0, view.stride_batch != 0 ? batch : 0);
    }
  }

  const Arguments& arguments_;
  SharedMemory& smem_;
  typename Pipeline::KVState k_, v_;
  typename Pipeline::QState q_;
};

}  // namespace flash_cute::sm90
