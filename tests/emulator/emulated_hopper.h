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
EMULATED bool is_first_thread() { return emulator::thread_index() == 0; }
EMULATED bool is_first_lane() { return emulator::thread_index() % 32 == 0; }

EMULATED void sync_warp() { emulator::sync_warp(); }

EMULATED void store_matrices(void* row, const uint32_t (&words)[4]) {
  emulator::store_matrix(row, words);
}

class Barrier {
 public:
  EMULATED void init(int arrivals) { emulator::init_barrier(&state_, arrivals); }
  EMULATED void arrive() { emulator::arrive_at_barrier(&state_, 0); }
  EMULATED void arrive_and_expect(int bytes) { emulator::arrive_at_barrier(&state_, bytes); }
  EMULATED void wait(uint32_t parity) { emulator::wait_at_barrier(&state_, parity); }
  EMULATED uint64_t* state() { return &state_; }

 private:
  uint64_t state_;  // its address is what the machine knows it by
};

EMULATED void publish_barriers() { emulator::publish_barriers(); }

EMULATED void load_box(const CUtensorMap& map, void* target, Barrier& arrival, int column,
                       int in_group, int row, int head, int batch) {
  emulator::load_box(&map, target, arrival.state(), {column, in_group, row, head, batch});
}

EMULATED void show_to_copies() { emulator::show_to_copies(); }
EMULATED void store_box(const CUtensorMap& map, const void* source, int column, int in_group,
                        int row, int head, int batch) {
  emulator::store_box(&map, source, {column, in_group, row, head, batch});
}
EMULATED void commit_boxes() { emulator::commit_boxes(); }
template <int kGroupsReading>
EMULATED void wait_boxes() {
  emulator::wait_boxes(kGroupsReading);
}
EMULATED void prefetch_map(const CUtensorMap& map) { emulator::prefetch_map(&map); }

EMULATED void arrive_at(int barrier) { emulator::arrive_named(barrier, 2 * kWarpgroup); }
EMULATED void wait_at(int barrier) { emulator::sync_named(barrier, 2 * kWarpgroup); }

template <int kRegisters>
EMULATED void give_back_registers() {
  emulator::give_back_registers(kRegisters);
}
template <int kRegisters>
EMULATED void take_registers() {
  emulator::take_registers(kRegisters);
}

template <class Element, int kColumns_, bool kFromRegisters_>
struct EmulatedProduct {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kFromRegisters = kFromRegisters_;
  static constexpr auto kType = std::is_same_v<Element, cutlass::half_t>
                                    ? emulator::Operand::kHalf
                                    : emulator::Operand::kBFloat16;
};
template <class Element, int kColumns>
using MmaFromShared = EmulatedProduct<Element, kColumns, false>;
template <class Element, int kColumns>
using MmaFromRegisters = EmulatedProduct<Element, kColumns, true>;

EMULATED void begin_products() { emulator::begin_products(); }
EMULATED void commit_products() { emulator::commit_products(); }
template <int kGroupsInFlight>
EMULATED void wait_products() {
  emulator::wait_products(kGroupsInFlight);
}

}  // namespace flash_cute::sm90::hopper

namespace cute {

// The fragments are those of CuTe's own traits: descriptors of shared memory, accumulators.
template <class Element, int kColumns, bool kFromRegisters>
struct MMA_Traits<flash_cute::sm90::hopper::EmulatedProduct<Element, kColumns, kFromRegisters>> {
  static constexpr auto kMajorB = kFromRegisters ? GMMA::Major::MN : GMMA::Major::K;
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using FrgTypeA = std::conditional_t<kFromRegisters, Element, GMMA::smem_desc<GMMA::Major::K>>;
  using FrgTypeB = GMMA::smem_desc<kMajorB>;
  using Shape_MNK = Shape<_64, Int<kColumns>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = std::conditional_t<kFromRegisters, GMMA::ALayout_64x16, GMMA::ABLayout<64, 16>>;
  using BLayout = GMMA::ABLayout<kColumns, 16>;
  using CLayout = GMMA::CLayout_64xN<kColumns>;

  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

template <class Element, int kColumns, bool kFromRegisters, class TD, class DLayout, class TA,
          class ALayout, class TB, class BLayout, class TC, class CLayout>
EMULATED void mma_unpack(
    const MMA_Traits<flash_cute::sm90::hopper::EmulatedProduct<Element, kColumns, kFromRegisters>>&
        traits,
    Tensor<TD, DLayout>& d, const Tensor<TA, ALayout>& a, const Tensor<TB, BLayout>& b,
    const Tensor<TC, CLayout>& c) {
  using namespace flash_cute;
  using Op = sm90::hopper::EmulatedProduct<Element, kColumns, kFromRegisters>;
  // The machine takes registers as they lie one after the other.
  static_assert(std::is_same_v<decltype(coalesce(DLayout{})), Layout<Int<kColumns / 2>, _1>>);
  static_assert(size(BLayout{}) == 1);
  emulator::AsyncProduct product{.type = Op::kType,
                                 .columns = kColumns,
                                 .add = traits.accumulate_ == GMMA::ScaleOut::One,
                                 .b_transposed = kFromRegisters,
                                 .a = 0,
                                 .b = uint64_t(b(0)),
                                 .a_registers = nullptr,
                                 .d = raw_pointer_cast(d.data())};
  if constexpr (kFromRegisters) {
    static_assert(std::is_same_v<decltype(coalesce(ALayout{})), Layout<_8, _1>>);
    product.a_registers = reinterpret_cast<const uint32_t*>(raw_pointer_cast(a.data()));
  } else {
    static_assert(size(ALayout{}) == 1);
    product.a = uint64_t(a(0));
  }
  emulator::multiply_async(product);
}

}  // namespace cute

#undef EMULATED
