// What Hopper adds below CuTe's layouts: mbarriers, TMA, named barriers, register reallocation,
// wgmma. The SM90 kernels reach these through this file alone.
#pragma once

#ifndef __CUDACC__
#include "emulated_hopper.h"  // the same names for the CPU: tests/emulator
#else

#include <cuda.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/config.hpp>

#include "common/platform.h"

namespace flash_cute::sm90::hopper {

constexpr int kWarpgroup = 128;  // threads

CUTE_DEVICE int warpgroup_index() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
}
CUTE_DEVICE int warp_in_warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 % 4, 0);
}
CUTE_DEVICE int thread_in_warpgroup() { return threadIdx.x % kWarpgroup; }
// Likewise, computed here: ahead of a loop it would hold a register.
CUTE_DEVICE int thread_in_warpgroup_here() {
  return platform::rematerialize(threadIdx.x) % kWarpgroup;
}
// The first thread of the CTA; the first lane of a warp.
CUTE_DEVICE bool is_first_thread() { return threadIdx.x == 0; }
CUTE_DEVICE bool is_first_lane() { return threadIdx.x % 32 == 0; }
// One lane of a warp. All of its lanes ask. ptxas knows that this one is alone, and starts its
// loads without a loop over lanes.
CUTE_DEVICE bool is_elected() { return cute::elect_one_sync(); }

// The lanes of a warp wait for each other.
CUTE_DEVICE void sync_warp() { __syncwarp(); }

// Four 8 x 8 matrices of 2-byte elements to shared memory. A lane has two neighbouring elements of
// row lane / 4 of each. It also names, in `row`, where row lane % 8 of matrix lane / 8 goes.
CUTE_DEVICE void stmatrix(void* row, const uint32_t (&words)[4]) {
  cute::SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3],
                                *static_cast<cute::uint128_t*>(row));
}

// An mbarrier. Its phase ends, and the next begins, when `arrivals` threads have arrived and the
// bytes expected in it have been copied. `wait` returns once the phase of that parity is over. For
// a new barrier the phase of parity 1 counts as over. A wait makes visible what the arriving
// threads wrote before, and what the copies brought.
class Barrier {
  using Impl = cutlass::arch::ClusterTransactionBarrier;

 public:
  CUTE_DEVICE void init(int arrivals) { Impl::init(&state_, arrivals); }
  CUTE_DEVICE void arrive() {
    order_memory();
    Impl::arrive(&state_);
  }
  CUTE_DEVICE void arrive_and_expect(int bytes) {
    order_memory();
    Impl::arrive_and_expect_tx(&state_, bytes);
  }
  CUTE_DEVICE void wait(uint32_t parity) {
    Impl::wait(&state_, parity);
    order_memory();
  }
  // Whether that phase is over. An answer takes long: who asks early does not wait for it. Yes
  // makes visible what a wait does, to the lane that asked. Ahead of `wait` no further phase may
  // end.
  CUTE_DEVICE bool is_over(uint32_t parity) { return Impl::test_wait(&state_, parity, 1); }
  CUTE_DEVICE void wait(uint32_t parity, bool is_over) {
    if (!is_over) Impl::wait(&state_, parity);
    order_memory();
  }
  CUTE_DEVICE uint64_t* state() { return &state_; }

 private:
  // CUTLASS does not tell the compiler that it must not move plain accesses across either.
  CUTE_DEVICE static void order_memory() { asm volatile("" ::: "memory"); }

  uint64_t state_;
};

// A warp arrives once its lanes have met (sync_warp, or a product): its first lane does. racecheck
// does not see that the lanes' accesses to shared memory come before. So in a build for it
// (FLASH_CUTE_RACECHECK) each lane arrives, at barriers that count kArrivalsOfWarp.
#ifdef FLASH_CUTE_RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif
CUTE_DEVICE void arrive_of_warp(Barrier& barrier, bool after_accesses = false) {
  if (is_first_lane() || (after_accesses && kArrivalsOfWarp == 32)) barrier.arrive();
}

// Makes the initialised barriers visible to TMA; after a barrier of the CTA all threads see them.
CUTE_DEVICE void fence_barrier_init() { cutlass::arch::fence_barrier_init(); }

// One thread starts the copy of a TMA box to shared memory. What lies outside of the tensor becomes
// zeros. `arrival` counts the bytes. The coordinates are those of the map (sm90/tensor_map.cpp).
CUTE_DEVICE void tma_load(const CUtensorMap& map, void* target, Barrier& arrival, int column,
                          int in_group, int row, int head, int batch) {
  cute::SM90_TMA_LOAD_5D::copy(&map, arrival.state(),
                               static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                               target, column, in_group, row, head, batch);
}

