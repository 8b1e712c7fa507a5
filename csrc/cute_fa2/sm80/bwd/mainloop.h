// The SM80 main loop of the backward: a tile of keys walks over the query rows that see them, from
// the last block to the first, in each query head of its group.
//
//   S = Q K^T      P = 2^(scale_log2 S - lse_log2)        dV += P^T dO
//   dP = dO V^T    dS = P * (dP - delta)                  dK += dS^T Q     dQ += dS K
//
// The scale goes onto the sums: onto dS, it could leave fp16's range.
#pragma once

#include <cute/tensor.hpp>

#include "common/gradient.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/row_grad_stats.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "sm80/bwd/accumulator.h"
#include "sm80/bwd/arguments.h"
#include "sm80/copy.h"
#include "sm80/fragment.h"
#include "sm80/gemm.h"
#include "sm80/layouts.h"
#include "sm80/tf32.h"

namespace flash_cute::sm80 {

// Of one thread and one tile.
template <class Traits, MaskKind kMask>
class BwdMainloop {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Sums = AccumulatorSums<Traits>;
  using TiledMmaS = typename Traits::TiledMmaS;
  using TiledMmaDkv = typename Traits::TiledMmaDkv;
  using TiledMmaDq = typename Traits::TiledMmaDq;
  using ShapeQ = typename Traits::ShapeQ;
  using ShapeDout = typename Traits::ShapeDout;
  using ShapeK = typename Traits::ShapeK;
  using ShapeV = typename Traits::ShapeV;
  using ShapeS = typename Traits::ShapeS;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;

 public:
  using TileMask = Mask<kMask, UnpackedRows>;

  CUTE_DEVICE BwdMainloop(const BwdArguments& arguments, const TileCoord& tile,
                          const TileMask& mask, const Sequence& sequence, SharedMemory& smem)
      : arguments_(arguments),
        params_(arguments.params),
        tile_(tile),
        mask_(mask),
        sequence_(sequence),
        smem_(smem),
        thread_(platform::thread_index()),
        n_block_(tile.m_block) {}  // the blocks of this kernel are of keys

  // Leaves the sums in tdKrdK (4, MMA_N, kHeadDim / 8) and tdVrdV (4, MMA_N, kHeadDimV / 8).
  template <class Dk, class Dv>
  CUTE_DEVICE void run(Dk& tdKrdK, Dv& tdVrdV) {
    cute::clear(tdKrdK);
    cute::clear(tdVrdV);
    const BlockRange visible = this->visible(n_block_);
    if (visible.end <= visible.begin) return;
    load<ShapeK>(params_.k, tile_.head, n_block_, sequence_.first_k, sequence_.len_k,
                 params_.head_dim, sK());
    load<ShapeV>(params_.v, tile_.head, n_block_, sequence_.first_k, sequence_.len_k,
                 params_.head_dim_v, sV());
    Block block = {first_head(), visible.end - 1};
    unsigned stage = 0;
    load_block(block, stage);
    platform::commit_copies();
    while (block.head >= 0) {
      step(block, stage, tdKrdK, tdVrdV);
      block = next_of(block);
      stage = (stage + 1) % Traits::kStages;
    }
  }

 private:
  // Query rows of one head.
  struct Block {
    int head;
    int m_block;
  };

  // -- which blocks ------------------------------------------------------------------------------

  // The blocks of rows that see keys of the tile. A dQ that is stored at once is stored everywhere.
  CUTE_DEVICE BlockRange visible(int n_block) const {
    if (stores_dq()) return {0, params_.m_blocks};
    const int key0 = n_block * kBlockN, key_end = cute::min(key0 + kBlockN, sequence_.len_k);
    return mask().visible_row_blocks(key0, key_end, sequence_.len_q, kBlockM);
  }

  // The query heads of this CTA: those of the group, or a share of them.
  CUTE_DEVICE int first_head() const {
    return tile_.head * params_.group_size + tile_.split * arguments_.heads_of_split;
  }
  CUTE_DEVICE int end_head() const {
    return cute::min(first_head() + arguments_.heads_of_split,
                     (tile_.head + 1) * params_.group_size);
  }

  // The block behind; its head is -1 if there is none. Computed anew in each step: it costs no
  // register through the loop.
  CUTE_DEVICE Block next_of(Block block) const {
    const BlockRange visible = this->visible(platform::rematerialize(n_block_, block.m_block));
    if (block.m_block > visible.begin) return {block.head, block.m_block - 1};
    const int head = block.head + 1;  // fault: bwd-group-head
    return {head < end_head() ? head : -1, visible.end - 1};
  }

