// The SM80 main loop: S = Q K^T, online softmax, O += P V, one key block at a time. K and V take
// turns in one stage of shared memory: each is copied while the other is multiplied. With
// `q_in_registers` V comes to where Q was, which is read once.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "sm80/fwd/mainloop_base.h"

namespace flash_cute::sm80 {

template <class Traits, MaskKind kMask, class KVSource>
class FwdMainloop : FwdMainloopBase<Traits, kMask, KVSource> {
  using Base = FwdMainloopBase<Traits, kMask, KVSource>;
  using Base::has_next, Base::has_previous, Base::kBlockN, Base::kMmaRows, Base::sK, Base::sQ,
      Base::sVt;
  using Base::mask_, Base::row0_, Base::smem_, Base::softmax_, Base::thread_;
  using typename Base::AllRows, typename Base::FirstHalf, typename Base::SecondHalf;
  using typename Base::Element, typename Base::LoadK, typename Base::LoadQ, typename Base::LoadVt;
  using typename Base::ShapeS, typename Base::TiledMma;
  using LoadP = typename Traits::LoadP;
  using StoreP = typename Traits::StoreP;
  static constexpr bool kSharesRows = Traits::kSharesRows;
  static constexpr bool kQInRegisters = Traits::kQInRegisters;
  static constexpr bool kSkipsFirstHalf =
      Base::kHasHalves && kMask != MaskKind::kFull && kBlockN <= kMmaRows;

  // What stays in registers through the loop. As members of the class they made ptxas spill. Where
  // warps share rows, the columns of S and O, which are B's, are a share of these.
  struct Fragments {
    typename Base::template FragmentA<typename Traits::ShapeQ> tSrQ;    // (8, MMA_M, D / 16)
    typename Base::template FragmentB<typename Traits::ShapeK> tSrK;    // (4, N / 8, D / 16)
    typename Base::template FragmentB<typename Traits::ShapeVt> tOrVt;  // (4, Dv / 8, N / 16)

    // As LoadQ writes it: (ldmatrix, MMA_M, D / 16).
    CUTE_DEVICE auto tXrQ() { return LoadQ{}.get_slice(0).retile_D(tSrQ); }
  };

 public:
  using Base::Base;
  using typename Base::Softmax;

  // Leaves the weighted sum of V in `tOrO` (4, MMA_M, kHeadDimV / 8), which it clears, and its
  // statistics in the softmax. On return no warp reads any more where O goes.
  template <class Out>
  CUTE_DEVICE void run(Out& tOrO) {
    clear(tOrO);
    const int row_end = this->row_end();
    const BlockRange visible = mask_.visible_blocks(row0_, row_end, kBlockN);
    if (visible.end <= visible.begin) return;
    const int n_block = visible.end - 1;
    this->load_first(n_block);
    Fragments fragments;
    if constexpr (kQInRegisters) read_q(fragments);
    if (!Base::kUsesFirstHalf || row_end - row0_ > kMmaRows) {
      loop<AllRows>(n_block, fragments, tOrO);
    } else if constexpr (Base::kUsesFirstHalf) {
      loop<FirstHalf>(n_block, fragments, tOrO);
    }
  }

 private:
  // The first barrier of the loop then tells that all warps are done with Q's space.
  CUTE_DEVICE void read_q(Fragments& fragments) {
    platform::wait_copies<0>();
    platform::sync_cta();  // Q is there, for all threads
    const unsigned thread_here = platform::rematerialize(thread_, row0_);
    copy(LoadQ{}, LoadQ{}.get_slice(thread_here).partition_S(sQ()), fragments.tXrQ());
  }

  template <class Rows, class Out>
  CUTE_DEVICE void loop(int n_block, Fragments& fragments, Out& tOrO) {
    if constexpr (kSkipsFirstHalf && std::is_same_v<Rows, AllRows>) {
      // More than once where a block has fewer keys than the half has rows.
      while (this->skips_first_half(n_block)) step<SecondHalf>(n_block--, fragments, tOrO);
    }
    do {
      step<Rows>(n_block, fragments, tOrO);
    } while (has_next(n_block--));
  }

