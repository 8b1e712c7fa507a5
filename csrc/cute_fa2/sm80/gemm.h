// Matrix products of a warp's fragments: C += A B^T, with B from shared memory.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm80 {

// copy(pair, k): B's fragments of 16 columns of C (2 MMAs) and one k16 step, by one ldmatrix.
template <class LoadB, class B, class SmemB>
CUTE_DEVICE auto copy_b_fragments(unsigned thread, B& rB, const SmemB& sB) {
  auto thread_load_b = LoadB{}.get_slice(thread);
  auto from_b = thread_load_b.partition_S(sB);  // (ldmatrix, columns / 16, k16 steps)
  auto to_b = thread_load_b.retile_D(rB);       // as from_b
  return [from_b, to_b](int pair, int k) mutable {
    cute::copy(LoadB{}, from_b(cute::_, pair, k), to_b(cute::_, pair, k));
  };
}

// The products of one such copy, of one k16 step. C (4, MMA_M, columns / 8) gets those of A (8,
// MMA_M) and B (4, columns / 8), in its columns 16 pair .. 16 pair + 15.
template <class TiledMma, class A, class B, class C>
CUTE_DEVICE void gemm_pair(TiledMma mma, const A& rA, const B& rB, int pair, C& rC) {
  using namespace cute;
  CUTE_UNROLL
  for (int m = 0; m < size<1>(rA); ++m) {
    CUTE_UNROLL
    for (int n = 2 * pair; n < 2 * pair + 2; ++n) {
      gemm(mma, rC(_, m, n), rA(_, m), rB(_, n), rC(_, m, n));
    }
  }
}

// Work to interleave with the products: a gemm calls it `count` times, and each call does one
// share.
struct DoNothing {
  CUTE_DEVICE void operator()(int share, int count) const {}
};

// All of the work in one call, when half of the products are issued.
template <class Work>
CUTE_DEVICE auto at_half(const Work& work) {
  return [work](int share, int count) {
    if (share == count / 2) work();
  };
}

// C += A B^T. B's fragments come from shared memory one ldmatrix (16 columns of C) ahead of their
// products. Registers are too short for more. `copy_a(k)` brings A's fragments of step k and is
// called ahead of that step's products. `meanwhile` is called ahead of the products of each
// ldmatrix, when the next one is on its way.
template <class LoadB, class TiledMma, class A, class CopyA, class B, class SmemB, class C,
          class Meanwhile = DoNothing>
CUTE_DEVICE void warp_gemm(TiledMma mma, unsigned thread, const A& rA, const CopyA& copy_a, B& rB,
                           const SmemB& sB, C& rC, const Meanwhile& meanwhile = {}) {
  using namespace cute;
  constexpr int kPairs = decltype(size<1>(rB))::value / 2;
  constexpr int kSteps = decltype(size<2>(rB))::value;
  auto copy_b = copy_b_fragments<LoadB>(thread, rB, sB);
  copy_a(0);
  copy_b(0, 0);
  CUTE_UNROLL
  for (int i = 0; i < kPairs * kSteps; ++i) {
    const int k = i / kPairs, pair = i % kPairs;
    if (pair == 0 && k + 1 < kSteps) copy_a(k + 1);
    if (i + 1 < kPairs * kSteps) copy_b((i + 1) % kPairs, (i + 1) / kPairs);
    meanwhile(i, kPairs * kSteps);
    gemm_pair(mma, rA(_, _, k), rB(_, _, k), pair, rC);
  }
}

// The same with A from shared memory too, one k16 step ahead of its products.
template <class LoadA, class LoadB, class TiledMma, class SmemA, class SmemB, class C,
          class Meanwhile = DoNothing>
CUTE_DEVICE void smem_gemm(TiledMma mma, unsigned thread, const SmemA& sA, const SmemB& sB, C& rC,
                           const Meanwhile& meanwhile = {}) {
  using namespace cute;
  auto thread_mma = mma.get_slice(thread);
  auto rA = thread_mma.partition_fragment_A(sA);  // (8, MMA_M, K / 16)
  auto rB = thread_mma.partition_fragment_B(sB);  // (4, columns / 8, K / 16)
  auto load_a = LoadA{}.get_slice(thread);
  auto from_a = load_a.partition_S(sA);  // (ldmatrix, MMA_M, K / 16)
  auto to_a = load_a.retile_D(rA);       // as from_a
  auto copy_a = [&](int k) { copy(LoadA{}, from_a(_, _, k), to_a(_, _, k)); };
  warp_gemm<LoadB>(mma, thread, rA, copy_a, rB, sB, rC, meanwhile);
}

}  // namespace flash_cute::sm80
