// The SM80 main loop for fp32: as FwdMainloop (mainloop.h), with products in three parts (tf32.h).
#pragma once

#include <cute/tensor.hpp>

#include "sm80/fwd/mainloop_base.h"
#include "sm80/tf32.h"

namespace flash_cute::sm80 {

template <class Traits, MaskKind kMask, class KVSource>
class FwdMainloopFp32 : FwdMainloopBase<Traits, kMask, KVSource> {
  using Base = FwdMainloopBase<Traits, kMask, KVSource>;
  using Base::has_next, Base::has_previous, Base::kBlockM, Base::kBlockN, Base::kMmaRows, Base::sK,
      Base::sQ, Base::sVt;
  using Base::mask_, Base::row0_, Base::softmax_, Base::thread_;
  using typename Base::LoadK, typename Base::LoadQ, typename Base::LoadVt;
  using typename Base::ShapeS, typename Base::TiledMma;
  static constexpr int kMmaM = kBlockM / kMmaRows;
  // What P V and S sum from zero (staged_gemm): so many k8 steps, and so many columns by 16. The
  // fewer, the less is truncated; of S that is a bias of all scores of a row, so it goes into the
  // log-sum-exp. At head dim 64 packed and scored masks would spill with fewer; with two MMAs
  // along the rows and 128 columns of O, P V would with more.
  static constexpr bool kWouldSpill = has_sequences(kMask) && Traits::kHeadDim == 64;
  static constexpr int kSteps = kWouldSpill ? 4 : kMmaM == 2 && Traits::kHeadDim > 64 ? 1 : 2;
  static constexpr int kStepsOfS = !kWouldSpill ? 1 : kMask == MaskKind::kPacked ? 2 : 4;
  static constexpr int kPairs = 2 / kMmaM;

 public:
  using Base::Base;
  using typename Base::Softmax;

  // Leaves the weighted sum of V in `tOrO` (4, MMA_M, kHeadDimV / 8), which it clears, and its
  // statistics in the softmax. On return no warp reads Q's space any more.
  template <class Out>
  CUTE_DEVICE void run(Out& tOrO) {
    clear(tOrO);
    const BlockRange visible = mask_.visible_blocks(row0_, this->row_end(), kBlockN);
    if (visible.end <= visible.begin) return;
    int n_block = visible.end - 1;
    this->load_first(n_block);
    do {
      step(n_block, tOrO);
    } while (has_next(n_block--));
  }

 private:
  // One key block.
  template <class Out>
  CUTE_DEVICE void step(int index, Out& tOrO) {
    using namespace cute;
    const int n_block = platform::rematerialize(index);
    this->template prefetch_bias<kBlockM>(row0_, n_block * kBlockN);
    // K of this block (and Q, in the first step) is there, for all threads. All warps are done with
    // V of the block before, which may be overwritten.
    platform::wait_copies<0>();
    platform::sync_cta();
    this->template load_v<false>(n_block);
    platform::commit_copies();

    const unsigned thread_here = platform::rematerialize(thread_, n_block);
    auto tSrS = partition_fragment_C(TiledMma{}, ShapeS{});  // (4, MMA_M, N / 8)
    gemm_qk(thread_here, n_block, tSrS);
    // V of this block is there, for all threads. All warps are done with K, which the next may
    // overwrite.
    platform::wait_copies<0>();
    platform::sync_cta();
    if (has_next(n_block)) this->load_k(n_block - 1);
    platform::commit_copies();

    auto scores = as_matrix(tSrS);  // (rows, columns)
    auto out = as_matrix(tOrO);     // (rows, columns)
    const int key0 = n_block * kBlockN;
    this->template change_scores<kBlockM>(row0_, key0, scores);
    this->template apply_mask<kBlockM>(row0_, key0, scores);
    const bool is_first = !has_previous(n_block);
    const bool updated = softmax_.update_limits(scores, softmax_.may_exceed(scores), is_first);
    if (updated && !is_first) softmax_.rescale(out);  // before the first block O is 0
    softmax_.apply_exp2_in_stages(scores, softmax_.subtrahends());
    gemm_pv(thread_here, n_block, tSrS, tOrO);
  }

  // S = Q K^T, Q from shared memory as well.
  template <class S>
  CUTE_DEVICE void gemm_qk(unsigned thread, int n_block, S& tSrS) const {
    using namespace cute;
    typename Base::template FragmentA<typename Traits::ShapeQ> tSrQ;  // (4, MMA_M, D / 8)
    auto load_q = LoadQ{}.get_slice(thread);
    auto tXsQ = load_q.partition_S(sQ());  // (ldmatrix, MMA_M, D / 8)
    auto tXrQ = load_q.retile_D(tSrQ);     // as tXsQ
    staged_gemm<LoadK, kStepsOfS, 1, cute::min(kPairs, kBlockN / 16), true>(
        TiledMma{}, thread, tSrQ, [&](int k) { copy(LoadQ{}, tXsQ(_, _, k), tXrQ(_, _, k)); },
        sK(n_block), tSrS);
  }

  // O += P V
  template <class P, class Out>
  CUTE_DEVICE void gemm_pv(unsigned thread, int n_block, P& tSrP, Out& tOrO) const {
    const auto tOrP = as_tf32_operand(tSrP);  // (4, MMA_M, N / 8)
    staged_gemm<LoadVt, cute::min(kSteps, kBlockN / 8), 1, kPairs>(
        TiledMma{}, thread, tOrP, [](int) {}, sVt(n_block), tOrO);
  }
};

}  // namespace flash_cute::sm80
