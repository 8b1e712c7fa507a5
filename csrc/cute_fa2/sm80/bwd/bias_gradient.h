// The gradient of a bias up to head dim 256, in 16 bits. Tiles of Q, K, V and dO are in shared
// memory as a whole.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "host/params.h"
#include "sm80/bwd/bias_tiles.h"
#include "sm80/copy.h"
#include "sm80/gemm.h"
#include "sm80/layouts.h"

namespace flash_cute::sm80 {

// Its tiles are those of the backward, and so are its statistics.
template <class BwdTraits>
struct BiasGradientKernel {
  using Element = typename BwdTraits::Element;
  using TiledMma = typename BwdTraits::TiledMmaS;
  using ShapeQ = typename BwdTraits::ShapeQ;
  using ShapeDout = typename BwdTraits::ShapeDout;
  using ShapeK = typename BwdTraits::ShapeK;
  using ShapeV = typename BwdTraits::ShapeV;
  using ShapeS = typename BwdTraits::ShapeS;
  static constexpr int kBlockM = BwdTraits::kBlockM;
  static constexpr int kBlockN = BwdTraits::kBlockN;
  static constexpr int kThreads = BwdTraits::kThreads;
  using Tiles = BiasTiles<Element, TiledMma, ShapeS, kThreads, kBlockM>;
  using Arguments = typename Tiles::Arguments;

  struct Traits {
    static constexpr int kThreads = BwdTraits::kThreads;
    static constexpr int kMinCtas = 1;
    struct SharedMemory {
      alignas(128) Element q[cute::size(ShapeQ{})];
      alignas(128) Element dout[cute::size(ShapeDout{})];
      alignas(128) Element k[cute::size(ShapeK{})];
      alignas(128) Element v[cute::size(ShapeV{})];
      alignas(128) float sums[kBlockM * kBlockN];  // of dS, in their place (BiasTiles): they
                                                   // are too many for registers
      RowGradStats stats[kBlockM];
    };
    static_assert(sizeof(SharedMemory) <= sizeof(typename BwdTraits::SharedMemory));
  };
  using SharedMemory = typename Traits::SharedMemory;

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    const auto bias_tile = Tiles::of_cta(arguments);
    // Each thread has its own elements of the sums, until they are stored.
    const auto mine = Tiles::coords(platform::thread_index());
    for (int i = 0; i < cute::size(mine); ++i) smem.sums[Tiles::place(mine(i))] = 0.f;
    Tiles::for_each(arguments, bias_tile,
                    [&](const TileCoord& at, int key_block, const Sequence& sequence) {
                      add(at, key_block, arguments, sequence, smem);
                    });
    Tiles::store(arguments, bias_tile, smem.sums);
  }

 private:
  template <class Shape>
  static CUTE_DEVICE auto tile(Element* data) {
    return make_tensor(cute::make_smem_ptr(data), SmemLayout<Shape>{});
  }

  // Block `index` of a head's rows, of which there are `rows`. Others become zeros.
  template <class Shape>
  static CUTE_DEVICE void load(const TensorView<const void*>& view, int batch, int head, int index,
                               int rows, int columns, Element* to) {
    constexpr int kRows = decltype(cute::size<0>(Shape{}))::value;
    constexpr int kColumns = decltype(cute::size<1>(Shape{}))::value;
    const TileLoader<typename BwdTraits::template GmemCopy<kColumns>, Shape> loader(
        platform::thread_index(), columns);
    const Element* const matrix = static_cast<const Element*>(view.data) +
                                  batch * view.stride_batch + head * view.stride_head;
    const Element* source = loader.find(matrix, view.stride_row, index);
    loader.template load<false>(source, view.stride_row, tile<Shape>(to), rows - index * kRows);
  }

