// The host side of csrc/cute_fa2/sm90/hopper.h: the same names, on the emulated machine.
#pragma once

#include "device_intrinsics.h"  // ahead of CUTLASS

#include <cuda.h>
#include <cutlass/numeric_types.h>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <type_traits>

#include "machine.h"
#include "machine_hopper.h"

// Inlined even where nothing is optimised, so that the machine sees the kernel's line as its
// caller.
#define EMULATED [[gnu::always_inline]] inline

namespace flash_cute::sm90::hopper {

constexpr int kWarpgroup = 128;

EMULATED int warpgroup_index() {
  return static_cast<int>(emulator::shuffle(emulator::thread_index() / kWarpgroup, 0));
}
EMULATED int warp_in_warpgroup() {
  return static_cast<int>(emulator::shuffle(emulator::thread_index() / 32 % 4, 0));
}
EMULATED int thread_in_warpgroup() { return emulator::thread_index() % kWarpgroup; }
EMULATED int thread_in_warpgroup_here() { return thread_in_warpgroup(); }
EMULATED bool is_first_thread() { return emulator::thread_index() == 0; }
EMULATED bool is_first_lane() { return emulator::thread_index() % 32 == 0; }
EMULATED bool is_elected() {
  emulator::ballot(true);  // all lanes of the warp have to ask
  return is_first_lane();
}

EMULATED void sync_warp() { emulator::sync_warp(); }

EMULATED void stmatrix(void* row, const uint32_t (&words)[4]) {
  emulator::store_matrix(row, words);
}

class Barrier {
 public:
  EMULATED void init(int arrivals) { emulator::init_barrier(&state_, arrivals); }
  EMULATED void arrive() { emulator::arrive_at_barrier(&state_, 0); }
  EMULATED void arrive_and_expect(int bytes) { emulator::arrive_at_barrier(&state_, bytes); }
  EMULATED void wait(uint32_t parity) { emulator::wait_at_barrier(&state_, parity); }
  EMULATED bool is_over(uint32_t parity) { return emulator::is_barrier_over(&state_, parity); }
  EMULATED void wait(uint32_t parity, bool is_over) {
    if (!is_over) return wait(parity);
    emulator::check_barrier_is_over(&state_, parity);
  }
  EMULATED uint64_t* state() { return &state_; }

 private:
  uint64_t state_;  // its address is what the machine knows it by
};

constexpr int kArrivalsOfWarp = 1;
EMULATED void arrive_of_warp(Barrier& barrier, bool /*after_accesses*/ = false) {
  if (is_first_lane()) barrier.arrive();
}

EMULATED void fence_barrier_init() { emulator::fence_barrier_init(); }

EMULATED void tma_load(const CUtensorMap& map, void* target, Barrier& arrival, int column,
                       int in_group, int row, int head, int batch) {
  emulator::tma_load(&map, target, arrival.state(), {column, in_group, row, head, batch});
}

EMULATED void fence_async_proxy() { emulator::fence_async_proxy(); }
EMULATED void tma_store(const CUtensorMap& map, const void* source, int column, int in_group,
                        int row, int head, int batch) {
  emulator::tma_store(&map, source, {column, in_group, row, head, batch});
}
EMULATED void tma_store_commit() { emulator::tma_store_commit(); }
template <int kGroupsReading>
EMULATED void tma_store_wait() {
  emulator::tma_store_wait(kGroupsReading);
}

EMULATED void bulk_load(const void* source, void* target, int bytes, Barrier& arrival) {
  emulator::bulk_load(source, target, bytes, arrival.state());
}
EMULATED void bulk_store(float* target, const void* source, int bytes) {
  emulator::bulk_store(target, source, bytes);
}
EMULATED void fence_async_proxy_global() {}
EMULATED void bulk_reduce_add(float* sums, const void* source, int bytes) {
  emulator::bulk_reduce_add(sums, source, bytes);
}
EMULATED void bulk_wait_complete() { emulator::bulk_wait_complete(); }
EMULATED void prefetch_tensor_map(const CUtensorMap& map) { emulator::prefetch_tensor_map(&map); }

EMULATED void named_barrier_arrive(int barrier, int warpgroups = 2) {
  emulator::arrive_named(barrier, warpgroups * kWarpgroup);
}
EMULATED void named_barrier_sync(int barrier, int warpgroups = 2) {
  emulator::sync_named(barrier, warpgroups * kWarpgroup);
}

template <int kRegisters>
EMULATED void register_dealloc() {
  emulator::register_dealloc(kRegisters);
}
template <int kRegisters>
EMULATED void register_alloc() {
  emulator::register_alloc(kRegisters);
}

template <class Element, int kColumns, bool kFromRegisters, cute::SM90::GMMA::Major kMajorA,
          cute::SM90::GMMA::Major kMajorB>
struct EmulatedWgmma {
  static constexpr auto kType = std::is_same_v<Element, cutlass::half_t>
                                    ? emulator::Operand::kHalf
                                    : emulator::Operand::kBFloat16;
};
template <class Element, int kColumns, cute::SM90::GMMA::Major kMajorA = cute::SM90::GMMA::Major::K,
          cute::SM90::GMMA::Major kMajorB = cute::SM90::GMMA::Major::K>
using MmaSS = EmulatedWgmma<Element, kColumns, false, kMajorA, kMajorB>;
template <class Element, int kColumns,
          cute::SM90::GMMA::Major kMajorB = cute::SM90::GMMA::Major::MN>
using MmaRS = EmulatedWgmma<Element, kColumns, true, cute::SM90::GMMA::Major::K, kMajorB>;

EMULATED void wgmma_fence() { emulator::wgmma_fence(); }
EMULATED void wgmma_commit() { emulator::wgmma_commit(); }
template <int kGroupsInFlight>
EMULATED void wgmma_wait() {
  emulator::wgmma_wait(kGroupsInFlight);
}

}  // namespace flash_cute::sm90::hopper

