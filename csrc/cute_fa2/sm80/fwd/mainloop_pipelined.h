// The SM80 main loop with pipelined Q K^T. The step of a key block also computes S of the next, 16
// keys at a time. It takes the registers that this block's scores have left. Q stays in registers;
// shared memory holds two key blocks.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "sm80/fwd/mainloop_base.h"

namespace flash_cute::sm80 {

template <class Traits, MaskKind kMask, class KVSource>
class FwdMainloopPipelined : FwdMainloopBase<Traits, kMask, KVSource> {
  using Base = FwdMainloopBase<Traits, kMask, KVSource>;
  using Base::arguments_, Base::kv_source_, Base::mask_, Base::row0_, Base::smem_, Base::softmax_,
      Base::thread_;
  using Base::has_next, Base::has_previous, Base::kBlockN, Base::kMmaRows, Base::sK, Base::sQ,
      Base::sVt;
  using typename Base::AllRows, typename Base::FirstHalf, typename Base::SecondHalf;
  using typename Base::Element, typename Base::LoadK, typename Base::LoadQ, typename Base::LoadVt;
  using typename Base::ShapeS, typename Base::TiledMma;
  static_assert(!Traits::kSharesRows);
  // No more than one block, as it has as many keys as the half has rows.
  static constexpr bool kSkipsFirstHalf =
      Base::kHasHalves && kMask != MaskKind::kFull && kBlockN == kMmaRows;

  // What stays in registers through the loop. As members of the class they made ptxas spill.
  struct Fragments {
    typename Base::template FragmentA<typename Traits::ShapeQ> tSrQ;    // (8, MMA_M, D / 16)
    typename Base::template FragmentB<typename Traits::ShapeK> tSrK;    // (4, N / 8, D / 16)
    typename Base::template FragmentB<typename Traits::ShapeVt> tOrVt;  // (4, Dv / 8, N / 16)
    // S of all rows and of the block that is next to be worked on.
    decltype(cute::partition_fragment_C(TiledMma{}, ShapeS{})) tSrS_all;  // (4, MMA_M, N / 8)
    // Whether a row's limit may be exceeded by the block's scores; asked before the mask. All are
    // by the first block. (ptxas spills a bool, which is a byte, at head dim 64.)
    int may_exceed = 1;

    // As LoadQ writes it: (ldmatrix, MMA_M, D / 16).
    CUTE_DEVICE auto tXrQ() { return LoadQ{}.get_slice(0).retile_D(tSrQ); }
  };

 public:
  using Base::Base;
  using typename Base::Softmax;

  // Leaves the weighted sum of V in `tOrO` (4, MMA_M, kHeadDimV / 8), which it clears, and its
  // statistics in the softmax. On return no warp reads Q's space any more.
  template <class Out>
  CUTE_DEVICE void run(Out& tOrO) {
    using namespace cute;
    clear(tOrO);
    const int row_end = this->row_end();
    const BlockRange visible = mask_.visible_blocks(row0_, row_end, kBlockN);
    if (visible.end <= visible.begin) return;
    const int n_block = visible.end - 1;
    load_first(n_block);
    Fragments fragments;
    platform::sync_cta();  // Q and K of the first block are there, for all threads
    const unsigned thread_here = platform::rematerialize(thread_, n_block);
    copy(LoadQ{}, LoadQ{}.get_slice(thread_here).partition_S(sQ()), fragments.tXrQ());
    clear(fragments.tSrS_all);
    if (!Base::kUsesFirstHalf || row_end - row0_ > kMmaRows) {
      loop<AllRows>(n_block, fragments, tOrO);
    } else if constexpr (Base::kUsesFirstHalf) {
      loop<FirstHalf>(n_block, fragments, tOrO);
    }
  }

