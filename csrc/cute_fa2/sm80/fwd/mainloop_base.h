// What the SM80 main loops share: their tile, its place in shared memory, loads and masks.
#pragma once

#include <cute/tensor.hpp>

#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "sm80/copy.h"
#include "sm80/fragment.h"
#include "sm80/fwd/arguments.h"
#include "sm80/gemm.h"
#include "sm80/row_allreduce.h"

namespace flash_cute::sm80 {

// Of one thread and one tile. The main loop goes from the last visible key block to the first.
template <class Traits, MaskKind kMask, class KVSource>
class FwdMainloopBase {
 protected:
  using Element = typename Traits::Element;
  using TiledMma = typename Traits::TiledMma;
  using SharedMemory = typename Traits::SharedMemory;
  using LoadQ = typename Traits::LoadQ;
  using LoadK = typename Traits::LoadK;
  using LoadVt = typename Traits::LoadVt;
  using ShapeS = typename Traits::ShapeS;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  // Rows of the tile that one MMA of each warp covers together.
  static constexpr int kMmaRows = cute::tile_size<0>(TiledMma{});
  // The rows of S and O of which this thread holds elements.
  static constexpr int kRows = 2 * kBlockM / kMmaRows;
  // Rows that a step works on. FirstHalf: the tile has no more rows, as in decoding (under masks at
  // head dim 128 that would spill). SecondHalf: the first half sees no key of the block, as in the
  // last block of a causal tile.
  using AllRows = MmaRange<0, kBlockM / kMmaRows>;
  using FirstHalf = MmaRange<0, 1>;
  using SecondHalf = MmaRange<1, 1>;
  static constexpr bool kHasHalves = !Traits::kSharesRows && kBlockM == 2 * kMmaRows &&
                                     kMask != MaskKind::kScored;  // whose code is long
  static constexpr bool kUsesFirstHalf =
      kHasHalves && (kMask == MaskKind::kFull || Traits::kHeadDim < 128);

  template <class Shape>
  using FragmentA =
      decltype(cute::make_tensor<Element>(cute::partition_shape_A(TiledMma{}, Shape{})));
  template <class Shape>
  using FragmentB =
      decltype(cute::make_tensor<Element>(cute::partition_shape_B(TiledMma{}, Shape{})));

 public:
  using Softmax = OnlineSoftmax<kRows>;

  CUTE_DEVICE FwdMainloopBase(const Arguments& arguments, TileCoord tile, KVSource& kv_source,
                              const Mask<kMask, GqaLayout, true>& mask, const Sequence& sequence,
                              SharedMemory& smem, Softmax& softmax)
      : arguments_(arguments),
        tile_(tile),
        kv_source_(kv_source),
        mask_(mask),
        sequence_(sequence),
        smem_(smem),
        softmax_(softmax),
        thread_(platform::thread_index()),
        row0_(tile.m_block * kBlockM) {}

 protected:
  // -- which blocks ------------------------------------------------------------------------------

  CUTE_DEVICE int row_end() const {
    return cute::min(row0_ + kBlockM, arguments_.pack_gqa.rows(sequence_.len_q));
  }

  // Whether a block is visited after this one: the first row's first key lies before it. Costs no
  // register through the loop, as the number of the last block would.
  CUTE_DEVICE bool has_next(int n_block) const {
    return mask_.begin(platform::rematerialize(row0_, n_block)) < n_block * kBlockN;
  }

  // Likewise, whether one was visited before.
  CUTE_DEVICE bool has_previous(int n_block) const {
    const int end = cute::min(platform::rematerialize(row0_, n_block) + kBlockM,
                              arguments_.pack_gqa.rows(sequence_.len_q));
    return mask_.end(end - 1) > (n_block + 1) * kBlockN;
  }

  // Whether the first half of the rows sees nothing of the block, and it is not the last.
  CUTE_DEVICE bool skips_first_half(int n_block) const {
    return mask_.end(row0_ + kMmaRows - 1) <= n_block * kBlockN && has_next(n_block);
  }

  // -- shared memory -----------------------------------------------------------------------------

  CUTE_DEVICE auto sQ() const {  // (kBlockM, kHeadDim)
    return make_tensor(cute::make_smem_ptr(smem_.q), typename Traits::SmemLayoutQ{});
  }
  // Key block n_block is in stage n_block % kStages. Unsigned: the remainder is one instruction.
  static CUTE_DEVICE unsigned stage(int n_block) {
    return static_cast<unsigned>(n_block) % Traits::kStages;
  }
  CUTE_DEVICE auto sK(int n_block) const {  // (kBlockN, kHeadDim)
    return make_tensor(cute::make_smem_ptr(smem_.k[stage(n_block)]),
                       typename Traits::SmemLayoutK{});
  }
  CUTE_DEVICE auto sV(int n_block) const {  // (kBlockN, kHeadDimV)
    return make_tensor(cute::make_smem_ptr(smem_.v[stage(n_block)]),
                       typename Traits::SmemLayoutV{});
  }
  CUTE_DEVICE auto sVt(int n_block) const {  // (kHeadDimV, kBlockN), the same elements
    return make_tensor(cute::make_smem_ptr(smem_.v[stage(n_block)]),
                       typename Traits::SmemLayoutVt{});
  }

