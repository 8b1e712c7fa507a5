// The types of one kernel for a narrow window, and its shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "common/element.h"
#include "common/row_grad_stats.h"
#include "host/params.h"
#include "sm90/bwd/one_pass_types.h"
#include "sm90/bwd/window/stretch.h"
#include "sm90/hopper.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute::sm90 {

template <DType kDType, WindowConfigSm90 kConfig_>
struct WindowTraits
    : OnePassTypes<ElementOf<kDType>, kConfig_.head_dim, kConfig_.head_dim, kConfig_.kBlock> {
  using Types =
      OnePassTypes<ElementOf<kDType>, kConfig_.head_dim, kConfig_.head_dim, kConfig_.kBlock>;
  using typename Types::Element;
  using typename Types::ShapeDs;
  using typename Types::ShapeK;
  using typename Types::ShapeQ;

  static constexpr bool kReadsBias = false;
  static constexpr WindowConfigSm90 kConfig = kConfig_;
  static constexpr int kConsumers = kConfig.kConsumers;
  static constexpr int kKStages = kConfig.kKStages;
  static constexpr int kStages = kConfig.kStages;
  static constexpr int kSpan = kConfig.kSpan;
  static constexpr int kThreads = kConfig.roles().threads();
  static constexpr int kMinCtas = 1;

  // Block i of keys and block j of rows (Stretch) have the places i and j modulo the stages.
  struct SharedMemory {
    alignas(1024) Element k[kKStages][cute::size(ShapeK{})];
    alignas(1024) Element v[kConsumers][cute::size(ShapeK{})];
    alignas(1024) Element q[kStages][cute::size(ShapeQ{})];
    alignas(1024) Element dout[kStages][cute::size(ShapeQ{})];
    alignas(1024) Element ds[kStages][kSpan][cute::size(ShapeDs{})];   // of (j, i - j), as (keys,
                                                                       // query rows)
    alignas(128) TwoRowGradStats stats[kStages][Stretch::kBlock / 2];  // comes and goes with Q
    // Full: what TMA brought is visible to all consumers; the producer arrives, and the bytes.
    hopper::Barrier k_full[kKStages];
    hopper::Barrier v_full[kConsumers];
    hopper::Barrier q_full[kStages];
    hopper::Barrier dout_full[kStages];
    // dS of a block of rows with all keys that it sees is visible to the wgmma of the consumer that
    // computes dQ; the warps arrive that wrote it.
    hopper::Barrier ds_full[kStages];
    // Empty, to the producer: all warps that read the stage are done with it. Of K both consumers
    // are, behind the last dQ of each that reads it. V is one consumer's.
    hopper::Barrier k_empty[kKStages];
    hopper::Barrier v_empty[kConsumers];
    hopper::Barrier q_empty[kStages];
    hopper::Barrier dout_empty[kStages];
    hopper::Barrier ds_empty[kStages];  // to both consumers: dQ is complete
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));

  static CUTE_DEVICE void init_barriers(SharedMemory& smem) {
    constexpr int kWarps = hopper::kWarpgroup / 32;  // of a consumer
    for (int stage = 0; stage < kKStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.k_empty[stage].init(kConsumers * kWarps);  // behind the last dQ of each
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      smem.v_full[consumer].init(1);
      smem.v_empty[consumer].init(kWarps);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      smem.q_full[stage].init(1);
      smem.dout_full[stage].init(1);
      smem.ds_full[stage].init(kSpan * kWarps);
      smem.q_empty[stage].init(hopper::kArrivalsOfWarp * kConsumers * kWarps);
      smem.dout_empty[stage].init(kConsumers * kWarps);
      smem.ds_empty[stage].init(kWarps);
    }
  }
};

}  // namespace flash_cute::sm90