  // One key block.
  template <class Rows, class Out>
  CUTE_DEVICE void step(int index, Fragments& fragments, Out& tOrO) {
    using namespace cute;
    constexpr int kStepM = Rows::kCount * kMmaRows;
    const int n_block = platform::rematerialize(index);
    this->template prefetch_bias<kStepM>(row0_ + Rows::kFirst * kMmaRows, n_block * kBlockN);
    // K of this block (and Q, in the first step) is there, for all threads. All warps are done with
    // V of the block before (or Q, in the first step), which may be overwritten.
    platform::wait_copies<0>();
    platform::sync_cta();  // fault: cta-barrier
    this->template load_v<false>(n_block);
    platform::commit_copies();

    const unsigned thread_here = platform::rematerialize(thread_, n_block);
    // (4, MMA_M, N / 8)
    auto tSrS = partition_fragment_C(TiledMma{}, Shape<Int<kStepM>, Int<kBlockN>>{});
    gemm_qk<Rows>(thread_here, n_block, fragments, tSrS);
    // After a barrier V of this block is there, for all threads. All warps are done with K, which
    // the next may overwrite. Where warps share rows, update_limits begins with that barrier.
    platform::wait_copies<0>();
    if constexpr (!kSharesRows) {
      platform::sync_cta();
      load_next_k(n_block);
    }

    auto scores = as_matrix(tSrS);             // (rows, columns)
    auto tOrO_step = select_rows<Rows>(tOrO);  // (4, MMA_M, Dv / 8)
    auto out = as_matrix(tOrO_step);           // (rows, columns)
    const int row0 = row0_ + Rows::kFirst * kMmaRows, key0 = n_block * kBlockN;
    this->template change_scores<kStepM>(row0, key0, scores);
    this->template apply_mask<kStepM>(row0, key0, scores);
    const bool is_first = !has_previous(n_block);
    const bool updated = softmax_.template update_limits<Rows::kFirstRow>(
        scores, softmax_.template may_exceed<Rows::kFirstRow>(scores), is_first,
        row_allreduce<Traits>(smem_, platform::rematerialize(thread_)));
    // Before the first block O is 0.
    if (updated && !is_first) softmax_.template rescale<Rows::kFirstRow>(out);
    if constexpr (kSharesRows) load_next_k(n_block);

    // No branch from here on, so that the exponentials of later columns run under the products of
    // earlier ones. Where warps share rows, all of P comes before any product.
    softmax_.template apply_exp2<Rows::kFirstRow>(scores, softmax_.subtrahends());
    auto tSrP = convert<Element>(tSrS);  // (4, MMA_M, N / 8)
    if constexpr (kSharesRows) {
      gemm_pv_of_shared_p(thread_here, n_block, fragments, tSrP, tOrO);
    } else {
      auto tOrP = as_a_operand(tSrP);  // (8, MMA_M, N / 16)
      warp_gemm<LoadVt>(
          TiledMma{}, thread_here, tOrP, [](int) {}, fragments.tOrVt, sVt(n_block), tOrO_step);
    }
  }

  // All warps are done with K of this block.
  CUTE_DEVICE void load_next_k(int n_block) const {
    if (has_next(n_block)) this->load_k(n_block - 1);
    platform::commit_copies();
  }

  // S = Q K^T, Q from shared memory as well where it is not in registers.
  template <class Rows, class S>
  CUTE_DEVICE void gemm_qk(unsigned thread, int n_block, Fragments& fragments, S& tSrS) {
    using namespace cute;
    auto tXsQ = LoadQ{}.get_slice(thread).partition_S(sQ());  // (ldmatrix, MMA_M, D / 16)
    auto copy_q = [&](int k) {
      if constexpr (!kQInRegisters) {
        CUTE_UNROLL
        for (int m = Rows::kFirst; m < Rows::kFirst + Rows::kCount; ++m) {
          copy(LoadQ{}, tXsQ(_, m, k), fragments.tXrQ()(_, m, k));
        }
      }
    };
    clear(tSrS);
    auto tSrQ = select_rows<Rows>(fragments.tSrQ);  // (8, MMA_M, D / 16)
    warp_gemm<LoadK>(TiledMma{}, thread, tSrQ, copy_q, fragments.tSrK, sK(n_block), tSrS);
  }

  // O += P V where warps share rows: P's columns come from all of them, through shared memory.
  template <class P, class Out>
  CUTE_DEVICE void gemm_pv_of_shared_p(unsigned thread, int n_block, Fragments& fragments,
                                       const P& tSrP, Out& tOrO) {
    using namespace cute;
    auto sP = make_tensor(make_smem_ptr(smem_.exchange.p),  // (kBlockM, kBlockN)
                          typename Traits::Exchange::SmemLayoutP{});
    auto store_p = StoreP{}.get_slice(thread);
    // Both (2, 2 MMA_M, N / 8).
    copy(StoreP{}, store_p.retile_S(tSrP), store_p.partition_D(sP));
    platform::sync_cta();  // P is there, of all columns; fault: shared-p
    auto tOrP =
        make_tensor<Element>(partition_shape_A(TiledMma{}, ShapeS{}));  // (8, MMA_M, N / 16)
    auto load_p = LoadP{}.get_slice(thread);
    auto tXsP = load_p.partition_S(sP);  // (ldmatrix, MMA_M, N / 16)
    auto tXrP = load_p.retile_D(tOrP);   // (ldmatrix, MMA_M, N / 16)
    auto copy_p = [&](int k) { copy(LoadP{}, tXsP(_, _, k), tXrP(_, _, k)); };
    warp_gemm<LoadVt>(TiledMma{}, thread, tOrP, copy_p, fragments.tOrVt, sVt(n_block), tOrO);
  }
};

}  // namespace flash_cute::sm80