  // Only the last block may lack rows.
  template <bool kIsWhole = true>
  CUTE_DEVICE void load_k(int n_block) const {
    kv_source_.template load_k<kIsWhole>(n_block, sK(n_block));
  }
  template <bool kIsWhole = true>
  CUTE_DEVICE void load_v(int n_block) const {
    kv_source_.template load_v<kIsWhole>(n_block, sV(n_block));
  }

  CUTE_DEVICE auto loader_q() const {
    return TileLoader<typename Traits::GmemCopyQK, typename Traits::ShapeQ>(
        thread_, arguments_.params.head_dim);
  }
  CUTE_DEVICE void load_q() const {
    loader_q().load_rows(arguments_.params.q, arguments_.pack_gqa, tile_, row0_, sequence_, sQ());
  }
  // After this thread has waited for its own part of Q, and touches no other.
  CUTE_DEVICE void multiply_q_by_sign() const {
    loader_q().multiply(sQ(), arguments_.params.scale.q_sign);
  }

  // Starts the copies of Q and of the first K.
  CUTE_DEVICE void load_first(int n_block) const {
    load_q();
    kv_source_.start(n_block);
    load_k<false>(n_block);
    platform::commit_copies();
    if (arguments_.params.scale.q_sign != 1.f) {
      platform::wait_copies<0>();  // this thread's part of Q is there
      multiply_q_by_sign();
    }
  }

  // -- a block -----------------------------------------------------------------------------------

  // (rows, columns) of kStepM rows and kBlockN keys -> (row, key)
  template <int kStepM>
  static CUTE_DEVICE auto coords(unsigned thread) {
    using namespace cute;
    return as_matrix(TiledMma{}.get_slice(thread).partition_C(
        make_identity_tensor(Shape<Int<kStepM>, Int<kBlockN>>{})));
  }

  // `scores`: kStepM rows from `row0` on, kBlockN keys from `key0` on.
  template <int kStepM, class Scores>
  CUTE_DEVICE void apply_mask(int row0, int key0, Scores& scores) const {
    if (!mask_.cuts(row0, kStepM, key0, kBlockN)) return;
    mask_.apply(scores, coords<kStepM>(platform::rematerialize(thread_)), coords<kStepM>(0u), row0,
                kStepM, key0, kBlockN);
  }

  // The same scores, ahead of the mask.
  template <int kStepM, class Scores>
  CUTE_DEVICE void change_scores(int row0, int key0, Scores& scores) const {
    with_score_mod(key0, [&](const auto& score_mod, const auto& row_of) {
      score_mod.apply(scores, NoDerivatives{}, coords<kStepM>(platform::rematerialize(thread_)),
                      coords<kStepM>(0u), platform::rematerialize(row0), key0, row_of);
    });
  }
  // Ahead of the products that the scores come from.
  template <int kStepM>
  CUTE_DEVICE void prefetch_bias(int row0, int key0) const {
    if constexpr (Traits::kHeadDim == 128 && kBlockN == 64) return;  // it would spill
    with_score_mod(key0, [&](const auto& score_mod, const auto& row_of) {
      score_mod.template prefetch_bias<kStepM, kBlockN, Traits::kThreads>(
          platform::rematerialize(thread_), platform::rematerialize(row0), key0, row_of);
    });
  }
  template <class F>
  CUTE_DEVICE void with_score_mod(int key0, const F& f) const {
    if constexpr (kMask == MaskKind::kScored) {
      // Tile and sequence are read again: they would hold registers through the loop.
      const int cta = platform::rematerialize(platform::cta_index(), key0);
      int head;
      const SequenceTile& entry = arguments_.packed_tiles.entry(cta, head);
      const Sequence sequence = PackedTiles::sequence(entry);
      f(ScoreMod<Element, true>(arguments_.params, sequence, entry.batch),
        [&](int row) { return arguments_.pack_gqa.query_of(head, row); });
    }
  }

  const Arguments& arguments_;
  TileCoord tile_;
  KVSource& kv_source_;
  const Mask<kMask, GqaLayout, true>& mask_;
  const Sequence& sequence_;
  SharedMemory& smem_;
  Softmax& softmax_;
  unsigned thread_;
  int row0_;
};

}  // namespace flash_cute::sm80