  // Adds dS of a tile, of which the keys are those of the tensors, whatever the sequence's start.
  static CUTE_DEVICE void add(TileCoord at, int key_block, const Arguments& arguments,
                              const Sequence& sequence, SharedMemory& smem) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    const Mask<MaskKind::kScored, UnpackedRows> mask(params, sequence, UnpackedRows{});
    const int row0 = at.m_block * kBlockM, key0 = key_block * kBlockN - sequence.first_k;

    platform::sync_cta();  // all warps are done with the tile before
    const int kv_head = at.head / params.group_size, keys = sequence.first_k + sequence.len_k;
    load<ShapeQ>(params.q, at.batch, at.head, at.m_block, sequence.len_q, params.head_dim, smem.q);
    load<ShapeDout>(params.dout, at.batch, at.head, at.m_block, sequence.len_q, params.head_dim_v,
                    smem.dout);
    load<ShapeK>(params.k, at.batch, kv_head, key_block, keys, params.head_dim, smem.k);
    load<ShapeV>(params.v, at.batch, kv_head, key_block, keys, params.head_dim_v, smem.v);
    platform::commit_copies();
    const int64_t block =
        int64_t{at.head} * params.m_blocks + at.batch * arguments.stats_blocks + at.m_block;
    for (int i = platform::thread_index(); i < kBlockM; i += kThreads) {
      smem.stats[i] = params.workspace.stats[block * kBlockM + i];
    }
    platform::wait_copies<0>();
    platform::sync_cta();  // the tiles and the statistics are there, for all threads

    auto tSrS = partition_fragment_C(TiledMma{}, ShapeS{});  // (4, MMA_M, N / 8)
    gemm(tile<ShapeQ>(smem.q), tile<ShapeK>(smem.k), tSrS);
    auto weights = as_matrix(tSrS);  // (rows, columns)
    const auto mine = Tiles::coords(platform::rematerialize(platform::thread_index()));
    const ScoreMod<Element, true> score_mod(params, sequence, at.batch);
    score_mod.apply(weights, NoDerivatives{}, mine, Tiles::coords(0u), row0, key0,
                    [&](int row) { return PackGqa::HeadAndQuery{at.head, row}; });
    mask.apply(weights, mine, Tiles::coords(0u), row0, kBlockM, key0, kBlockN);
    for_each_row(weights, smem, [&](int r, const RowGradStats& stats) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(weights); ++c) {
        weights(r, c) = platform::exp2(
            not_above_0(fmaf(weights(r, c), params.scale.signed_log2(), -stats.lse_log2)));
      }
    });

    auto tSrDp = partition_fragment_C(TiledMma{}, ShapeS{});  // (4, MMA_M, N / 8)
    gemm(tile<ShapeDout>(smem.dout), tile<ShapeV>(smem.v), tSrDp);
    const auto dp = as_matrix(tSrDp);
    for_each_row(weights, smem, [&](int r, const RowGradStats& stats) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(weights); ++c) {
        float& sum = smem.sums[Tiles::place(mine(r, c))];
        // Selected: dP of a key ahead of the sequence may be NaN.
        if (weights(r, c) != 0.f) sum = fmaf(weights(r, c), dp(r, c) - stats.delta, sum);
      }
    });
  }

  // f(row of the fragment, its statistics)
  template <class Scores, class F>
  static CUTE_DEVICE void for_each_row(const Scores& scores, const SharedMemory& smem, const F& f) {
    const auto mine = Tiles::coords(platform::rematerialize(platform::thread_index()));
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(scores); ++r) f(r, smem.stats[cute::get<0>(mine(r, 0))]);
  }

  // C = A B^T
  template <class A, class B, class C>
  static CUTE_DEVICE void gemm(const A& sA, const B& sB, C& rC) {
    cute::clear(rC);
    smem_gemm<typename BwdTraits::template LoadA<TiledMma>,
              typename BwdTraits::template LoadB<TiledMma>>(TiledMma{}, platform::thread_index(),
                                                            sA, sB, rC);
  }
};

}  // namespace flash_cute::sm80
