// The gradient of a bias: dS, summed over all that shares an element of the bias, in a fixed order.
// Computed anew, tile by tile of the bias: no other kernel keeps dS.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "host/params.h"
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

  struct Traits {
    static constexpr int kThreads = BwdTraits::kThreads;
    static constexpr int kMinCtas = 1;
    struct SharedMemory {
      alignas(128) Element q[cute::size(ShapeQ{})];
      alignas(128) Element dout[cute::size(ShapeDout{})];
      alignas(128) Element k[cute::size(ShapeK{})];
      alignas(128) Element v[cute::size(ShapeV{})];
      alignas(128) float sums[kBlockM * kBlockN];  // of dS, in their `place`: they are too many
                                                   // for registers
      RowGradStats stats[kBlockM];
    };
    static_assert(sizeof(SharedMemory) <= sizeof(typename BwdTraits::SharedMemory));
  };
  using SharedMemory = typename Traits::SharedMemory;

  // A CTA for each tile of the bias, (batch, heads, row blocks, key blocks) of it.
  struct Arguments {
    BwdParams params;
    cutlass::FastDivmod key_blocks;
    cutlass::FastDivmod row_blocks;
    cutlass::FastDivmod heads;
    int stats_blocks;  // blocks of rows of a sequence, as the statistics count them

    explicit Arguments(const BwdParams& params)
        : params(params),
          key_blocks(params.dbias.has_keys ? blocks(params.len_k, kBlockN) : 1),
          row_blocks(params.dbias.has_rows ? blocks(params.len_q, kBlockM) : 1),
          heads(params.dbias.has_heads ? params.heads_q : 1),
          stats_blocks(blocks(params.len_q, kBlockM)) {}
    int64_t ctas() const {
      return int64_t{params.dbias.has_batch ? params.batch : 1} * heads.divisor *
             row_blocks.divisor * key_blocks.divisor;
    }
  };

  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem) {
    using namespace cute;
    const BwdParams& params = arguments.params;
    const BiasGradient& bias = params.dbias;
    int rest, batch, head, row_block, key_block;
    arguments.key_blocks(rest, key_block, platform::cta_index());
    arguments.row_blocks(rest, row_block, rest);
    arguments.heads(batch, head, rest);

    // Each thread has its own elements of the sums, until they are stored.
    const auto mine = coords(platform::thread_index());
    for (int i = 0; i < size(mine); ++i) smem.sums[place(mine(i))] = 0.f;
    for_each(bias.has_batch, batch, params.batch, [&](int b) {
      const Sequence sequence = Sequence::of<MaskKind::kScored>(params, b);
      const int key_end = sequence.first_k + sequence.len_k;
      for_each(bias.has_heads, head, params.heads_q, [&](int h) {
        for_each(bias.has_rows, row_block, blocks(params.len_q, kBlockM), [&](int m) {
          if (m * kBlockM >= sequence.len_q) return;
          for_each(bias.has_keys, key_block, blocks(params.len_k, kBlockN), [&](int n) {
            if (n * kBlockN >= key_end) return;
            add({m, h, b, 0}, n, arguments, sequence, smem);
          });
        });
      });
    });
    store(bias, {row_block, head, batch, 0}, key_block, params, smem);
  }

 private:
  static CUTE_HOST_DEVICE int blocks(int rows, int block) { return (rows + block - 1) / block; }

  // Where the sum of a (row, key) is: pairs of columns lie together, and neighbouring rows in other
  // banks.
  template <class Coord>
  static CUTE_DEVICE int place(const Coord& coord) {
    constexpr int kChunks = cute::min(kBlockN, 64) / 8;
    const int row = cute::get<0>(coord), key = cute::get<1>(coord);
    return row * kBlockN + (key ^ (row % kChunks * 8));
  }

  // One of them, or where the bias is expanded all.
  template <class F>
  static CUTE_DEVICE void for_each(bool has, int index, int count, const F& f) {
    for (int i = has ? index : 0; i < (has ? index + 1 : count); ++i) f(i);
  }

  // (rows, columns) -> (row, key), in the tile
  static CUTE_DEVICE auto coords(unsigned thread) {
    return as_matrix(
        TiledMma{}.get_slice(thread).partition_C(cute::make_identity_tensor(ShapeS{})));
  }

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
    const int row_end = cute::min(row0 + kBlockM, sequence.len_q);
    if (mask.end(row_end - 1) <= key0 || mask.begin(row0) >= key0 + kBlockN) return;

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
    const auto mine = coords(platform::rematerialize(platform::thread_index()));
    const ScoreMod<Element, true> score_mod(params, sequence, at.batch);
    score_mod.apply(weights, NoDerivatives{}, mine, coords(0u), row0, key0,
                    [&](int row) { return PackGqa::HeadAndQuery{at.head, row}; });
    mask.apply(weights, mine, coords(0u), row0, kBlockM, key0, kBlockN);
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
        float& sum = smem.sums[place(mine(r, c))];
        // Selected: dP of a key ahead of the sequence may be NaN.
        if (weights(r, c) != 0.f) sum = fmaf(weights(r, c), dp(r, c) - stats.delta, sum);
      }
    });
  }

  // f(row of the fragment, its statistics)
  template <class Scores, class F>
  static CUTE_DEVICE void for_each_row(const Scores& scores, const SharedMemory& smem, const F& f) {
    const auto mine = coords(platform::rematerialize(platform::thread_index()));
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

  // Over rows or keys that the bias is expanded to, it sums as well.
  static CUTE_DEVICE void store(const BiasGradient& bias, TileCoord at, int key_block,
                                const BwdParams& params, SharedMemory& smem) {
    platform::sync_cta();  // the sums are there, of all threads
    const int rows = bias.has_rows ? cute::min(+kBlockM, params.len_q - at.m_block * kBlockM) : 1;
    const int keys = bias.has_keys ? cute::min(+kBlockN, params.len_k - key_block * kBlockN) : 1;
    const int64_t first = at.batch * bias.stride_batch + at.head * bias.stride_head +
                          int64_t{at.m_block} * kBlockM * bias.stride_row +
                          int64_t{key_block} * kBlockN * bias.stride_key;
    for (int i = platform::thread_index(); i < rows * keys; i += kThreads) {
      const int row = i / keys, key = i % keys;
      float total = 0.f;
      for (int r = row; r < (bias.has_rows ? row + 1 : kBlockM); ++r) {
        for (int c = key; c < (bias.has_keys ? key + 1 : kBlockN); ++c) {
          total += smem.sums[place(cute::make_coord(r, c))];
        }
      }
      const int64_t to = first + row * bias.stride_row + key * bias.stride_key;
      if (bias.is_float) {
        static_cast<float*>(bias.data)[to] = total;
      } else {
        static_cast<Element*>(bias.data)[to] = Element(total);
      }
    }
  }
};

}  // namespace flash_cute::sm80
