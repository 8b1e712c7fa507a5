// The producers of a stretch: one thread for blocks of query rows, another one for blocks of keys.
// Each waits for a free stage only, and not for the other's.
#pragma once

#include <cute/config.hpp>

#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm90/bwd/arguments.h"
#include "sm90/bwd/query_walk.h"
#include "sm90/bwd/window/stretch.h"
#include "sm90/hopper.h"
#include "sm90/kv_source.h"

namespace flash_cute::sm90 {

template <class Traits, bool kIsPacked>
class WindowProducer {
  using SharedMemory = typename Traits::SharedMemory;
  using PlacedTile = BwdArguments::PlacedTile;

 public:
  CUTE_DEVICE WindowProducer(const BwdArguments& arguments, const PlacedTile& tile,
                             const Stretch& stretch, SharedMemory& smem)
      : maps_(arguments.maps),
        params_(arguments.params),
        tile_(tile),
        stretch_(stretch),
        smem_(smem) {}

  // Q, dO and the rows' statistics.
  CUTE_DEVICE void load_rows() const {
    const Sequence& sequence = tile_.sequence;
    const RowsOfSequence rows = {sequence.first_q, sequence.len_q, params_.len_q};
    const int head = tile_.at.head, batch = tile_.at.batch;
    CUTE_NO_UNROLL
    for (int j = 0; j < stretch_.reading; ++j) {
      const int stage = j % Traits::kStages, parity = j / Traits::kStages % 2;
      hopper::Barrier& q_full = smem_.q_full[stage];
      smem_.q_empty[stage].wait(parity ^ 1);
      q_full.arrive_and_expect(sizeof smem_.q[0] + sizeof smem_.stats[0]);
      const int64_t index = index_of(params_, tile_.first_index, {head, stretch_.first + j});
      hopper::bulk_load(params_.workspace.stats + index * Stretch::kBlock, smem_.stats[stage],
                        sizeof smem_.stats[0], q_full);
      tma_load_rows_of<kIsPacked, Stretch::kBlock, Traits::kHeadDim, Traits::kStrip,
                       Stretch::kBlock, true>(maps_.q, maps_.ragged_q, params_.q, smem_.q[stage],
                                              q_full, stretch_.row0(j), rows, head, batch);
      hopper::Barrier& dout_full = smem_.dout_full[stage];
      smem_.dout_empty[stage].wait(parity ^ 1);
      dout_full.arrive_and_expect(sizeof smem_.dout[0]);
      tma_load_rows_of<kIsPacked, Stretch::kBlock, Traits::kHeadDim, Traits::kStrip,
                       Stretch::kBlock, true>(maps_.dout, maps_.ragged_dout, params_.dout,
                                              smem_.dout[stage], dout_full, stretch_.row0(j), rows,
                                              head, batch);
    }
  }

  // K and V. Where there are no keys they become zeros: dQ's product reads them.
  CUTE_DEVICE void load_keys() const {
    const Sequence& sequence = tile_.sequence;
    const RowsOfSequence keys = {sequence.first_k, sequence.len_k, params_.len_k};
    const int head = tile_.at.head, batch = tile_.at.batch;
    CUTE_NO_UNROLL
    for (int i = 0; i < stretch_.keys(); ++i) {
      const int row = stretch_.has_keys(i) ? stretch_.key0(i) : sequence.len_k;
      const int stage = i % Traits::kKStages;
      smem_.k_empty[stage].wait((i / Traits::kKStages % 2) ^ 1);  // fault: window-k-empty
      smem_.k_full[stage].arrive_and_expect(sizeof smem_.k[0]);
      tma_load_rows_of<kIsPacked, Stretch::kBlock, Traits::kHeadDim, Traits::kStrip>(
          maps_.k, maps_.ragged_k, params_.k, smem_.k[stage], smem_.k_full[stage], row, keys, head,
          batch);
      const int consumer = i % Traits::kConsumers;
      smem_.v_empty[consumer].wait((i / Traits::kConsumers % 2) ^ 1);
      smem_.v_full[consumer].arrive_and_expect(sizeof smem_.v[0]);
      tma_load_rows_of<kIsPacked, Stretch::kBlock, Traits::kHeadDim, Traits::kStrip>(
          maps_.v, maps_.ragged_v, params_.v, smem_.v[consumer], smem_.v_full[consumer], row, keys,
          head, batch);
    }
  }

 private:
  const BwdTensorMaps& maps_;
  const BwdParams& params_;
  const PlacedTile& tile_;
  const Stretch& stretch_;
  SharedMemory& smem_;
};

}  // namespace flash_cute::sm90
