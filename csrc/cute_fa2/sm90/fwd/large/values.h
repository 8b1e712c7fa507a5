// A warpgroup that computes O += P V for a group of columns, one key block at a time.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/platform.h"
#include "sm90/fwd/arguments.h"
#include "sm90/fwd/pipeline.h"
#include "sm90/hopper.h"
#include "sm90/pipeline_state.h"
#include "sm90/shared_operand.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits, MaskKind kMask>
class ValuesMainloop {
  using Pipeline = sm90::Pipeline<Traits, kMask>;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kChunks = Traits::kChunksOfGroup;
  using VState = PipelineState<Traits::kVStages>;

 public:
  CUTE_DEVICE ValuesMainloop(const Arguments& arguments, SharedMemory& smem, int group)
      : arguments_(arguments),
        smem_(smem),
        group_(group),
        p_operand_(Traits::fragment_p(smem.p[0])),
        v_operand_(Traits::fragment_vt(smem.v[group][0])) {}

  // Works on the tiles that the producer announces. `finish_tile(tile, tOrO)` takes the result,
  // ((2, 2, kHeadDimV / 8), 1, 1), normalised.
  template <class FinishTile>
  CUTE_DEVICE void run(FinishTile&& finish_tile) {
    using namespace cute;
    auto tOrO = partition_fragment_C(typename Traits::MmaO{}, typename Traits::ShapeO{});
    auto out = as_matrix(tOrO);  // (rows, columns)
    while (true) {
      smem_.tile_full[tile_.stage].wait(tile_.parity);  // `tile` is written
      const WorkTile tile = smem_.tile[tile_.stage];
      smem_.tile_empty[tile_.stage].arrive();  // each thread: each has read `tile`
      tile_.advance();
      if (tile.row0 == WorkTile::kNoRow) return;
      const BlockRange blocks = Pipeline::blocks_of(arguments_, tile);
      clear(tOrO);
      CUTE_NO_UNROLL
      for (int i = blocks.begin; i < blocks.end; ++i) {
        smem_.p_full[p_.stage].wait(p_.parity);  // P and factors are written; fault: p-full
        rescale(out);
        gemm_pv(tOrO);
      }
      smem_.p_full[p_.stage].wait(p_.parity);  // the last factors are written
      normalize(out);
      release_p();
      finish_tile(tile, tOrO);
      hopper::sync_warp();  // for ptxas, see FwdMainloop
    }
  }

 private:
  CUTE_DEVICE float factor(int row) const {
    const int lane = hopper::thread_in_warpgroup() % 32;
    const int first = hopper::warp_in_warpgroup() * Traits::kWarpRows + lane / 4;
    return smem_.factors[p_.stage][first + 8 * row];
  }

  // Where a limit has been raised, which is rare behind the first block.
  template <class Out>
  CUTE_DEVICE void rescale(Out& out) const {
    const float factors[2] = {factor(0), factor(1)};
    if (!platform::any_in_warp(factors[0] != 1.f || factors[1] != 1.f)) return;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= factors[r];
    }
  }

  // A row without a key, whose factor is 0, gets out = 0 whatever V has.
  template <class Out>
  CUTE_DEVICE void normalize(Out& out) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float by = factor(r);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) = by == 0.f ? 0.f : out(r, c) * by;
    }
  }

  // O += P V, and releases both.
  template <class Out>
  CUTE_DEVICE void gemm_pv(Out& tOrO) {
    using namespace cute;
    typename Traits::MmaO mma;
    VState v = v_;
    warpgroup_fence_operand(tOrO);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      smem_.v_full[group_][v.stage].wait(v.parity);  // the chunk of V has arrived
      hopper::wgmma_fence();                         // shows O to the products
      auto tOrOc = make_tensor(tOrO(_, _, chunk).data(), append<3>(tOrO(_, _, chunk).layout()));
      CUTE_UNROLL
      for (int step = 0; step < Traits::kBlockN / 16; ++step) {
        gemm(mma, p_operand_.template descriptor<true>(p_.stage, step),
             v_operand_.template descriptor<true>(v.stage, step), tOrOc);
      }
      hopper::wgmma_commit();
      v.advance();
    }
    [&]<int... kChunk>(std::integer_sequence<int, kChunk...>) {
      ((hopper::wgmma_wait<kChunks - 1 - kChunk>(), release_v()), ...);
    }(std::make_integer_sequence<int, kChunks>{});
    warpgroup_fence_operand(tOrO);  // O is complete
    release_p();
  }

  CUTE_DEVICE void release_v() {
    hopper::arrive_of_warp(smem_.v_empty[group_][v_.stage], /*after_accesses=*/true);
    v_.advance();
  }

  CUTE_DEVICE void release_p() {
    hopper::sync_warp();  // all lanes have read the factors
    hopper::arrive_of_warp(smem_.p_empty[p_.stage], /*after_accesses=*/true);
    p_.advance();
  }

  const Arguments& arguments_;
  SharedMemory& smem_;
  int group_;
  // (1, 1, kBlockN / 16) descriptors of each stage of P, and of V's chunks of the group
  SharedOperand<decltype(Traits::fragment_p(nullptr)), sizeof SharedMemory::p[0]> p_operand_;
  SharedOperand<decltype(Traits::fragment_vt(nullptr)), sizeof SharedMemory::v[0][0]> v_operand_;
  VState v_;
  PipelineState<Traits::kPStages> p_;
  typename Pipeline::QState tile_;
};

}  // namespace flash_cute::sm90
