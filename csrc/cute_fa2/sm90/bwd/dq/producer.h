// The producer of a tile of dQ is one thread. It has TMA bring Q and dO, and then block after block
// of K and V, ahead of the consumers.
#pragma once

#include <cute/config.hpp>

#include "common/mask.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/hopper.h"
#include "sm90/kv_source.h"
#include "sm90/pipeline_state.h"

namespace flash_cute::sm90 {

template <class Traits, bool kIsPacked>
class DqProducer {
  using SharedMemory = typename Traits::SharedMemory;

 public:
  CUTE_DEVICE DqProducer(const BwdArguments& arguments, TileCoord tile, const Sequence& sequence,
                         SharedMemory& smem)
      : maps_(arguments.maps),
        params_(arguments.params),
        tile_(tile),
        head_kv_(arguments.group_size.div(tile.head)),
        sequence_(sequence),
        smem_(smem) {}

  // `keys`: the blocks of keys that the tile sees, from the last to the first.
  CUTE_DEVICE void run(BlockRange keys) {
    if (keys.end <= keys.begin) return;
    const int row0 = tile_.m_block * Traits::kBlockM;
    const RowsOfSequence queries = {sequence_.first_q, sequence_.len_q, params_.len_q};
    smem_.q_full.arrive_and_expect(sizeof smem_.q);
    for (int i = 0; i < Traits::kConsumers; ++i) {
      tma_load_rows_of<kIsPacked, Traits::kConsumerRows, Traits::kHeadDim, Traits::kStrip>(
          maps_.q, maps_.ragged_q, params_.q, smem_.q[i], smem_.q_full,
          row0 + i * Traits::kConsumerRows, queries, tile_.head, tile_.batch);
    }
    load_k(keys.end - 1);
    smem_.dout_full.arrive_and_expect(sizeof smem_.dout);
    for (int i = 0; i < Traits::kConsumers; ++i) {
      tma_load_rows_of<kIsPacked, Traits::kConsumerRows, Traits::kHeadDimV, Traits::kStripV>(
          maps_.dout, maps_.ragged_dout, params_.dout, smem_.dout[i], smem_.dout_full,
          row0 + i * Traits::kConsumerRows, queries, tile_.head, tile_.batch);
    }
    for (int n_block = keys.end - 1;; --n_block) {
      load_v(n_block);
      if (n_block == keys.begin) return;
      load_k(n_block - 1);
    }
  }

 private:
  CUTE_DEVICE RowsOfSequence keys() const {
    return {sequence_.first_k, sequence_.len_k, params_.len_k};
  }

  CUTE_DEVICE void load_k(int n_block) {
    hopper::Barrier& full = smem_.k_full[k_.stage];
    smem_.k_empty[k_.stage].wait(k_.parity ^ 1);  // all consumers are done with the stage
    full.arrive_and_expect(sizeof smem_.k[0]);
    tma_load_rows_of<kIsPacked, Traits::kBlockN, Traits::kHeadDim, Traits::kStrip, kBoxRows>(
        maps_.k, maps_.ragged_k, params_.k, smem_.k[k_.stage], full, n_block * Traits::kBlockN,
        keys(), head_kv_, tile_.batch);
    k_.advance();
  }

  CUTE_DEVICE void load_v(int n_block) {
    hopper::Barrier& full = smem_.v_full[v_.stage];
    smem_.v_empty[v_.stage].wait(v_.parity ^ 1);  // as above
    full.arrive_and_expect(sizeof smem_.v[0]);
    tma_load_rows_of<kIsPacked, Traits::kBlockN, Traits::kHeadDimV, Traits::kStripV, kBoxRows>(
        maps_.v, maps_.ragged_v, params_.v, smem_.v[v_.stage], full, n_block * Traits::kBlockN,
        keys(), head_kv_, tile_.batch);
    v_.advance();
  }

  static constexpr int kBoxRows = BwdTensorMaps::kRows;

  const BwdTensorMaps& maps_;
  const BwdParams& params_;
  TileCoord tile_;
  int head_kv_;
  const Sequence& sequence_;
  SharedMemory& smem_;
  PipelineState<Traits::kStagesK> k_;
  PipelineState<Traits::kStagesV> v_;
};

}  // namespace flash_cute::sm90