 private:
  template <class Rows, class Out>
  CUTE_DEVICE void loop(int n_block, Fragments& fragments, Out& tOrO) {
    constexpr bool kMaySkip = kSkipsFirstHalf && std::is_same_v<Rows, AllRows>;
    const unsigned thread_here = platform::rematerialize(thread_, n_block);
    if (kMaySkip && this->skips_first_half(n_block)) {
      if constexpr (kMaySkip) {
        first_scores<SecondHalf>(thread_here, n_block, fragments);
        step<SecondHalf, true>(n_block--, fragments, tOrO);
      }
    } else {
      first_scores<Rows>(thread_here, n_block, fragments);
    }
    for (; has_next(n_block); --n_block) step<Rows, true>(n_block, fragments, tOrO);
    step<Rows, false>(n_block, fragments, tOrO);
  }

  // Starts the copies of Q and the first K, of the first V and the second K. This thread's part of
  // the former is there on return.
  CUTE_DEVICE void load_first(int n_block) const {
    this->load_q();
    kv_source_.start(n_block);
    this->template load_k<false>(n_block);
    platform::commit_copies();
    this->template load_v<false>(n_block);
    if (has_next(n_block)) this->load_k(n_block - 1);
    platform::commit_copies();
    platform::wait_copies<1>();  // this thread's part of Q and K is there
    if (arguments_.params.scale.q_sign != 1.f) this->multiply_q_by_sign();
  }

  // The rows of the next step. The second half is never alone there.
  template <class Rows>
  using NextRows = std::conditional_t<std::is_same_v<Rows, SecondHalf>, AllRows, Rows>;

  // S of the first block.
  template <class Rows>
  CUTE_DEVICE void first_scores(unsigned thread, int n_block, Fragments& fragments) {
    auto tSrS = select_rows<Rows>(fragments.tSrS_all);  // (4, MMA_M, N / 8)
    auto tSrQ = select_rows<Rows>(fragments.tSrQ);      // (8, MMA_M, D / 16)
    warp_gemm<LoadK>(TiledMma{}, thread, tSrQ, [](int) {}, fragments.tSrK, sK(n_block), tSrS);
    auto scores = as_matrix(tSrS);  // (rows, columns)
    this->template change_scores<Rows::kCount * kMmaRows>(row0_ + Rows::kFirst * kMmaRows,
                                                          n_block * kBlockN, scores);
  }

  // One key block; with kHasNext also S of the next.
  template <class Rows, bool kHasNext, class Out>
  CUTE_DEVICE void step(int index, Fragments& fragments, Out& tOrO) {
    using namespace cute;
    constexpr int kStepM = Rows::kCount * kMmaRows;
    const int n_block = platform::rematerialize(index);
    // V of this block and K of the next are there, for all threads. All warps are done with what
    // the step before has read, which may be overwritten.
    platform::wait_copies<0>();  // fault: copy-wait
    platform::sync_cta();
    if constexpr (kHasNext) {
      this->load_v(n_block - 1);
      if (has_next(n_block - 1)) this->load_k(n_block - 2);  // fault: stage
      this->template prefetch_bias<NextRows<Rows>::kCount * kMmaRows>(
          row0_ + NextRows<Rows>::kFirst * kMmaRows, (n_block - 1) * kBlockN);
    }
    platform::commit_copies();

    const unsigned thread_here = platform::rematerialize(thread_, n_block);
    auto tSrS = select_rows<Rows>(fragments.tSrS_all);  // (4, MMA_M, N / 8)
    auto scores = as_matrix(tSrS);                      // (rows, columns)
    auto tOrO_step = select_rows<Rows>(tOrO);           // (4, MMA_M, Dv / 8)
    auto out = as_matrix(tOrO_step);                    // (rows, columns)
    this->template apply_mask<kStepM>(row0_ + Rows::kFirst * kMmaRows, n_block * kBlockN, scores);
    const bool is_first = !has_previous(n_block);
    const bool updated = softmax_.template update_limits<Rows::kFirstRow>(
        scores, fragments.may_exceed != 0, is_first,
        row_allreduce<Traits>(smem_, platform::rematerialize(thread_)));
    // Before the first block O is 0.
    if (updated && !is_first) softmax_.template rescale<Rows::kFirstRow>(out);

    softmax_and_gemms<Rows, kHasNext>(thread_here, n_block, softmax_.subtrahends(), fragments,
                                      tOrO_step);
    if constexpr (kHasNext) {
      auto tSrS_next = select_rows<NextRows<Rows>>(fragments.tSrS_all);  // (4, MMA_M, N / 8)
      auto next_scores = as_matrix(tSrS_next);                           // (rows, columns)
      this->template change_scores<NextRows<Rows>::kCount * kMmaRows>(
          row0_ + NextRows<Rows>::kFirst * kMmaRows, (n_block - 1) * kBlockN, next_scores);
      fragments.may_exceed = softmax_.may_exceed(next_scores);
    }
  }