  // For packed sequences made anew, from what shared memory has: it would hold registers.
  CUTE_DEVICE decltype(auto) mask() const {
    if constexpr (has_sequences(kMask)) {
      return TileMask(params_, sequence_, UnpackedRows{});
    } else {
      return (mask_);
    }
  }

  // Whether one key block has all keys, and dQ is stored at once.
  CUTE_DEVICE bool stores_dq() const { return Traits::kStoresDq && !params_.workspace.dq; }

  // -- shared memory -----------------------------------------------------------------------------

  template <class Shape>
  static CUTE_DEVICE auto tile(Element* data) {
    return make_tensor(cute::make_smem_ptr(data), typename Traits::template SmemLayout<Shape>{});
  }
  template <class Shape>
  static CUTE_DEVICE auto transposed(Element* data) {  // the same elements
    return make_tensor(cute::make_smem_ptr(data),
                       typename Traits::template SmemLayoutTransposed<Shape>{});
  }
  static CUTE_DEVICE auto stored(Element* p_or_ds) {  // (M, N)
    return make_tensor(cute::make_smem_ptr(p_or_ds), typename Traits::SmemLayoutStored{});
  }
  static CUTE_DEVICE auto stored_transposed(Element* p_or_ds) {  // (N, M)
    return make_tensor(cute::make_smem_ptr(p_or_ds), typename Traits::SmemLayoutStoredTransposed{});
  }
  CUTE_DEVICE auto sK() const { return tile<ShapeK>(smem_.k); }                           // (N, D)
  CUTE_DEVICE auto sV() const { return tile<ShapeV>(smem_.v); }                           // (N, Dv)
  CUTE_DEVICE auto sQ(int stage) const { return tile<ShapeQ>(smem_.q[stage]); }           // (M, D)
  CUTE_DEVICE auto sDout(int stage) const { return tile<ShapeDout>(smem_.dout[stage]); }  // (M, Dv)

  // Issues the copy of block `index` of a head's rows. Rows that do not exist become zeros.
  template <class Shape, class Target>
  CUTE_DEVICE void load(const TensorView<const void*>& view, int head, int index, int64_t first,
                        int rows, int columns, Target&& target) const {
    constexpr int kRows = decltype(cute::size<0>(Shape{}))::value;
    constexpr int kColumns = decltype(cute::size<1>(Shape{}))::value;
    const TileLoader<typename Traits::template GmemCopy<kColumns>, Shape> loader(
        platform::rematerialize(thread_), columns);
    const int64_t stride_row = platform::rematerialize(view.stride_row);
    const Element* const matrix = static_cast<const Element*>(view.data) +
                                  tile_.batch * view.stride_batch + head * view.stride_head +
                                  first * stride_row;
    const Element* source = loader.find(matrix, stride_row, index);
    loader.template load<false>(source, stride_row, target, rows - index * kRows);
  }

  CUTE_DEVICE int64_t index_of(Block block) const {
    if constexpr (has_sequences(kMask)) {
      return int64_t{block.head} * params_.m_blocks + smem_.first_index + block.m_block;
    }
    return (int64_t{tile_.batch} * params_.heads_q + block.head) * params_.m_blocks + block.m_block;
  }

  // Q, dO and the statistics of a block.
  CUTE_DEVICE void load_block(Block block, unsigned stage) const {
    using namespace cute;
    load<ShapeQ>(params_.q, block.head, block.m_block, sequence_.first_q, sequence_.len_q,
                 params_.head_dim, sQ(stage));
    load<ShapeDout>(params_.dout, block.head, block.m_block, sequence_.first_q, sequence_.len_q,
                    params_.head_dim_v, sDout(stage));
    if (thread_ < kBlockM / 2) {  // two rows a thread
      const auto* from = reinterpret_cast<const float*>(params_.workspace.stats +
                                                        index_of(block) * kBlockM + 2 * thread_);
      auto* to = reinterpret_cast<float*>(&smem_.stats[stage][thread_]);
      copy(Copy_Atom<platform::CopyGlobalToShared, float>{}.with(true),
           make_tensor(make_gmem_ptr(from), Shape<_4>{}),
           make_tensor(make_smem_ptr(to), Shape<_4>{}));
    }
  }

