// All that a kernel asks of the machine below CuTe's layouts: who am I, wait for the others,
// exchange within a warp, the exponential, and the instructions behind copies and matrix products.
// Kernels use nothing of the kind by any other way, so that another platform can stand in for the
// GPU. (What only Hopper has is in sm90/hopper.h, under the same rule.)
#pragma once

#ifndef __CUDACC__
#include "emulated_platform.h"  // the same names for the CPU: tests/emulator
#else

#include <cutlass/numeric_types.h>
#include <cstdint>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/config.hpp>
#include <type_traits>

namespace flash_cute::platform {

// Unsigned, as layouts divide it and the division of a signed number takes more instructions.
CUTE_DEVICE unsigned thread_index() { return threadIdx.x; }
CUTE_DEVICE int cta_index() { return blockIdx.x; }

// A barrier of all threads of the block, which also makes their shared-memory accesses visible to
// each other.
CUTE_DEVICE void sync_cta() { __syncthreads(); }
// The same, and whether the predicate holds for any of them.
CUTE_DEVICE bool sync_cta_or(bool predicate) { return __syncthreads_or(predicate); }

// Of a float or a 32-bit integer.
template <class Word>
CUTE_DEVICE Word shuffle_xor(Word value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

CUTE_DEVICE bool any_in_warp(bool predicate) { return __any_sync(0xffffffffu, predicate); }

// A value that is the same for all threads of the warp, with the compiler told so: it can then keep
// it, and what is computed from it, in registers that the warp shares.
CUTE_DEVICE int warp_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// 2^x to about 2 ulp, denormal results flushed to zero: one instruction of the special-function
// unit.
CUTE_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float log2(float x) { return ::log2f(x); }

// 1 / x to 1 ulp: one instruction.
CUTE_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same value, with its origin hidden from the compiler: what is computed from it is computed
// where it stands, not ahead of the loop, where it would hold a register.
template <class Integer>
CUTE_DEVICE Integer rematerialize(Integer value) {
  asm volatile("" : "+r"(value));
  return value;
}
CUTE_DEVICE int64_t rematerialize(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}
template <class T>
CUTE_DEVICE T* rematerialize(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
// Hidden from ptxas as well, which sees through the former: it does not know that `changing` is
// never negative. Within a loop it is to be another in each pass.
template <class Integer>
CUTE_DEVICE Integer rematerialize(Integer value, int changing) {
  return rematerialize(value) + (changing >> 31);
}

// Products and exponentials that stand before it stay before those behind: a branch, which ptxas
// moves none across (tests/test_machine_code.py looks). It is never taken, as `changing` is not
// negative, which ptxas does not know; in a loop it is to be another in each pass.
CUTE_DEVICE void schedule_fence(int changing) {
  if (changing < 0) __trap();
}

// Copies issued by this thread so far form a group; `wait_copies<N>` returns when at most the N
// newest groups are still under way. What they wrote is then visible to this thread, to the others
// after a barrier.
CUTE_DEVICE void commit_copies() { cute::cp_async_fence(); }
template <int kGroupsInFlight>
CUTE_DEVICE void wait_copies() {
  cute::cp_async_wait<kGroupsInFlight>();
}

// 16 bytes from global to shared memory, past L1; zeros where the predicate is false, with nothing
// read.
using CopyGlobalToShared = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
// ldmatrix: four 8 x 8 matrices of 2-byte elements, as they lie or transposed.
using LoadMatrix = cute::SM75_U32x4_LDSM_N;
using LoadMatrixTransposed = cute::SM75_U16x8_LDSM_T;
// mma.sync m16n8k16 with fp32 accumulation.
template <class Element>
using Mma =
    std::conditional_t<std::is_same_v<Element, cutlass::half_t>, cute::SM80_16x8x16_F32F16F16F32_TN,
                       cute::SM80_16x8x16_F32BF16BF16F32_TN>;

}  // namespace flash_cute::platform

#endif  // __CUDACC__