namespace cute {

// The fragments are those of CuTe's own traits: descriptors of shared memory, accumulators.
template <class Element, int kColumns, bool kFromRegisters, GMMA::Major kMajorA,
          GMMA::Major kMajorB>
struct MMA_Traits<
    flash_cute::sm90::hopper::EmulatedWgmma<Element, kColumns, kFromRegisters, kMajorA, kMajorB>> {
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using FrgTypeA = std::conditional_t<kFromRegisters, Element, GMMA::smem_desc<kMajorA>>;
  using FrgTypeB = GMMA::smem_desc<kMajorB>;
  using Shape_MNK = Shape<_64, Int<kColumns>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = std::conditional_t<kFromRegisters, GMMA::ALayout_64x16, GMMA::ABLayout<64, 16>>;
  using BLayout = GMMA::ABLayout<kColumns, 16>;
  using CLayout = GMMA::CLayout_64xN<kColumns>;

  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

template <class Element, int kColumns, bool kFromRegisters, GMMA::Major kMajorA,
          GMMA::Major kMajorB, class TD, class DLayout, class TA, class ALayout, class TB,
          class BLayout, class TC, class CLayout>
EMULATED void mma_unpack(const MMA_Traits<flash_cute::sm90::hopper::EmulatedWgmma<
                             Element, kColumns, kFromRegisters, kMajorA, kMajorB>>& traits,
                         Tensor<TD, DLayout>& d, const Tensor<TA, ALayout>& a,
                         const Tensor<TB, BLayout>& b, const Tensor<TC, CLayout>& c) {
  using namespace flash_cute;
  using Op = sm90::hopper::EmulatedWgmma<Element, kColumns, kFromRegisters, kMajorA, kMajorB>;
  // The machine takes registers as they lie one after the other.
  static_assert(std::is_same_v<decltype(coalesce(DLayout{})), Layout<Int<kColumns / 2>, _1>>);
  static_assert(size(BLayout{}) == 1);
  emulator::Wgmma wgmma{.type = Op::kType,
                        .columns = kColumns,
                        .add = traits.accumulate_ == GMMA::ScaleOut::One,
                        .a_transposed = kMajorA == GMMA::Major::MN,
                        .b_transposed = kMajorB == GMMA::Major::MN,
                        .a = 0,
                        .b = uint64_t(b(0)),
                        .a_registers = nullptr,
                        .d = raw_pointer_cast(d.data())};
  if constexpr (kFromRegisters) {
    static_assert(std::is_same_v<decltype(coalesce(ALayout{})), Layout<_8, _1>>);
    wgmma.a_registers = reinterpret_cast<const uint32_t*>(raw_pointer_cast(a.data()));
  } else {
    static_assert(size(ALayout{}) == 1);
    wgmma.a = uint64_t(a(0));
  }
  emulator::wgmma(wgmma);
}

}  // namespace cute

#undef EMULATED