  // -- a block -----------------------------------------------------------------------------------

  template <class Dk, class Dv>
  CUTE_DEVICE void step(Block block, unsigned stage, Dk& tdKrdK, Dv& tdVrdV) {
    using namespace cute;
    // Q, dO and statistics of this block (and K and V, in the first step) are there, for all
    // threads. All warps are done with P, dS and the block before, which may be overwritten.
    platform::wait_copies<0>();
    platform::sync_cta();
    if constexpr (Traits::kStages == 2) load_next(block, stage ^ 1);
    prefetch_bias(block);

    auto tSrS = partition_fragment_C(TiledMmaS{}, ShapeS{});   // (4, MMA_M, N / 8)
    auto tSrDp = partition_fragment_C(TiledMmaS{}, ShapeS{});  // (4, MMA_M, N / 8)
    gemm_of_rows<TiledMmaS>(sQ(stage), sK(), tSrS);
    const int row0 = block.m_block * kBlockM;
    if constexpr (kMask == MaskKind::kScored) {
      auto derivatives = make_fragment_like<Derivative<Element>>(tSrS);
      change_scores(block, tSrS, derivatives);
      to_exponents(row0, stage, tSrS);
      exponentiate_to(stored(smem_.p), tSrS)(0, 1);  // all at once
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) *= float(derivatives(i));
      gemm_of_rows<TiledMmaS>(sDout(stage), sV(), tSrDp);
    } else {
      to_exponents(row0, stage, tSrS);
      gemm_of_rows<TiledMmaS>(sDout(stage), sV(), tSrDp, exponentiate_to(stored(smem_.p), tSrS));
    }
    to_score_gradients(stage, tSrS, tSrDp);
    store_shared(tSrDp, stored(smem_.ds));
    platform::sync_cta();  // P and dS are there, of all warps; fault: bwd-ds-barrier

    const auto accumulate_dk = [&](const auto& meanwhile) {
      accumulate(stored_transposed(smem_.ds), transposed<ShapeQ>(smem_.q[stage]), tdKrdK,
                 meanwhile);
    };
    accumulate(stored_transposed(smem_.p), transposed<ShapeDout>(smem_.dout[stage]), tdVrdV);
    if constexpr (Traits::kStages == 1) {
      accumulate_dk(DoNothing{});
      platform::sync_cta();  // all warps are done with Q and dO, which may be overwritten
      load_next(block, 0);
    }
    auto tdQrdQ = partition_fragment_C(TiledMmaDq{}, ShapeQ{});  // (4, MMA_M, D / 8)
    cute::clear(tdQrdQ);
    multiply<typename Traits::template LoadA<TiledMmaDq>,
             typename Traits::template LoadTransposedB<TiledMmaDq>>(
        TiledMmaDq{}, tile<ShapeS>(smem_.ds), transposed<ShapeK>(smem_.k), tdQrdQ);
    if constexpr (Traits::kStages == 1) {
      add_dq(block, tdQrdQ);
    } else if (!adds_in_any_order()) {
      add_dq(block, tdQrdQ);
      accumulate_dk(DoNothing{});
    } else {  // the sums of dQ leave while dK is made
      float* const sums = sums_of_dq(block);
      accumulate_dk([&](int share, int count) { Sums::add_to(sums, tdQrdQ, share, count); });
    }
  }

  CUTE_DEVICE void load_next(Block block, unsigned stage) const {
    const Block next = next_of(block);
    if (next.head >= 0) load_block(next, stage);
    platform::commit_copies();
  }

  // C += A B^T, and other work `meanwhile` (sm80/gemm.h). In fp32 each k8 step from zero, as errors
  // of dP - delta do not average out. kTerms of them are added up ahead of C. Two steps stand in a
  // loop: in one piece, ptxas has too much on its way.
  template <class LoadA, class LoadB, int kTerms = 1, class TiledMma, class A, class B, class C,
            class Meanwhile = DoNothing>
  CUTE_DEVICE void multiply(TiledMma mma, const A& sA, const B& sB, C& rC,
                            const Meanwhile& meanwhile = {}) const {
    const unsigned thread = platform::rematerialize(thread_);
    if constexpr (Traits::kIsFp32) {
      using namespace cute;
      meanwhile(0, 1);
      CUTE_NO_UNROLL
      for (int i = 0; i < size<1>(sA) / 16; ++i) {
        staged_smem_gemm<LoadA, LoadB, 1, kTerms, 1>(
            mma, platform::rematerialize(thread, i),
            local_tile(sA, make_shape(size<0>(sA), _16{}), make_coord(_0{}, i)),
            local_tile(sB, make_shape(size<0>(sB), _16{}), make_coord(_0{}, i)), rC, DoNothing{});
      }
    } else {
      smem_gemm<LoadA, LoadB>(mma, thread, sA, sB, rC, meanwhile);
    }
  }

