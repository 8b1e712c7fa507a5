// The gradient of a bias up to head dim 256, in 16 bits. Sums of dS are in registers. Q and K of
// the next block are copied under dP, dO and V of this one under S:
//
//   copies     | dO(i), V(i) ....... | Q(i+1), K(i+1) .... |
//   products   | S = Q K^T |         | dP = dO V^T |       |
//   others     |           | P = 2^x |             | sums  |
//              A                     B
#pragma once

#include <cute/tensor.hpp>

#include "common/element.h"
#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/row_grad_stats.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "host/params.h"
#include "sm80/bwd/bias_tiles.h"
#include "sm80/copy.h"
#include "sm80/gemm.h"
#include "sm80/layouts.h"
#include "tiles/bias_gradient_sm80.h"

namespace flash_cute::sm80 {

template <DType kDType, int kHeadDim_>
struct BiasGradientTraits {
  using Element = ElementOf<kDType>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = bias_tile_sm80(kHeadDim).block_m;
  static constexpr int kBlockN = bias_tile_sm80(kHeadDim).block_n;
  static constexpr int kThreads = 256;
  static constexpr int kMinCtas = 2;

  using ShapeQ = cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>>;  // and of dO
  using ShapeK = cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>>;  // and of V
  using ShapeS = cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>>;
  // A warp has 16 rows: their operands take few registers.
  static constexpr int kRowWarps = kBlockM / 16;
  using TiledMma = TiledMmaOf<Element, kRowWarps, kThreads / 32 / kRowWarps>;
  using Tiles = BiasTiles<Element, TiledMma, ShapeS, kThreads>;
  using GmemCopy = GmemTiledCopy<platform::CopyGlobalToShared, Element, kThreads, strip(kHeadDim)>;
  using LoadMatrix = cute::Copy_Atom<platform::LoadMatrix, Element>;
  using LoadA = decltype(cute::make_tiled_copy_A(LoadMatrix{}, TiledMma{}));
  using LoadB = decltype(cute::make_tiled_copy_B(LoadMatrix{}, TiledMma{}));

  struct Operands {
    alignas(128) Element q[cute::size(ShapeQ{})];
    alignas(128) Element dout[cute::size(ShapeQ{})];
    alignas(128) Element k[cute::size(ShapeK{})];
    alignas(128) Element v[cute::size(ShapeK{})];
  };
  struct SharedMemory {
    union {
      Operands operands;
      float sums[kBlockM * kBlockN];  // on their way out
    };
    typename Tiles::Tile tile;
    // Of this block and the next:
    TwoRowGradStats stats[2][kBlockM / 2];
    typename Tiles::Block blocks[2];
  };
  static_assert(sizeof(SharedMemory) <= 99 * 1024);
};

template <class Traits_>
struct BiasGradientKernel {
  using Traits = Traits_;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using TiledMma = typename Traits::TiledMma;
  using ShapeQ = typename Traits::ShapeQ;
  using ShapeK = typename Traits::ShapeK;
  using ShapeS = typename Traits::ShapeS;
  // dP is computed for so many keys at a time: registers are short.
  static constexpr int kKeysOfDp = 32;
  using ShapeDp = cute::Shape<cute::Int<Traits::kBlockM>, cute::Int<kKeysOfDp>>;
  using ShapeV = cute::Shape<cute::Int<kKeysOfDp>, cute::Int<Traits::kHeadDim>>;
  using Tiles = typename Traits::Tiles;
  using Block = typename Tiles::Block;
  using Arguments = typename Tiles::Arguments;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    if (platform::thread_index() == 0) {
      smem.tile = Tiles::of_cta(arguments);
      smem.blocks[0] = Tiles::first(arguments, smem.tile);
    }
    platform::sync_cta();  // it is known which block comes first, to all threads
    if (!smem.blocks[0].exists()) return Tiles::store_zeros(arguments, smem.tile);
    load_q_and_k(arguments, smem, 0);
    prefetch_bias(arguments.params, smem.blocks[0]);
    auto sums = partition_fragment_C(TiledMma{}, ShapeS{});  // (4, MMA_M, kBlockN / 16)
    cute::clear(sums);
    for (int stage = 0; smem.blocks[stage].exists(); stage ^= 1) {
      add(arguments, smem, stage, sums);
    }
    platform::sync_cta();  // all warps are done with the last block
    Tiles::store(arguments, smem.tile, sums, smem.sums);
  }