// One thread starts the copy of a TMA box from shared memory. Nothing outside of the tensor is
// written. Each writing thread calls fence_async_proxy first, which makes its writes visible to
// TMA; then they meet at a barrier. Stores since the last commit form a group. tma_store_wait<N>
// returns when at most the thread's N newest groups still read shared memory.
CUTE_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
CUTE_DEVICE void tma_store(const CUtensorMap& map, const void* source, int column, int in_group,
                           int row, int head, int batch) {
  cute::SM90_TMA_STORE_5D::copy(&map, source, column, in_group, row, head, batch);
}
CUTE_DEVICE void tma_store_commit() { cute::tma_store_arrive(); }
template <int kGroupsReading>
CUTE_DEVICE void tma_store_wait() {
  cute::tma_store_wait<kGroupsReading>();
}

// One thread starts the copy of `bytes` (a multiple of 16) from global to shared memory. `arrival`
// counts them.
CUTE_DEVICE void bulk_load(const void* source, void* target, int bytes, Barrier& arrival) {
  cute::SM90_BULK_COPY_G2S::copy(source, arrival.state(), target, bytes);
}
// One thread starts to store `bytes` (a multiple of 16) from shared to global memory.
CUTE_DEVICE void bulk_store(float* target, const void* source, int bytes) {
  cute::SM90_BULK_COPY_S2G::copy(source, target, bytes);
}
// One thread starts to add `bytes` (a multiple of 16) of floats in shared memory to sums in global
// memory, in any order with what others add. As tma_store in fences and groups.
CUTE_DEVICE void bulk_reduce_add(float* sums, const void* source, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums),
      "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes)
      : "memory");
}
// Returns when all of this thread's groups are complete: their sums are in global memory.
CUTE_DEVICE void bulk_wait_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Between what this thread knows of global memory and bulk copies that it starts.
CUTE_DEVICE void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
CUTE_DEVICE void prefetch_tensor_map(const CUtensorMap& map) {
  cute::prefetch_tma_descriptor(&map);
}

// Warpgroups at one of the CTA's sixteen named barriers. `arrive` goes on at once, `sync` when all
// have come.
CUTE_DEVICE void named_barrier_arrive(int barrier, int warpgroups = 2) {
  cutlass::arch::NamedBarrier::arrive(warpgroups * kWarpgroup, static_cast<uint32_t>(barrier));
}
CUTE_DEVICE void named_barrier_sync(int barrier, int warpgroups = 2) {
  cutlass::arch::NamedBarrier::sync(warpgroups * kWarpgroup, static_cast<uint32_t>(barrier));
}

// setmaxnreg: fewer registers for each thread of a warpgroup, or more.
template <int kRegisters>
CUTE_DEVICE void register_dealloc() {
  cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}
template <int kRegisters>
CUTE_DEVICE void register_alloc() {
  cutlass::arch::warpgroup_reg_alloc<kRegisters>();
}

// wgmma of 64 x kColumns x 16, accumulated in fp32. MmaSS: A and B in shared memory, each with k
// contiguous (Major::K), or rows or columns (Major::MN). MmaRS: A in registers, B in
// shared memory, by default (k, columns) with columns contiguous.
template <int kColumns>
using MmaShape = cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>;
template <class Element, int kColumns, cute::SM90::GMMA::Major kMajorA = cute::SM90::GMMA::Major::K,
          cute::SM90::GMMA::Major kMajorB = cute::SM90::GMMA::Major::K>
using MmaSS = decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, float, MmaShape<kColumns>,
                                                        kMajorA, kMajorB>());
template <class Element, int kColumns,
          cute::SM90::GMMA::Major kMajorB = cute::SM90::GMMA::Major::MN>
using MmaRS = decltype(cute::SM90::GMMA::rs_op_selector<Element, Element, float, MmaShape<kColumns>,
                                                        cute::SM90::GMMA::Major::K, kMajorB>());

// wgmma is asynchronous. wgmma_fence orders it behind this thread's writes to its registers. The
// products up to wgmma_commit form a group. wgmma_wait<N> returns when at most the N newest groups
// are in flight: the accumulators of the others may be read.
CUTE_DEVICE void wgmma_fence() { cute::warpgroup_arrive(); }
CUTE_DEVICE void wgmma_commit() { cute::warpgroup_commit_batch(); }
template <int kGroupsInFlight>
CUTE_DEVICE void wgmma_wait() {
  cute::warpgroup_wait<kGroupsInFlight>();
}

}  // namespace flash_cute::sm90::hopper

#endif  // __CUDACC__
