// Products of fp32 on tensor cores, which multiply TF32: numbers with 10 bits behind the point. x
// is hi + lo, hi rounded to TF32, and lo what is missing, of which the tensor cores leave out all
// but the first 10 bits. Of the four products of two such sums, lo x lo is too small to count.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/platform.h"
#include "sm80/gemm.h"

namespace flash_cute::sm80 {

// `kCount` fragments of operands, as hi and lo.
template <int kValues, int kCount>
struct SplitFragments {
  using Fragments =
      decltype(cute::make_tensor<float>(cute::Shape<cute::Int<kValues>, cute::Int<kCount>>{}));
  Fragments hi;
  Fragments lo;

  SplitFragments() = default;
  // Of x (kValues, fragments), those from `first` on.
  template <class X>
  CUTE_DEVICE explicit SplitFragments(const X& x, int first = 0) {
    CUTE_UNROLL
    for (int n = 0; n < kCount; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) {
        hi(i, n) = platform::round_to_tf32(x(i, first + n));
        lo(i, n) = x(i, first + n) - hi(i, n);
      }
    }
  }
};

// One k8 step: rC (4, MMA_M, kCount) += a (4, MMA_M) b^T (2, kCount). The small products come
// first. Those that wait for each other stand apart.
template <class TiledMma, int kMmaM, int kCount, class C>
CUTE_DEVICE void gemm_3xtf32(TiledMma mma, const SplitFragments<4, kMmaM>& a,
                             const SplitFragments<2, kCount>& b, C&& rC) {
  using namespace cute;
  const auto add = [&](const auto& of_a, const auto& of_b) {
    CUTE_UNROLL
    for (int m = 0; m < kMmaM; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < kCount; ++n) {
        gemm(mma, rC(_, m, n), of_a(_, m), of_b(_, n), rC(_, m, n));
      }
    }
  };
  add(a.lo, b.hi);  // fault: tf32-lo
  add(a.hi, b.lo);
  add(a.hi, b.hi);
}

// C += A B^T in fp32, with B from shared memory; with kFromZero C = A B^T. The tensor cores
// truncate each sum, which is a bias. So kSteps k8 steps are summed from zero, 16 kPairs columns
// after the other. kTerms such sums are added up, and their sum to C: so fewer numbers are rounded
// beside a large C. A product waits for the one before in its sum, so there are some sums. A's
// fragments of such sums are split together: all would be too many for the registers. `copy_a(k)`
// brings them. `meanwhile` is called once, ahead of the first product.
template <class LoadB, int kSteps, int kTerms, int kPairs, bool kFromZero = false, class TiledMma,
          class A, class CopyA, class SmemB, class C, class Meanwhile = DoNothing>
CUTE_DEVICE void staged_gemm(TiledMma mma, unsigned thread, const A& rA, const CopyA& copy_a,
                             const SmemB& sB, C& rC, const Meanwhile& meanwhile = {}) {
  using namespace cute;
  auto rB = make_tensor<float>(  // (2, columns / 8, K / 8)
      partition_shape_B(mma, shape(sB)));
  constexpr int kMmaM = decltype(size<1>(rC))::value;
  constexpr int kColumns = 2 * kPairs;  // of a sum, by 8
  constexpr int kSums = decltype(size<2>(rC))::value / kColumns;
  auto copy_b = copy_b_fragments<LoadB>(thread, rB, sB);
  const auto copy_pairs = [&](int sum, int k) {
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) copy_b(sum * kPairs + pair, k);
  };
  constexpr int kStepsAtOnce = kSteps * kTerms;
  static_assert(decltype(size<2>(rB))::value % kStepsAtOnce == 0);
  CUTE_UNROLL
  for (int first = 0; first < size<2>(rB); first += kStepsAtOnce) {
    CUTE_UNROLL
    for (int k = 0; k < kStepsAtOnce; ++k) copy_a(first + k);
    copy_pairs(0, first);
    SplitFragments<4, kMmaM> of_a[kStepsAtOnce];
    CUTE_UNROLL
    for (int k = 0; k < kStepsAtOnce; ++k) {
      of_a[k] = SplitFragments<4, kMmaM>(rA(_, _, first + k));
    }
    if (first == 0) meanwhile(0, 1);
    CUTE_UNROLL
    for (int i = 0; i < kSums; ++i) {
      auto sums =  // (4, MMA_M, kColumns, kTerms)
          make_tensor<float>(Shape<Shape<_2, _2>, Int<kMmaM>, Int<kColumns>, Int<kTerms>>{});
      clear(sums);
      CUTE_UNROLL
      for (int k = 0; k < kStepsAtOnce; ++k) {
        const int next = i * kStepsAtOnce + k + 1;
        if (next < kSums * kStepsAtOnce) {
          copy_pairs(next / kStepsAtOnce, first + next % kStepsAtOnce);
        }
        const SplitFragments<2, kColumns> of_b(rB(_, _, first + k), kColumns * i);
        gemm_3xtf32(mma, of_a[k], of_b, sums(_, _, _, k / kSteps));
      }
      CUTE_UNROLL
      for (int m = 0; m < kMmaM; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < kColumns; ++n) {
          CUTE_UNROLL
          for (int j = 0; j < 4; ++j) {
            float sum = sums(j, m, n, 0);
            CUTE_UNROLL
            for (int term = 1; term < kTerms; ++term) sum += sums(j, m, n, term);
            float& c = rC(j, m, kColumns * i + n);
            c = kFromZero && first == 0 ? sum : c + sum;
          }
        }
      }
    }
  }
}

// The same with A from shared memory too.
template <class LoadA, class LoadB, int kSteps, int kTerms, int kPairs, class TiledMma, class SmemA,
          class SmemB, class C, class Meanwhile>
CUTE_DEVICE void staged_smem_gemm(TiledMma mma, unsigned thread, const SmemA& sA, const SmemB& sB,
                                  C& rC, const Meanwhile& meanwhile) {
  using namespace cute;
  auto rA = make_tensor<float>(partition_shape_A(mma, shape(sA)));  // (4, MMA_M, K / 8)
  auto load_a = LoadA{}.get_slice(thread);
  auto from_a = load_a.partition_S(sA);  // (ldmatrix, MMA_M, K / 8)
  auto to_a = load_a.retile_D(rA);       // as from_a
  auto copy_a = [&](int k) { copy(LoadA{}, from_a(_, _, k), to_a(_, _, k)); };
  staged_gemm<LoadB, kSteps, kTerms, kPairs>(mma, thread, rA, copy_a, sB, rC, meanwhile);
}

// ((2 columns, 2 rows), MMA_M, N / 8) -> ((2 rows, 2 columns), MMA_M, N / 8): an accumulator as the
// A operand of m16n8k8, without an exchange between lanes. Its columns 2 j and 2 j + 1 are there
// k = j and j + 4, so the rows of B have to come in the same order.
template <class Engine, class Layout>
CUTE_DEVICE constexpr auto as_tf32_operand(cute::Tensor<Engine, Layout>& accumulator) {
  using namespace cute;
  auto layout = accumulator.layout();
  return make_tensor(accumulator.data(),
                     make_layout(make_layout(get<0, 1>(layout), get<0, 0>(layout)), get<1>(layout),
                                 get<2>(layout)));
}

}  // namespace flash_cute::sm80
