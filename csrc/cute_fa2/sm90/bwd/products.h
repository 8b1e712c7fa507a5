// The products of a warpgroup. They are asynchronous: each is a group of its own.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/platform.h"
#include "sm90/hopper.h"
#include "sm90/shared_operand.h"

namespace flash_cute::sm90 {

// C = A B over kDepth, or C += A B. A and B in shared memory (SharedOperand).
template <int kDepth, bool kAdds = false, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_ss(Mma mma, const A& a, const B& b, C& rC) {
  using namespace cute;
  mma.accumulate_ = kAdds ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(rC);
  hopper::wgmma_fence();
  CUTE_UNROLL
  for (int k = 0; k < kDepth / 16; ++k) {
    gemm(mma, a.template descriptor<true>(0, k), b.template descriptor<true>(0, k), rC);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  hopper::wgmma_commit();
}

// C += A B. A in registers, as an accumulator's columns have it; B in shared memory.
template <class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_rs(Mma mma, A& fragment, const B& b, C& rC) {
  using namespace cute;
  auto rA = as_a_operand(fragment);  // ((2, 2, 2), 1, depth / 16)
  warpgroup_fence_operand(rC);
  warpgroup_fence_operand(fragment);
  hopper::wgmma_fence();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(rA); ++k) {
    gemm(mma, rA(_, _, k), b.template descriptor<true>(0, k), rC);
  }
  hopper::wgmma_commit();
}

// The operands of a kernel have their addresses from one register, `base`, that of `origin` as
// SharedOperand counts it: with a register each, ptxas spilled.
template <class Fragment>
CUTE_DEVICE int base_address(const Fragment& origin) {
  return platform::warp_uniform(static_cast<int>(SharedOperand<Fragment, 0>::address_of(origin)));
}

// The operand `fragment` that begins at `tile`.
template <class Fragment, class Element>
CUTE_DEVICE auto operand_at(const Fragment& fragment, const Element* tile, const Element* origin,
                            int base) {
  const auto chunks = (tile - origin) * static_cast<int>(sizeof(Element)) / 16;
  return SharedOperand<Fragment, 0>(fragment,
                                    static_cast<uint32_t>(base + static_cast<int>(chunks)));
}

}  // namespace flash_cute::sm90
