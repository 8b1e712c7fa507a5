// The types of one SM90 backward kernel of one pass, and its shared memory.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/element.h"
#include "common/row_grad_stats.h"
#include "host/params.h"
#include "sm90/bwd/one_pass_types.h"
#include "sm90/bwd/tile_queue.h"
#include "sm90/hopper.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute::sm90 {

template <DType kDType, BwdConfigSm90 kConfig_, bool kReadsBias_, bool kStaggers>
struct BwdTraits
    : OnePassTypes<ElementOf<kDType>, kConfig_.head_dim, kConfig_.head_dim_v, kConfig_.block_n()> {
  using Types =
      OnePassTypes<ElementOf<kDType>, kConfig_.head_dim, kConfig_.head_dim_v, kConfig_.block_n()>;
  using typename Types::Element;
  using typename Types::ShapeDout;
  using typename Types::ShapeDs;
  using typename Types::ShapeK;
  using typename Types::ShapeQ;
  using typename Types::ShapeV;
  using Types::kBlockM;
  using Types::kBlockN;

  static constexpr bool kReadsBias = kReadsBias_;
  static constexpr BwdConfigSm90 kConfig = kConfig_;
  static constexpr int kConsumers = kConfig.consumers;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kDsStages = kConfig.kDsStages;
  static constexpr int kLists = 2;  // of blocks of dQ, from the adder to its consumer
  static constexpr int kThreads = kConfig.roles().threads();
  static constexpr int kMinCtas = 1;
  static_assert(kConsumers == 2 || kConsumers == 3);
  using Walk = std::conditional_t<kStaggers, StaggeredWalk<kBlockN / kBlockM>, QueryWalk>;

  // What the barriers mean: pipeline.h.
  struct SharedMemory {
    alignas(1024) Element k[cute::size(ShapeK{})];
    alignas(1024) Element v[cute::size(ShapeV{})];
    alignas(1024) Element q[kStages][cute::size(ShapeQ{})];
    alignas(1024) Element dout[kStages][cute::size(ShapeDout{})];
    alignas(1024) Element ds[kDsStages][cute::size(ShapeDs{})];  // as (keys, query rows)
    alignas(1024) float dq[kConsumers][cute::size(ShapeQ{})];    // on its way to the sums; then dK
                                                                 // and dV on theirs
    alignas(128) TwoRowGradStats stats[kStages][kBlockM / 2];    // comes and goes with Q
    hopper::Barrier k_full;
    hopper::Barrier v_full;
    hopper::Barrier kv_empty;
    hopper::Barrier q_full[kStages];
    hopper::Barrier q_empty[kStages];
    hopper::Barrier dout_full[kStages];
    hopper::Barrier dout_empty[kStages];
    hopper::Barrier ds_full[kDsStages];
    hopper::Barrier ds_empty[kDsStages];
    hopper::Barrier dq_full[kConsumers];
    hopper::Barrier dq_empty[kConsumers];
    hopper::Barrier list_full[kLists][kConsumers];
    hopper::Barrier list_empty[kLists][kConsumers];
    int list[kLists][kConsumers];  // of blocks of dQ that the consumer makes of sums: the first one
    TileQueue<Walk> queue;
  };
  static_assert(sizeof(SharedMemory) == kConfig.smem_bytes(sizeof(Element)));
};

}  // namespace flash_cute::sm90
