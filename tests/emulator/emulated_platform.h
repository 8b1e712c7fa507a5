// The host side of csrc/cute_fa2/common/platform.h: the same names, on the emulated machine.
#pragma once

#include "device_intrinsics.h"  // ahead of CUTLASS

#include <cutlass/numeric_types.h>
#include <bit>
#include <cmath>
#include <cute/arch/copy_sm80.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <limits>
#include <type_traits>

#include "machine.h"

namespace flash_cute::platform {

inline unsigned thread_index() { return emulator::thread_index(); }
inline int cta_index() { return emulator::cta_index(); }
inline void sync_cta() { emulator::sync_cta(); }
inline bool sync_cta_or(bool predicate) { return emulator::sync_cta_or(predicate); }

template <class Word>
Word shuffle_xor(Word value, int lane_mask) {
  const int lane = emulator::thread_index() % 32 ^ lane_mask;
  return std::bit_cast<Word>(emulator::shuffle(std::bit_cast<uint32_t>(value), lane));
}

inline int warp_uniform(int value) {
  const uint32_t first = emulator::shuffle(value, 0);
  emulator::require(first == static_cast<uint32_t>(value), "has a value of its own in its warp");
  return value;
}

inline bool any_in_warp(bool predicate) { return emulator::ballot(predicate) != 0; }
inline int count_in_warp(bool predicate) { return std::popcount(emulator::ballot(predicate)); }

inline void reduce_add(float* sum, float x) { emulator::reduce_add(sum, x); }
inline int fetch_add(int* counter, int number) { return emulator::fetch_add(counter, number); }
inline int next_number(int* counter) { return fetch_add(counter, 1); }
inline int load_acquire(const int* word) { return emulator::load_acquire(word); }
inline void wait_for_turn(const int* counter, int turn) { emulator::wait_for_turn(counter, turn); }
inline void let_next_begin() {}
inline void wait_for_kernel_before() {}
inline void publish() { emulator::publish(); }
inline void pass_turn(int* counter) { emulator::pass_turn(counter); }
inline void raise_flag(int* flag) { emulator::raise_flag(flag); }
inline void wait_for_flag(const int* flag) { emulator::wait_for_flag(flag); }
inline void store_number(int* word, int number) { emulator::store_number(word, number); }
inline int wait_for_number(const int* word) { return emulator::wait_for_number(word); }

inline float flush_denormal(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
}
// Reads what it asks for: where nothing is, the sanitizer tells.
inline void prefetch(const void* address) { *static_cast<const volatile char*>(address); }
inline float exp2(float x) { return flush_denormal(std::exp2(flush_denormal(x))); }
inline float log2(float x) { return std::log2(x); }
inline float reciprocal(float x) { return flush_denormal(1.f / flush_denormal(x)); }

template <class T>
T rematerialize(T value) {
  return value;
}
template <class Integer>
Integer rematerialize(Integer value, int changing) {
  emulator::require(changing >= 0, "hides a value behind a negative number");
  return value;
}

// Half a last place is added, which may carry on to infinity; what is behind it goes.
inline float round_to_tf32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return x - x == 0 ? std::bit_cast<float>((bits + 0x1000u) & ~0x1fffu) : x;
}

inline void schedule_fence(int changing) {
  emulator::require(changing >= 0, "keeps instructions in order by a negative number");
}

inline void commit_copies() { emulator::commit_copies(); }
template <int kGroupsInFlight>
void wait_copies() {
  emulator::wait_copies(kGroupsInFlight);
}

template <bool kTransposed>
struct EmulatedLdmatrix {
  using SRegisters = cute::uint128_t[1];
  using DRegisters = uint32_t[4];
  static void copy(const cute::uint128_t& row, uint32_t& d0, uint32_t& d1, uint32_t& d2,
                   uint32_t& d3) {
    uint32_t d[4];
    emulator::load_matrix(&row, d, kTransposed);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
  }
};

template <class Element>
struct EmulatedMma {
  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];
  static void fma(float& d0, float& d1, float& d2, float& d3,  //
                  const uint32_t& a0, const uint32_t& a1, const uint32_t& a2, const uint32_t& a3,
                  const uint32_t& b0, const uint32_t& b1,  //
                  const float& c0, const float& c1, const float& c2, const float& c3) {
    float d[4];
    if constexpr (std::is_same_v<Element, float>) {
      emulator::mma_tf32(d, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
    } else {
      constexpr auto kType = std::is_same_v<Element, cutlass::half_t>
                                 ? emulator::Operand::kHalf
                                 : emulator::Operand::kBFloat16;
      emulator::mma_m16n8k16(kType, d, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
    }
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
  }
};

using CopyGlobalToShared = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
using LoadMatrix = EmulatedLdmatrix<false>;
using LoadMatrixTransposed = EmulatedLdmatrix<true>;
template <class Element>
using Mma = EmulatedMma<Element>;

}  // namespace flash_cute::platform

namespace cute {

// CuTe's traits of the instructions serve the emulated ones; of cp.async, which is a template, only
// the instruction itself is replaced.
template <>
struct Copy_Traits<flash_cute::platform::EmulatedLdmatrix<false>> : Copy_Traits<SM75_U32x4_LDSM_N> {
};
template <>
struct Copy_Traits<flash_cute::platform::EmulatedLdmatrix<true>> : Copy_Traits<SM75_U16x8_LDSM_T> {
};
template <>
struct MMA_Traits<flash_cute::platform::EmulatedMma<half_t>>
    : MMA_Traits<SM80_16x8x16_F32F16F16F32_TN> {};
template <>
struct MMA_Traits<flash_cute::platform::EmulatedMma<bfloat16_t>>
    : MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> {};

template <>
struct MMA_Traits<flash_cute::platform::EmulatedMma<float>>
    : MMA_Traits<SM80_16x8x8_F32TF32TF32F32_TN> {};

template <>
struct SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t, uint128_t> {
  using SRegisters = uint128_t[1];
  using DRegisters = uint128_t[1];
  static void copy(const uint128_t& source, uint128_t& target, bool exists) {
    flash_cute::emulator::copy_async(&target, &source, exists);
  }
};

}  // namespace cute