 private:
  // Adds dS of a block.
  template <class Sums>
  static CUTE_DEVICE void add(const Arguments& arguments, SharedMemory& smem, int stage,
                              Sums& sums) {
    using namespace cute;
    // A: Q, K and statistics are there, for all threads. All warps are done with dO and V of the
    // block before, which may be overwritten.
    platform::wait_copies<0>();
    platform::sync_cta();
    load_dout_and_v(arguments.params, smem, stage);
    if (platform::thread_index() == 0) {
      const Block next = Tiles::next(arguments, smem.tile, smem.blocks[stage]);
      smem.blocks[stage ^ 1] = next;
    }
    const Block& block = smem.blocks[stage];
    auto tSrP = partition_fragment_C(TiledMma{}, ShapeS{});  // as sums
    gemm(tile<ShapeQ>(smem.operands.q), tile<ShapeK>(smem.operands.k), block, tSrP);
    to_weights(arguments.params, smem, stage, tSrP);

    // B: dO and V are there, and it is known which block comes next, for all threads. All warps are
    // done with Q and K, which may be overwritten.
    platform::wait_copies<0>();
    platform::sync_cta();
    if (smem.blocks[stage ^ 1].exists()) load_q_and_k(arguments, smem, stage ^ 1);
    const auto weights = as_matrix(tSrP);  // (rows, columns)
    auto sum = as_matrix(sums);            // likewise
    CUTE_UNROLL
    for (int part = 0; part < kBlockN / kKeysOfDp; ++part) {
      auto tSrDp = partition_fragment_C(TiledMma{}, ShapeDp{});  // (4, MMA_M, kKeysOfDp / 16)
      const auto sV = local_tile(tile<ShapeK>(smem.operands.v), ShapeV{}, make_coord(part, _0{}));
      gemm(tile<ShapeQ>(smem.operands.dout), sV, block, tSrDp);
      const auto dp = as_matrix(tSrDp);  // (rows, columns)
      for_each_row(dp, smem.stats[stage], [&](int r, const RowGradStats& stats) {
        CUTE_UNROLL
        for (int i = 0; i < size<1>(dp); ++i) {
          const int c = part * static_cast<int>(size<1>(dp)) + i;
          // Selected: dP of a key ahead of the sequence may be NaN.
          if (weights(r, c) != 0.f) {
            sum(r, c) = fmaf(weights(r, c), dp(r, i) - stats.delta, sum(r, c));
          }
        }
      });
      // ptxas would take operands of the next part's products, for which there are no registers.
      platform::schedule_fence(block.key_block);
    }
  }