  // C = A B^T
  template <class TiledMma, class A, class B, class C, class Meanwhile = DoNothing>
  CUTE_DEVICE void gemm_of_rows(const A& sA, const B& sB, C& rC,
                                const Meanwhile& meanwhile = {}) const {
    clear(rC);
    multiply<typename Traits::template LoadA<TiledMma>, typename Traits::template LoadB<TiledMma>>(
        TiledMma{}, sA, sB, rC, meanwhile);
  }

  // dK or dV += A B^T, where both lie transposed in shared memory. They are large after many rows:
  // with two terms, half as many sums are rounded beside them.
  template <class A, class B, class C, class Meanwhile = DoNothing>
  CUTE_DEVICE void accumulate(const A& sA, const B& sB, C& rC,
                              const Meanwhile& meanwhile = {}) const {
    multiply<typename Traits::template LoadTransposedA<TiledMmaDkv>,
             typename Traits::template LoadTransposedB<TiledMmaDkv>, 2>(TiledMmaDkv{}, sA, sB, rC,
                                                                        meanwhile);
  }

  // (rows, columns) -> (row, key), in the tile
  static CUTE_DEVICE auto coords(unsigned thread) {
    return as_matrix(
        TiledMmaS{}.get_slice(thread).partition_C(cute::make_identity_tensor(ShapeS{})));
  }

  // `derivatives`: of the changed scores by S, but for the scale.
  template <class S, class Derivatives>
  CUTE_DEVICE void change_scores(Block block, S& tSrS, Derivatives& derivatives) const {
    auto scores = as_matrix(tSrS);  // (rows, columns)
    const ScoreMod<Element, true> score_mod(params_, sequence_, tile_.batch);
    score_mod.apply(scores, as_matrix(derivatives), coords(platform::rematerialize(thread_)),
                    coords(0u), block.m_block * kBlockM, n_block_ * kBlockN,
                    [&](int row) { return PackGqa::HeadAndQuery{block.head, row}; });
  }

  CUTE_DEVICE void prefetch_bias(Block block) const {
    if constexpr (kMask == MaskKind::kScored && Traits::kHeadDim != 128) {  // there it would spill
      ScoreMod<Element, true>(params_, sequence_, tile_.batch)
          .template prefetch_bias<kBlockM, kBlockN, Traits::kThreads>(
              platform::rematerialize(thread_), block.m_block * kBlockM, n_block_ * kBlockN,
              [&](int row) { return PackGqa::HeadAndQuery{block.head, row}; });
    }
  }

