// The SM80 main loop of the backward above head dim 256, or in fp32, of one gradient. A tile of its
// rows walks over the blocks of rows of the other side: of dQ the keys that its query rows see, of
// dK and dV the query rows that see its keys, in each query head of the group.
//
//   dQ  +=  dS   K     dS   = P   * (dP   - delta)     S   = Q K^T     dP   = dO V^T
//   dK  +=  dS^T Q     dS^T = P^T * (dP^T - delta)     S^T = K Q^T     dP^T = V dO^T
//   dV  +=  P^T  dO
//   dB  +=  dS         of a bias, whose tiles have other walks (bias_gradient.h)
//
// All operands come in chunks through a ring: of each block first the pairs of chunks of columns
// whose products add up to S, then those of dP, then the rows that are summed up with the weights
// dS or P. So shared memory has the same size whatever the head dims are. No gradient is summed in
// global memory: each is deterministic, at the price that each kernel computes S again.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/row_grad_stats.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "host/params.h"
#include "sm80/bwd/large/traits.h"
#include "sm80/copy.h"
#include "sm80/fragment.h"
#include "sm80/gemm.h"
#include "sm80/layouts.h"
#include "sm80/tf32.h"

namespace flash_cute::sm80 {

// Of one thread and one tile.
template <class Traits, Gradient kOf>
class LargeBwdMainloop {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using TiledMmaS = typename Traits::TiledMmaS;
  using TiledMmaGradient = typename Traits::TiledMmaGradient;
  using ShapeTile = typename Traits::ShapeTile;
  using ShapeBlock = typename Traits::ShapeBlock;
  using ShapeS = typename Traits::ShapeS;
  using ShapeSummed = typename Traits::ShapeSummed;
  using Mask = flash_cute::Mask<MaskKind::kScored, UnpackedRows>;  // which serves every call

  static constexpr int kTileRows = Traits::kTileRows;
  static constexpr int kBlockRows = Traits::kBlockRows;
  static constexpr int kStages = Traits::kStages;
  static constexpr bool kIsOfBias = kOf == Gradient::kBias;
  static constexpr int kSummedChunks = kIsOfBias ? 0 : kBlockRows / Traits::kChunkRows;
  static constexpr int kStatsRows = kBlockRows;  // of a block of the statistics (plan.block_m)
  static constexpr bool kTileHasQueries = kOf == Gradient::kDq || kIsOfBias;  // else keys
  static constexpr int kQueries = kTileHasQueries ? kTileRows : kBlockRows;
  static constexpr int kKeys = kTileHasQueries ? kBlockRows : kTileRows;
  static constexpr bool kHasDs = kOf != Gradient::kDv;

 public:
  CUTE_DEVICE LargeBwdMainloop(const BwdParams& params, SharedMemory& smem)
      : params_(params), smem_(smem), thread_(platform::thread_index()) {}

  // Leaves the sum in `gradient` (4, MMA_M, MMA_N).
  template <class Accumulator>
  CUTE_DEVICE void run(Accumulator& gradient) {
    cute::clear(gradient);
    const BlockRange visible = this->visible();
    if (visible.end <= visible.begin) return;
    Block block = {first_head(), visible.begin};
    load_first(block);
    while (block.head >= 0) {
      step(block, gradient);
      block = next_of(block);
    }
  }

