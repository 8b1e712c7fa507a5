// The producer is one thread. It has TMA bring the tiles of Q, K and V to shared memory, ahead of
// the consumers.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "sm90/fwd/arguments.h"
#include "sm90/fwd/pipeline.h"
#include "sm90/hopper.h"
#include "sm90/kv_source.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask, class KVSource>
class FwdProducer {
  using Pipeline = sm90::Pipeline<Traits, kMask>;
  using SharedMemory = typename Traits::SharedMemory;
  using Tile = typename Traits::Tile;
  static constexpr int kConsumers = Traits::kConsumers;

 public:
  CUTE_DEVICE FwdProducer(const Arguments& arguments, SharedMemory& smem)
      : arguments_(arguments), smem_(smem), kv_source_(arguments.maps, arguments.params) {}

  // Loads what the consumers need for the CTA's work tiles, and tells them which these are.
  CUTE_DEVICE void run(typename Pipeline::Scheduler::Iterator tiles) {
    if constexpr (Pipeline::kIsPacked) {
      for (unsigned parity = 0;; parity ^= 1) {
        smem_.next.found.wait(parity);
        if (smem_.next.tile.row0 == WorkTile::kNoRow) break;
        load_tile(/*index=*/0, [&] { smem_.next.wanted.arrive(); });
      }
    } else {
      const auto& scheduler = Pipeline::scheduler(arguments_);
      const unsigned count = scheduler.count();
      for (unsigned i = tiles.first(scheduler); i < count; i = tiles.next(scheduler)) {
        load_tile(i, [] {});
      }
    }
    Tile none{};
    none.row0 = WorkTile::kNoRow;
    for (int i = 0; i < kConsumers; ++i) {
      announce(i, none);
      smem_.q_full[q_.stage][i].arrive();
    }
  }

 private:
  // Packed, the tile is that of `next`, and has no index.
  // Calls want_next() once, two key blocks ahead of the end, or at the first one. Any earlier, a
  // CTA would hold a tile that another one could begin.
  template <class F>
  CUTE_DEVICE void load_tile(int index, F&& want_next) {
    const FwdParams& params = arguments_.params;
    const PackGqa& pack_gqa = arguments_.pack_gqa;
    Tile tile;
    if constexpr (Pipeline::kIsPacked) {
      tile = smem_.next.tile;
    } else {
      static_cast<WorkTile&>(tile) = Pipeline::scheduler(arguments_).tile(index);
    }
    const Sequence sequence = Pipeline::sequence(arguments_, tile);
    tile.row_end = cute::min(tile.row_end, pack_gqa.rows(sequence.len_q));
    if (tile.row0 >= tile.row_end) return want_next();
    const BlockRange blocks = Pipeline::blocks_of(arguments_, tile);
    constexpr bool kIsOfSplits = Traits::kSplitKV && !Pipeline::kIsPacked;  // the tile's batch
    const int batch = kIsOfSplits ? arguments_.scheduler.batch_of(tile) : tile.batch;
    // K first: the stage of Q may still be in use. Then each next K before V.
    load_k(tile.head, batch, sequence, blocks.end - 1);
    CUTE_UNROLL
    for (int i = 0; i < kConsumers; ++i) {
      announce(i, tile);
      const int row0 = tile.row0 + i * Traits::kConsumerRows;
      if (row0 < tile.row_end) {
        smem_.q_full[q_.stage][i].arrive_and_expect(sizeof smem_.q[0][0]);
        tma_load_rows<Traits::kConsumerRows, Traits::kHeadDim, Traits::kStrip>(
            arguments_.maps.q, params.q, smem_.q[q_.stage][i], smem_.q_full[q_.stage][i],
            pack_gqa.query(row0) + sequence.first_q, tile.head, batch);
      } else {
        smem_.q_full[q_.stage][i].arrive();
      }
    }
    q_.advance();
    const int want_at = cute::min(blocks.begin + 1, blocks.end - 1);
    for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) {
      if (n_block == want_at) want_next();
      if (n_block > blocks.begin) load_k(tile.head, batch, sequence, n_block - 1);
      load_v(tile.head, batch, sequence, n_block);
    }
  }

  // Writes which tile comes next, ahead of the arrival at q_full that makes it visible to the
  // consumer.
  CUTE_DEVICE void announce(int consumer, const Tile& tile) {
    smem_.q_empty[q_.stage][consumer].wait(q_.parity ^ 1);  // the consumer is done with the stage
    smem_.tile[q_.stage][consumer] = tile;
  }

  CUTE_DEVICE void load_k(int head, int batch, const Sequence& sequence, int n_block) {
    smem_.k_empty[k_.stage].wait(k_.parity ^ 1);  // all consumers are done with the stage
    smem_.k_full[k_.stage].arrive_and_expect(sizeof smem_.k[0]);
    kv_source_.load_k(smem_.k[k_.stage], smem_.k_full[k_.stage], sequence, n_block,
                      arguments_.pack_gqa.kv_head(head), batch);
    k_.advance();
  }

  CUTE_DEVICE void load_v(int head, int batch, const Sequence& sequence, int n_block) {
    smem_.v_empty[v_.stage].wait(v_.parity ^ 1);  // all consumers are done with the stage
    smem_.v_full[v_.stage].arrive_and_expect(sizeof smem_.v[0]);
    kv_source_.load_v(smem_.v[v_.stage], smem_.v_full[v_.stage], sequence, n_block,
                      arguments_.pack_gqa.kv_head(head), batch);
    v_.advance();
  }

  const Arguments& arguments_;
  SharedMemory& smem_;
  KVSource kv_source_;
  typename Pipeline::KVState k_, v_;
  typename Pipeline::QState q_;
};

}  // namespace flash_cute::sm90
