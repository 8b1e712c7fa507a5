// What a kernel asks of the machine below CuTe's layouts: indices, barriers, warp shuffles, the
// exponential, and the instructions behind copies and matrix products. Kernels reach these through
// this file alone (on Hopper also sm90/hopper.h), so that an emulator can stand in for the GPU.
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

// Unsigned: layouts divide it, and a signed division takes more instructions.
CUTE_DEVICE unsigned thread_index() { return threadIdx.x; }
CUTE_DEVICE int cta_index() { return blockIdx.x; }

// A barrier of all threads of the CTA. It makes their shared-memory accesses visible to each other.
CUTE_DEVICE void sync_cta() { __syncthreads(); }
// The same, and whether the predicate holds for any of them.
CUTE_DEVICE bool sync_cta_or(bool predicate) { return __syncthreads_or(predicate); }

// Of a float or a 32-bit integer.
template <class Word>
CUTE_DEVICE Word shuffle_xor(Word value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

CUTE_DEVICE bool any_in_warp(bool predicate) { return __any_sync(0xffffffffu, predicate); }
// For how many threads of the warp it holds.
CUTE_DEVICE int count_in_warp(bool predicate) {
  return __popc(__ballot_sync(0xffffffffu, predicate));
}

// Tells the compiler that the value is the same for all threads of the warp. It then keeps it, and
// what follows from it, in uniform registers.
CUTE_DEVICE int warp_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Adds to a sum in global memory, in any order with what others add; nobody learns of the result.
CUTE_DEVICE void reduce_add(float* sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
}

// The kernel behind this one, if it was launched so (run_grid), may begin once all CTAs have called
// this or ended.
CUTE_DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel that overlaps the one before (run_grid): until that one is complete, and what it
// wrote is visible.
CUTE_DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Adds to a counter in global memory, and returns what it was.
CUTE_DEVICE int fetch_add(int* counter, int number) { return atomicAdd(counter, number); }
// Its next number, from 0 on.
CUTE_DEVICE int next_number(int* counter) { return fetch_add(counter, 1); }
CUTE_DEVICE int load_acquire(const int* word) {
  int now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  return now;
}
// Turns in global memory. One thread of a CTA waits until the counter has reached `turn`; after a
// barrier the whole CTA sees what was written ahead of the turns before. Only a CTA that already
// runs may be waited for. pass_turn ends this CTA's turn, in one thread, after `publish` in all of
// them and a barrier.
CUTE_DEVICE void wait_for_turn(const int* counter, int turn) {
  while (load_acquire(counter) != turn) {
  }
}
CUTE_DEVICE void publish() { __threadfence(); }
CUTE_DEVICE void pass_turn(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// A flag in global memory, 0 until one thread raises it. Who has waited for it sees what that
// thread saw before.
CUTE_DEVICE void raise_flag(int* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
CUTE_DEVICE void wait_for_flag(const int* flag) { wait_for_turn(flag, 1); }

// A number in global memory that is below 0 until one thread stores it. Who has waited for it sees
// what that thread saw before.
CUTE_DEVICE void store_number(int* word, int number) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(word), "r"(number) : "memory");
}
CUTE_DEVICE int wait_for_number(const int* word) {
  int now;
  do now = load_acquire(word);
  while (now < 0);
  return now;
}

// 2^x to about 2 ulp, denormal results flushed to zero: one instruction.
CUTE_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Asks for a sector of global memory that will be read soon.
CUTE_DEVICE void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

CUTE_DEVICE float log2(float x) { return ::log2f(x); }

// 1 / x to 1 ulp: one instruction.
CUTE_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same value, its origin hidden from the compiler. What follows from it is computed here. Ahead
// of the loop it would hold a register. Later code reuses the value, and does not compute it again.
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
// Hidden from ptxas as well, which sees through the former. `changing` is never negative, which
// ptxas does not know; in a loop it changes in each pass.
template <class Integer>
CUTE_DEVICE Integer rematerialize(Integer value, int changing) {
  return rematerialize(value) + (changing >> 31);
}

// Keeps products and exponentials before it ahead of those behind. It is a branch that is never
// taken: ptxas moves none across (tests/test_machine_code.py looks). `changing` as above.
CUTE_DEVICE void schedule_fence(int changing) {
  if (changing < 0) __trap();
}

// cp.async groups. commit_copies closes a group of this thread's copies. wait_copies<N> returns
// when at most the N newest groups are in flight. What the others wrote is then visible to this
// thread, and to other threads after a barrier.
CUTE_DEVICE void commit_copies() { cute::cp_async_fence(); }
template <int kGroupsInFlight>
CUTE_DEVICE void wait_copies() {
  cute::cp_async_wait<kGroupsInFlight>();
}

// cp.async of 16 bytes, past L1. Where the predicate is false it writes zeros and reads nothing.
using CopyGlobalToShared = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
// ldmatrix: four 8 x 8 matrices of 2-byte elements, plain or transposed.
using LoadMatrix = cute::SM75_U32x4_LDSM_N;
using LoadMatrixTransposed = cute::SM75_U16x8_LDSM_T;
// mma.sync m16n8k16 with fp32 accumulation; of fp32 m16n8k8, which takes operands for TF32: of each
// it leaves out the last 13 bits.
template <class Element>
struct MmaOf;
template <>
struct MmaOf<cutlass::half_t> {
  using type = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct MmaOf<cutlass::bfloat16_t> {
  using type = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};
template <>
struct MmaOf<float> {
  using type = cute::SM80_16x8x8_F32TF32TF32F32_TN;
};
template <class Element>
using Mma = typename MmaOf<Element>::type;

// The nearest number of TF32. `cvt.rna.tf32.f32` gives the same for all but NaN, but ptxas makes
// four instructions of it. Here NaN may become a number: what is missing of it is NaN still.
CUTE_DEVICE float round_to_tf32(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}

}  // namespace flash_cute::platform

#endif  // __CUDACC__