  // P from S.
  template <class S>
  static CUTE_DEVICE void to_weights(const BwdParams& params, const SharedMemory& smem, int stage,
                                     S& tSrS) {
    const Block& block = smem.blocks[stage];
    const int row0 = block.at.m_block * kBlockM;
    const int key0 = block.key_block * kBlockN - block.sequence.first_k;  // may be below 0
    const auto mine = Tiles::coords(platform::rematerialize(platform::thread_index()));
    auto weights = as_matrix(tSrS);  // (rows, columns)
    ScoreMod<Element, true, false>(params, block.sequence, block.at.batch)
        .apply(weights, NoDerivatives{}, mine, Tiles::coords(0u), row0, key0,
               [&](int row) { return PackGqa::HeadAndQuery{block.at.head, row}; });
    const Mask<MaskKind::kScored, UnpackedRows> mask(params, block.sequence, UnpackedRows{});
    mask.apply(weights, mine, Tiles::coords(0u), row0, kBlockM, key0, kBlockN);
    const float scale_log2 = params.scale.signed_log2();
    for_each_row(weights, smem.stats[stage], [&](int r, const RowGradStats& stats) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(weights); ++c) {
        weights(r, c) =
            platform::exp2(not_above_0(fmaf(weights(r, c), scale_log2, -stats.lse_log2)));
      }
    });
  }

  // f(row of the fragment, its statistics)
  template <class Scores, class F>
  static CUTE_DEVICE void for_each_row(const Scores& scores, const TwoRowGradStats* stats,
                                       const F& f) {
    const auto mine = Tiles::coords(platform::rematerialize(platform::thread_index()));
    const StatsOfRows of_rows(stats, cute::get<0>(mine(0, 0)));
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(scores); ++r)
      f(r, of_rows(cute::get<0>(Tiles::coords(0u)(r, 0))));
  }

  // Each block of a CTA has the same bias: it stays in L1.
  static CUTE_DEVICE void prefetch_bias(const BwdParams& params, const Block& block) {
    ScoreMod<Element, true>(params, block.sequence, block.at.batch)
        .template prefetch_bias<kBlockM, kBlockN, Traits::kThreads>(
            platform::thread_index(), block.at.m_block * kBlockM,
            block.key_block * kBlockN - block.sequence.first_k,
            [&](int row) { return PackGqa::HeadAndQuery{block.at.head, row}; });
  }

  // -- copies: what a block shares with the one before is there already --------------------------

  static CUTE_DEVICE void load_q_and_k(const Arguments& arguments, SharedMemory& smem, int stage) {
    const BwdParams& params = arguments.params;
    const Block& block = smem.blocks[stage];
    if (block.has_new_rows) load_rows(params.q, block, params.head_dim, smem.operands.q);
    if (block.has_new_keys) load_keys(params, params.k, block, params.head_dim, smem.operands.k);
    load_stats(arguments, block, smem.stats[stage]);
    platform::commit_copies();
  }
  static CUTE_DEVICE void load_dout_and_v(const BwdParams& params, SharedMemory& smem, int stage) {
    const Block& block = smem.blocks[stage];
    if (block.has_new_rows) load_rows(params.dout, block, params.head_dim_v, smem.operands.dout);
    if (block.has_new_keys) load_keys(params, params.v, block, params.head_dim_v, smem.operands.v);
    platform::commit_copies();
  }
  static CUTE_DEVICE void load_rows(const TensorView<const void*>& view, const Block& block,
                                    int columns, Element* to) {
    load<ShapeQ>(view, block.at.batch, block.at.head, block.at.m_block, block.sequence.len_q,
                 columns, to);
  }
  static CUTE_DEVICE void load_keys(const BwdParams& params, const TensorView<const void*>& view,
                                    const Block& block, int columns, Element* to) {
    load<ShapeK>(view, block.at.batch, block.kv_head, block.key_block,
                 block.sequence.first_k + block.sequence.len_k, columns, to);
  }

  // Block `index` of a head's rows, of which there are `rows`. Others become zeros.
  template <class Shape>
  static CUTE_DEVICE void load(const TensorView<const void*>& view, int batch, int head, int index,
                               int rows, int columns, Element* to) {
    constexpr int kRows = decltype(cute::size<0>(Shape{}))::value;
    const TileLoader<typename Traits::GmemCopy, Shape> loader(
        platform::rematerialize(platform::thread_index()), columns);
    const int64_t stride_row = platform::rematerialize(view.stride_row);
    const Element* const matrix = static_cast<const Element*>(view.data) +
                                  batch * view.stride_batch + head * view.stride_head;
    const Element* source = loader.find(matrix, stride_row, index);
    loader.template load<false>(source, stride_row, tile<Shape>(to), rows - index * kRows);
  }

  // Two rows a thread. With zeros dS of a row that does not exist is P * (0 - 0).
  static CUTE_DEVICE void load_stats(const Arguments& arguments, const Block& block,
                                     TwoRowGradStats* stats) {
    using namespace cute;
    const int row = 2 * platform::rematerialize(platform::thread_index());
    if (row >= kBlockM) return;
    const bool exists = block.at.m_block * kBlockM + row < block.sequence.len_q;
    const auto* from = reinterpret_cast<const float*>(arguments.stats(block.at) + row);
    auto* to = reinterpret_cast<float*>(&stats[row / 2]);
    copy(Copy_Atom<platform::CopyGlobalToShared, float>{}.with(exists),
         make_tensor(make_gmem_ptr(from), Shape<_4>{}),
         make_tensor(make_smem_ptr(to), Shape<_4>{}));
  }

  template <class Shape>
  static CUTE_DEVICE auto tile(Element* data) {
    return make_tensor(cute::make_smem_ptr(data), SmemLayout<Shape>{});
  }

  // C = A B^T. Where a thread's operands lie is computed anew in each block: it would hold
  // registers.
  template <class A, class B, class C>
  static CUTE_DEVICE void gemm(const A& sA, const B& sB, const Block& block, C& rC) {
    cute::clear(rC);
    const unsigned thread = platform::rematerialize(platform::thread_index(), block.key_block);
    smem_gemm<typename Traits::LoadA, typename Traits::LoadB>(TiledMma{}, thread, sA, sB, rC);
  }
};

}  // namespace flash_cute::sm80