  // The exponents of P from S. The mask goes onto them: the weight of a key that its row does not
  // see may be inf.
  template <class S>
  CUTE_DEVICE void to_exponents(int row0, unsigned stage, S& tSrS) const {
    using namespace cute;
    auto weights = as_matrix(tSrS);  // (rows, columns)
    const auto at = coords(platform::rematerialize(thread_));
    const StatsOfRows stats(smem_.stats[stage], get<0>(at(0, 0)));
    const float scale_log2 = params_.scale.signed_log2();
    CUTE_UNROLL
    for (int r = 0; r < size<0>(weights); ++r) {
      const float lse_log2 = stats(get<0>(coords(0u)(r, 0))).lse_log2;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(weights); ++c) {
        weights(r, c) = fmaf(weights(r, c), scale_log2, -lse_log2);
        if constexpr (kMask == MaskKind::kScored) weights(r, c) = not_above_0(weights(r, c));
      }
    }
    const int key0 = n_block_ * kBlockN;  // fault: bwd-mask
    const auto& mask = this->mask();
    if (mask.cuts(row0, kBlockM, key0, kBlockN)) {
      mask.apply(weights, coords(platform::rematerialize(thread_)), coords(0u), row0, kBlockM, key0,
                 kBlockN);
    }
  }

  // Interleaved work: P from its exponents, in their place and to the tile `to`, (M, N).
  template <class Target, class S>
  CUTE_DEVICE auto exponentiate_to(Target&& to, S& tSrS) const {
    using namespace cute;
    using Store = typename Traits::StoreS;
    const auto store = Store{}.get_slice(platform::rematerialize(thread_));
    auto tPrS = store.retile_S(tSrS);   // (8, MMA_M, N / 16)
    auto tPsP = store.partition_D(to);  // as tPrS
    return [tPrS, tPsP](int share, int count) {
      constexpr int kRows = decltype(size<1>(tPrS))::value;
      constexpr int kParts = kRows * decltype(size<2>(tPrS))::value;
      CUTE_UNROLL
      for (int i = kParts * share / count; i < kParts * (share + 1) / count; ++i) {
        auto part = tPrS(_, i % kRows, i / kRows);
        CUTE_UNROLL
        for (int j = 0; j < size(part); ++j) part(j) = platform::exp2(part(j));
        copy(Store{}, convert_pairs<Element>(part), tPsP(_, i % kRows, i / kRows));
      }
    };
  }

  // dS from dP, in its place.
  template <class P, class Dp>
  CUTE_DEVICE void to_score_gradients(unsigned stage, P& tSrP, Dp& tSrDp) const {
    using namespace cute;
    const auto weights = as_matrix(tSrP);  // (rows, columns)
    auto ds = as_matrix(tSrDp);            // (rows, columns)
    const auto at = coords(platform::rematerialize(thread_));
    const StatsOfRows stats(smem_.stats[stage], get<0>(at(0, 0)));
    CUTE_UNROLL
    for (int r = 0; r < size<0>(ds); ++r) {
      const float delta = stats(get<0>(coords(0u)(r, 0))).delta;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(ds); ++c) ds(r, c) = weights(r, c) * (ds(r, c) - delta);
    }
  }

  // To the tile `to`, (M, N).
  template <class S, class Target>
  CUTE_DEVICE void store_shared(const S& tSrS, Target&& to) const {
    using namespace cute;
    using Store = typename Traits::StoreS;
    auto elements = convert<Element>(tSrS);  // (4, MMA_M, N / 8)
    auto store = Store{}.get_slice(platform::rematerialize(thread_));
    // Both (8, MMA_M, N / 16).
    copy(Store{}, store.retile_S(elements), store.partition_D(to));
  }

  // Whether sums of dQ may leave one by one. Turns need barriers around all of them.
  CUTE_DEVICE bool adds_in_any_order() const { return !stores_dq() && !params_.workspace.tickets; }
  CUTE_DEVICE float* sums_of_dq(Block block) const {
    return params_.workspace.dq + index_of(block) * cute::size(ShapeQ{});
  }

  // Adds this tile's part of dQ to the sums of the block. Where they are in order, after the parts
  // of all earlier keys that the block sees.
  template <class Dq>
  CUTE_DEVICE void add_dq(Block block, Dq& tdQrdQ) const {
    const int row0 = block.m_block * kBlockM;
    if (stores_dq()) {
      const GradientPlace place = {params_.dq,        tile_.batch,     block.head,
                                   sequence_.first_q, sequence_.len_q, params_.head_dim};
      store_gradient<Element, TiledMmaDq, ShapeQ>(place, row0, params_.scale.scale, tdQrdQ,
                                                  thread_);
      return;
    }
    const BwdWorkspace& workspace = params_.workspace;
    float* const sums = sums_of_dq(block);
    if (!workspace.tickets) return Sums::add_to(sums, tdQrdQ);
    int* const added = workspace.added + index_of(block);
    if (thread_ == 0) {
      const int row_end = cute::min(row0 + kBlockM, sequence_.len_q);
      const int turn = n_block_ - mask().visible_blocks(row0, row_end, kBlockN).begin;
      platform::wait_for_turn(added, turn);  // fault: bwd-turn
    }
    platform::sync_cta();  // it is this CTA's turn
    Sums::add_to(sums, tdQrdQ);
    platform::publish();
    platform::sync_cta();  // all threads have added
    if (thread_ == 0) platform::pass_turn(added);
  }

  const BwdArguments& arguments_;
  const BwdParams& params_;
  const TileCoord& tile_;  // of packed sequences in shared memory: read when it is asked for
  const TileMask& mask_;
  const Sequence& sequence_;
  SharedMemory& smem_;
  unsigned thread_;
  int n_block_;
};

}  // namespace flash_cute::sm80