  // Of a bias: adds dS of the tile's rows and block `index` of the keys to `sums` (4, MMA_M,
  // kBlockRows / 32). A softcap has no part in it. For one block: each has its own main loop.
  template <class Sums>
  CUTE_DEVICE void add(int index, Sums& sums) {
    using namespace cute;
    const Block block = {first_head(), index};
    load_first(block);
    auto tSrP = partition_fragment_C(TiledMmaS{}, ShapeS{});  // (4, MMA_M, kBlockRows / 32)
    gemm_chunks(score_chunks(), tSrP);
    change_scores(block, tSrP, NoDerivatives{});
    to_weights(block, tSrP);
    auto tSrDp = partition_fragment_C(TiledMmaS{}, ShapeS{});  // as tSrP
    gemm_chunks(dp_chunks(), tSrDp);
    const auto weights = rows_and_keys(tSrP), dp = rows_and_keys(tSrDp);
    auto sum = rows_and_keys(sums);
    for_each_row(weights, [&](int r, const RowGradStats& stats) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(weights); ++c) {
        // Selected: dP of a key ahead of the sequence may be NaN.
        if (weights(r, c) != 0.f)
          sum(r, c) = fmaf(weights(r, c), dp(r, c) - stats.delta, sum(r, c));
      }
    });
  }

 private:
  // Rows of one head of the other side.
  struct Block {
    int head;
    int index;
  };

  // -- which blocks ------------------------------------------------------------------------------

  CUTE_DEVICE const TileCoord& at() const { return smem_.tile.at; }
  CUTE_DEVICE const Sequence& sequence() const { return smem_.tile.sequence; }
  CUTE_DEVICE Mask mask() const { return Mask(params_, sequence(), UnpackedRows{}); }

  CUTE_DEVICE BlockRange visible() const {
    const int row0 = at().m_block * kTileRows;
    if constexpr (kTileHasQueries) {
      const int row_end = cute::min(row0 + kTileRows, sequence().len_q);
      return mask().visible_blocks(row0, row_end, kBlockRows);
    } else {
      const int key_end = cute::min(row0 + kTileRows, sequence().len_k);
      return row_blocks_that_see(mask(), row0, key_end, sequence().len_q, kBlockRows);
    }
  }
  // From which key on blocks are counted, and how many keys there are from it on. A bias has the
  // keys of the tensors, whatever the sequence's start.
  CUTE_DEVICE int first_key() const { return kIsOfBias ? 0 : sequence().first_k; }
  CUTE_DEVICE int keys() const { return sequence().len_k + (kIsOfBias ? sequence().first_k : 0); }
  CUTE_DEVICE int first_head() const { return smem_.tile.first_head; }
  CUTE_DEVICE int last_head() const {
    return first_head() + (kTileHasQueries ? 0 : params_.group_size - 1);
  }
  // The block behind; its head is -1 if there is none.
  CUTE_DEVICE Block next_of(Block block) const {
    if constexpr (kIsOfBias) return {-1, 0};
    const BlockRange visible = this->visible();
    if (block.index + 1 < visible.end) return {block.head, block.index + 1};
    return {block.head < last_head() ? block.head + 1 : -1, visible.begin};
  }

  // -- the ring ----------------------------------------------------------------------------------

  CUTE_DEVICE int score_chunks() const { return chunks(params_.head_dim); }
  CUTE_DEVICE int dp_chunks() const { return kHasDs ? chunks(params_.head_dim_v) : 0; }
  static CUTE_DEVICE int chunks(int columns) {
    return (columns + Traits::kChunkColumns - 1) / Traits::kChunkColumns;
  }

  // Starts the copies of the first chunks. The first is there on return, for all threads.
  CUTE_DEVICE void load_first(Block block) {
    next_block_ = block;
    if constexpr (kTileHasQueries) load_stats(at().head, at().m_block * kTileRows);
    CUTE_NO_UNROLL
    for (int slot = 0; slot < kStages - 1; ++slot) {
      load_chunk(slot);
      platform::commit_copies();
    }
    platform::wait_copies<kStages - 2>();  // this thread's part of the first chunk is there
    platform::sync_cta();
  }

  // While this chunk is multiplied: starts the copy of the one that takes the place of the chunk
  // before. The barrier of the CTA stands among products, whose operands are in registers.
  CUTE_DEVICE void midway() {
    // The next chunk is there, for all threads. All warps are done with the chunk before, which may
    // be overwritten.
    platform::wait_copies<kStages - 3>();
    platform::sync_cta();
    load_chunk(slot_ == 0 ? kStages - 1 : slot_ - 1);
    platform::commit_copies();  // an empty group too, as groups are counted
  }

  CUTE_DEVICE Element* chunk() const { return smem_.chunks[slot_]; }
  CUTE_DEVICE void next_chunk() { slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1; }

  // Starts the copy of the chunk that is next to be loaded, if there is one.
  CUTE_DEVICE void load_chunk(int slot) {
    if (next_block_.head < 0) return;
    Element* const to = smem_.chunks[slot];
    const int of_dp = next_chunk_ - score_chunks(), of_summed = of_dp - dp_chunks();
    if (kSummedChunks == 0 || of_summed < 0) {
      const bool is_dp = kHasDs && of_dp >= 0;
      const int column = (is_dp ? of_dp : next_chunk_) * Traits::kChunkColumns;
      const int columns = (is_dp ? params_.head_dim_v : params_.head_dim) - column;
      const auto& of_queries = is_dp ? params_.dout : params_.q;
      const auto& of_keys = is_dp ? params_.v : params_.k;
      load<kTileHasQueries, ShapeTile>(kTileHasQueries ? of_queries : of_keys, at().head,
                                       at().m_block, column, columns, to);
      load<!kTileHasQueries, ShapeBlock>(kTileHasQueries ? of_keys : of_queries, next_block_.head,
                                         next_block_.index, column, columns,
                                         to + cute::size(ShapeTile{}));
      // Those of the block before have been read: its sums are on their way.
      if (!kTileHasQueries && next_chunk_ == 0) {
        load_stats(next_block_.head, next_block_.index * kBlockRows);
      }
    } else {
      const int column = smem_.tile.column;
      const int columns = kOf == Gradient::kDv ? params_.head_dim_v : params_.head_dim;
      const int index = next_block_.index * kSummedChunks + of_summed;
      load<!kTileHasQueries, ShapeSummed>(summed(), next_block_.head, index, column,
                                          columns - column, to);
    }
    ++next_chunk_;
    if (of_summed + 1 == kSummedChunks) {
      next_chunk_ = 0;
      next_block_ = next_of(next_block_);
    }
  }

  // What is summed up with the weights.
  CUTE_DEVICE const TensorView<const void*>& summed() const {
    return kOf == Gradient::kDq ? params_.k : kOf == Gradient::kDk ? params_.q : params_.dout;
  }

  // Issues the copy of a piece of a head: of the pieces of as many rows as Shape has, number
  // `index`, and its columns from `column` on, of which there are `columns`. What does not exist
  // becomes zeros.
  template <bool kIsOfQueries, class Shape>
  CUTE_DEVICE void load(const TensorView<const void*>& view, int head, int index, int column,
                        int columns, Element* to) const {
    constexpr int kRows = decltype(cute::size<0>(Shape{}))::value;
    const int first = kIsOfQueries ? sequence().first_q : first_key();
    const int length = kIsOfQueries ? sequence().len_q : keys();
    static_assert(GmemChunkCopyOf<Element, Traits::kThreads, Shape>::kFits);
    const TileLoader<typename Traits::template GmemCopy<Shape>, Shape> loader(
        platform::rematerialize(thread_), columns);
    const int64_t stride_row = platform::rematerialize(view.stride_row);
    const Element* const matrix = static_cast<const Element*>(view.data) +
                                  at().batch * view.stride_batch + head * view.stride_head +
                                  first * stride_row + column;
    const Element* source = loader.find(matrix, stride_row, index);
    loader.template load<false>(source, stride_row, tile<Shape>(to), length - index * kRows);
  }

  // The statistics of the query rows from `row0` on, two rows a thread.
  CUTE_DEVICE void load_stats(int head, int row0) const {
    using namespace cute;
    if (thread_ >= kQueries / 2) return;
    const int64_t of_head = int64_t{head} * params_.m_blocks * kStatsRows;
    const RowGradStats* const rows =
        params_.workspace.stats + smem_.tile.first_stats + of_head + row0;
    const auto* from = reinterpret_cast<const float*>(rows + 2 * thread_);
    auto* to = reinterpret_cast<float*>(&smem_.stats[thread_]);
    copy(Copy_Atom<platform::CopyGlobalToShared, float>{}.with(true),
         make_tensor(make_gmem_ptr(from), Shape<_4>{}),
         make_tensor(make_smem_ptr(to), Shape<_4>{}));
  }

  template <class Shape>
  static CUTE_DEVICE auto tile(Element* data) {
    return make_tensor(cute::make_smem_ptr(data), typename Traits::template SmemLayout<Shape>{});
  }

  // -- a block -----------------------------------------------------------------------------------

  template <class Accumulator>
  CUTE_DEVICE void step(Block block, Accumulator& gradient) {
    using namespace cute;
    auto tSrS = partition_fragment_C(TiledMmaS{}, ShapeS{});  // (4, MMA_M, kBlockRows / 32)
    gemm_chunks(score_chunks(), tSrS);
    if constexpr (kHasDs) {
      auto derivatives = make_fragment_like<Derivative<Element>>(tSrS);
      change_scores(block, tSrS, rows_and_keys(derivatives));
      to_weights(block, tSrS);
      multiply(derivatives, tSrS);
      auto tSrP = convert<Element>(tSrS);  // as tSrS: registers are short
      gemm_chunks(dp_chunks(), tSrS);
      to_score_gradients(tSrP, tSrS);
    } else {
      change_scores(block, tSrS, NoDerivatives{});
      to_weights(block, tSrS);
    }
    // The weights were last read among the products of the block before, ahead of the barriers of
    // this one's chunks.
    store_weights(tSrS);
    platform::sync_cta();  // the weights are there, of all warps

    const auto sWeights = tile<ShapeS>(smem_.weights);
    CUTE_NO_UNROLL
    for (int i = 0; i < kSummedChunks; ++i) {
      auto sSummedT = make_tensor(make_smem_ptr(chunk()),  // (kColumns, kChunkRows)
                                  typename Traits::SmemLayoutSummedT{});
      multiply_chunk<typename Traits::LoadTransposedB, 2>(
          TiledMmaGradient{}, i,
          local_tile(sWeights, typename Traits::ShapeWeights{}, make_coord(_0{}, i)), sSummedT,
          gradient);
    }
  }

  // C = A B^T of the tile's rows and the block's, over all columns: `count` chunks.
  template <class C>
  CUTE_DEVICE void gemm_chunks(int count, C& rC) {
    clear(rC);
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      multiply_chunk<typename Traits::LoadB>(TiledMmaS{}, i, tile<ShapeTile>(chunk()),
                                             tile<ShapeBlock>(chunk() + cute::size(ShapeTile{})),
                                             rC);
    }
  }

  // C += A B^T, both in this chunk or A in shared memory. In fp32 kTerms k8 steps are added up
  // ahead of C.
  template <class LoadB, int kTerms = 1, class TiledMma, class A, class B, class C>
  CUTE_DEVICE void multiply_chunk(TiledMma mma, int index, const A& sA, const B& sB, C& rC) {
    using LoadA = typename Traits::template LoadA<TiledMma>;
    const unsigned thread = platform::rematerialize(thread_, index);
    const auto midway = at_half([this] { this->midway(); });
    if constexpr (Traits::kIsFp32) {
      // Each k8 step from zero, as errors of dP - delta do not average out.
      staged_smem_gemm<LoadA, LoadB, 1, kTerms, 1>(mma, thread, sA, sB, rC, midway);
    } else {
      smem_gemm<LoadA, LoadB>(mma, thread, sA, sB, rC, midway);
    }
    next_chunk();
  }

  // -- scores ------------------------------------------------------------------------------------

  // A fragment as a matrix of (query rows, keys).
  template <class Fragment>
  static CUTE_DEVICE auto rows_and_keys(Fragment& fragment) {
    auto matrix = as_matrix(fragment);
    constexpr int kRows = kTileHasQueries ? 0 : 1;
    return cute::make_tensor(matrix.data(), cute::select<kRows, 1 - kRows>(matrix.layout()));
  }
  // (rows, keys) of such a matrix -> (query row, key), in the block
  static CUTE_DEVICE auto coords(unsigned thread) {
    return [at = as_matrix(TiledMmaS{}.get_slice(thread).partition_C(
                cute::make_identity_tensor(ShapeS{})))](int row, int key) {
      if constexpr (kTileHasQueries) {
        return at(row, key);
      } else {
        const auto key_and_row = at(key, row);
        return cute::make_coord(cute::get<1>(key_and_row), cute::get<0>(key_and_row));
      }
    };
  }
  CUTE_DEVICE int row0(Block block) const {
    return kTileHasQueries ? at().m_block * kTileRows : block.index * kBlockRows;
  }
  // The sequence's first key is 0, here as in the mask.
  CUTE_DEVICE int key0(Block block) const {
    if constexpr (kIsOfBias) return block.index * kBlockRows - sequence().first_k;
    return kTileHasQueries ? block.index * kBlockRows : at().m_block * kTileRows;
  }

  // `derivatives` (query rows, keys): of the changed scores by S, but for the scale. Untouched
  // where nothing changes.
  template <class S, class Derivatives>
  CUTE_DEVICE void change_scores(Block block, S& tSrS, Derivatives&& derivatives) const {
    if (params_.mask != MaskKind::kScored) return;
    auto scores = rows_and_keys(tSrS);
    const ScoreMod<Element, true> score_mod(params_, sequence(), at().batch);
    const int head = kTileHasQueries ? at().head : block.head;
    const auto row_of = [&](int row) { return PackGqa::HeadAndQuery{head, row}; };
    const auto mine = coords(platform::rematerialize(thread_));
    score_mod.apply(scores, derivatives, mine, coords(0u), row0(block), key0(block), row_of);
  }
  template <class Derivatives, class P>
  CUTE_DEVICE void multiply(const Derivatives& derivatives, P& tSrP) const {
    if (params_.mask != MaskKind::kScored) return;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(tSrP); ++i) tSrP(i) *= static_cast<float>(derivatives(i));
  }

  // P from S. The mask goes onto the exponent: the weight of a key that its row does not see may be
  // inf.
  template <class S>
  CUTE_DEVICE void to_weights(Block block, S& tSrS) const {
    using namespace cute;
    auto weights = rows_and_keys(tSrS);
    const float scale_log2 = params_.scale.signed_log2();
    for_each_row(weights, [&](int r, const RowGradStats& stats) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(weights); ++c) {
        weights(r, c) = not_above_0(fmaf(weights(r, c), scale_log2, -stats.lse_log2));
      }
    });
    const Mask mask = this->mask();
    const int row0 = this->row0(block), key0 = this->key0(block);
    // Of a bias the first key may be below 0, which `cuts` does not take.
    if (kIsOfBias || mask.cuts(row0, kQueries, key0, kKeys)) {
      mask.apply(weights, coords(platform::rematerialize(thread_)), coords(0u), row0, kQueries,
                 key0, kKeys);
    }
    CUTE_UNROLL
    for (int i = 0; i < size(tSrS); ++i) tSrS(i) = platform::exp2(tSrS(i));
  }

  // dS from dP, in its place.
  template <class P, class Dp>
  CUTE_DEVICE void to_score_gradients(P& tSrP, Dp& tSrDp) const {
    const auto weights = rows_and_keys(tSrP);
    auto ds = rows_and_keys(tSrDp);
    for_each_row(ds, [&](int r, const RowGradStats& stats) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(ds); ++c) {
        ds(r, c) = static_cast<float>(weights(r, c)) * (ds(r, c) - stats.delta);
      }
    });
  }

  // f(row of the matrix, its statistics)
  template <class Matrix, class F>
  CUTE_DEVICE void for_each_row(const Matrix& matrix, const F& f) const {
    const auto mine = coords(platform::rematerialize(thread_));
    const StatsOfRows of_rows(smem_.stats, cute::get<0>(mine(0, 0)));
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(matrix); ++r) f(r, of_rows(cute::get<0>(coords(0u)(r, 0))));
  }

  template <class S>
  CUTE_DEVICE void store_weights(const S& tSrS) const {
    using Store = typename Traits::StoreWeights;
    auto elements = convert<Element>(tSrS);  // as tSrS
    auto store = Store{}.get_slice(platform::rematerialize(thread_));
    auto sWeights =
        make_tensor(cute::make_smem_ptr(smem_.weights), typename Traits::SmemLayoutStored{});
    copy(Store{}, store.retile_S(elements), store.partition_D(sWeights));
  }

  const BwdParams& params_;
  SharedMemory& smem_;
  unsigned thread_;
  Block next_block_;    // of the chunk that is next to be loaded; head -1: there is none
  int next_chunk_ = 0;  // of that block
  int slot_ = 0;        // where the chunk lies that is being multiplied
};

}  // namespace flash_cute::sm80