  // P = exp2(S) and O += P V of this block. With kHasNext, S = Q K^T of the next takes the place of
  // the scores. It goes by pieces of 16 keys. One piece has its products while the next has its
  // exponentials. The fence between pieces is a branch. Without it ptxas takes all exponentials
  // first, and all of S last.
  template <class Rows, bool kHasNext, class Out>
  CUTE_DEVICE void softmax_and_gemms(unsigned thread, int n_block,
                                     const typename Softmax::Subtrahends& subtrahends,
                                     Fragments& fragments, Out& tOrO_step) {
    using namespace cute;
    constexpr int kPieces = kBlockN / 16;
    constexpr int kStepsOfS = Traits::kHeadDim / 16, kPairsOfO = Traits::kHeadDimV / 16;
    // The first ldmatrix of K and so many of V are issued before a piece's fence. Products can then
    // begin behind it.
    constexpr int kFirstV = kPairsOfO < 3 ? kPairsOfO : 3;
    const int next_block = kHasNext ? n_block - 1 : n_block;  // in the last step it is not read
    auto copy_k = copy_b_fragments<LoadK>(thread, fragments.tSrK, sK(next_block));
    auto copy_v = copy_b_fragments<LoadVt>(thread, fragments.tOrVt, sVt(n_block));
    auto tSrS_step = select_rows<Rows>(fragments.tSrS_all);            // (4, MMA_M, N / 8)
    auto tSrS_next = select_rows<NextRows<Rows>>(fragments.tSrS_all);  // likewise, of the next step
    auto tSrQ_next = select_rows<NextRows<Rows>>(fragments.tSrQ);      // (8, MMA_M, D / 16)
    // P, two elements a word.
    auto words = make_tensor<uint32_t>(
        make_shape(_4{}, size<1>(tSrS_step), Int<kPieces>{}));  // (4, MMA_M, N / 16)
    auto tOrP = recast<Element>(words);                         // (8, MMA_M, N / 16)
    auto exp2_of = [&](int piece) {
      auto accumulators = pair_of_columns(tSrS_step, piece);  // (4, MMA_M, 2)
      auto scores = as_matrix(accumulators);                  // (rows, columns)
      softmax_.template apply_exp2<Rows::kFirstRow>(scores, subtrahends);
      auto words_of_piece = words(_, _, piece);  // (4, MMA_M)
      convert_to_words<Element>(as_a_operand(accumulators), words_of_piece);
    };
    auto copy_first = [&](int piece) {
      if constexpr (kHasNext) copy_k(piece, 0);
      CUTE_UNROLL
      for (int pair = 0; pair < kFirstV; ++pair) copy_v(pair, piece);
    };
    exp2_of(0);
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece > 0) platform::schedule_fence(n_block);
      if (piece + 1 < kPieces) exp2_of(piece + 1);
      if constexpr (kHasNext) {
        clear(pair_of_columns(tSrS_next, piece));
        CUTE_UNROLL
        for (int k = 0; k < kStepsOfS; ++k) {
          if (piece == 0 || k > 0) copy_k(piece, k);
          gemm_pair(TiledMma{}, tSrQ_next(_, _, k), fragments.tSrK(_, _, k), piece, tSrS_next);
        }
      }
      CUTE_UNROLL
      for (int pair = 0; pair < kPairsOfO; ++pair) {
        if (piece == 0 || pair >= kFirstV) copy_v(pair, piece);
        gemm_pair(TiledMma{}, tOrP(_, _, piece), fragments.tOrVt(_, _, piece), pair, tOrO_step);
      }
      if (piece + 1 < kPieces) copy_first(piece + 1);
    }
  }
};

}  // namespace flash_cute::sm80
