// The SM80 main loop for large head dims. Q stays in shared memory, O in registers. K and V of a
// key block come in chunks through a ring: first K's chunks of columns, whose products add up to S,
// then V's chunks of keys, each with the product that it adds to O. So a CTA needs the same shared
// memory whatever the number of keys, and K's columns are counted at run time.
#pragma once

#include <cute/tensor.hpp>

#include "sm80/fwd/mainloop_base.h"

namespace flash_cute::sm80 {

template <class Traits, MaskKind kMask, class KVSource>
class FwdMainloopChunked : FwdMainloopBase<Traits, kMask, KVSource> {
  using Base = FwdMainloopBase<Traits, kMask, KVSource>;
  using Base::arguments_, Base::kv_source_, Base::mask_, Base::row0_, Base::smem_, Base::softmax_,
      Base::thread_;
  using Base::has_next, Base::has_previous, Base::kBlockM, Base::kBlockN;
  using typename Base::Element, typename Base::LoadK, typename Base::LoadQ, typename Base::LoadVt;
  using typename Base::ShapeS, typename Base::TiledMma;
  using LoadP = typename Traits::LoadP;
  using StoreP = typename Traits::StoreP;
  static constexpr int kStages = Traits::kStages;

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
    load_first(n_block);
    do {
      step(n_block, tOrO);
    } while (has_next(n_block--));
  }

 private:
  // -- the ring ----------------------------------------------------------------------------------

  // Starts the copies of Q and of the first chunks. Q and the first chunk are there on return, for
  // all threads.
  CUTE_DEVICE void load_first(int n_block) {
    next_block_ = n_block;
    kv_source_.start(n_block);
    this->load_q();  // in a group with the first chunk
    CUTE_NO_UNROLL
    for (int slot = 0; slot < kStages - 1; ++slot) {
      load_chunk(slot);
      platform::commit_copies();
    }
    platform::wait_copies<kStages - 2>();  // this thread's part of Q and the first chunk is there
    if (arguments_.params.scale.q_sign != 1.f) this->multiply_q_by_sign();
    platform::sync_cta();
  }

  // While this chunk is multiplied: starts the copy of the one that takes the place of the chunk
  // before. The barrier of the CTA stands among products, whose operands are in registers.
  CUTE_DEVICE void midway() {
    // The next chunk is there, for all threads. All warps are done with the chunk before, which may
    // be overwritten.
    platform::wait_copies<kStages - 3>();  // fault: chunk-wait
    platform::sync_cta();
    load_chunk(slot_ == 0 ? kStages - 1 : slot_ - 1);
    platform::commit_copies();  // an empty group too, as groups are counted
  }

  CUTE_DEVICE Element* chunk() { return smem_.chunks[slot_]; }
  CUTE_DEVICE void next_chunk() { slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1; }

  // Starts the copy of the chunk that is next to be loaded, if there is one.
  CUTE_DEVICE void load_chunk(int slot) {
    if (next_block_ < 0) return;
    const int of_v = next_chunk_ - kv_source_.chunks_k();
    if (of_v < 0) {
      kv_source_.load_k(next_block_, next_chunk_, sK(smem_.chunks[slot]));
    } else {
      kv_source_.load_v(next_block_, of_v, sV(smem_.chunks[slot]));
    }
    ++next_chunk_;
    if (of_v + 1 == KVSource::kChunksV) {
      next_chunk_ = 0;
      next_block_ = has_next(next_block_) ? next_block_ - 1 : -1;
      kv_source_.next_block();
    }
  }

  static CUTE_DEVICE auto sK(Element* chunk) {  // (kBlockN, kColumnsK)
    return make_tensor(cute::make_smem_ptr(chunk), typename Traits::SmemLayoutK{});
  }
  static CUTE_DEVICE auto sV(Element* chunk) {  // (kKeysV, kColumnsV)
    return make_tensor(cute::make_smem_ptr(chunk), typename Traits::SmemLayoutV{});
  }
  static CUTE_DEVICE auto sVt(Element* chunk) {  // (kColumnsV, kKeysV), the same elements
    return make_tensor(cute::make_smem_ptr(chunk), typename Traits::SmemLayoutVt{});
  }

  // -- a block -----------------------------------------------------------------------------------

  template <class Out>
  CUTE_DEVICE void step(int index, Out& tOrO) {
    using namespace cute;
    const int n_block = platform::rematerialize(index);
    this->template prefetch_bias<kBlockM>(row0_, n_block * kBlockN);
    auto tSrS = partition_fragment_C(TiledMma{}, ShapeS{});  // (4, MMA_M, N / 8)
    clear(tSrS);
    CUTE_NO_UNROLL
    for (int i = 0; i < kv_source_.chunks_k(); ++i) {
      auto tQ = make_tensor(  // (kBlockM, kColumnsK)
          make_smem_ptr(smem_.q + i * (kBlockM * Traits::kColumnsK)),
          typename Traits::SmemLayoutQChunk{});
      const unsigned thread_here = platform::rematerialize(thread_, i);
      smem_gemm<LoadQ, LoadK>(TiledMma{}, thread_here, tQ, sK(chunk()), tSrS,
                              at_half([this] { midway(); }));
      next_chunk();
    }

    auto scores = as_matrix(tSrS);  // (rows, columns)
    auto out = as_matrix(tOrO);     // (rows, columns)
    const int key0 = n_block * kBlockN;
    this->template change_scores<kBlockM>(row0_, key0, scores);
    this->template apply_mask<kBlockM>(row0_, key0, scores);
    const bool is_first = !has_previous(n_block);
    const bool updated =
        softmax_.update_limits(scores, softmax_.may_exceed(scores), is_first,
                               row_allreduce<Traits>(smem_, platform::rematerialize(thread_)));
    // Before the first block O is 0.
    if (updated && !is_first) softmax_.rescale(out);
    softmax_.apply_exp2(scores, softmax_.subtrahends());

    // P's columns come from all warps of a row, through shared memory. Since P was last read there
    // have been the barriers of K's chunks.
    auto sP = make_tensor(make_smem_ptr(smem_.exchange.p),  // (kBlockM, kBlockN)
                          typename Traits::Exchange::SmemLayoutP{});
    auto tSrP = convert<Element>(tSrS);  // (4, MMA_M, N / 8)
    auto store_p = StoreP{}.get_slice(platform::rematerialize(thread_, n_block));
    // Both (2, 2 MMA_M, N / 8).
    copy(StoreP{}, store_p.retile_S(tSrP), store_p.partition_D(sP));
    platform::sync_cta();  // P is there, of all columns
    CUTE_NO_UNROLL
    for (int keys = 0; keys < kBlockN / Traits::kKeysV; ++keys) {
      // (kBlockM, kKeysV)
      const auto sP_keys = local_tile(sP, typename Traits::ShapeP{}, make_coord(_0{}, keys));
      gemm_pv<0>(sP_keys, keys, tOrO);
    }
  }

  // O += P V of some keys, one group of V's columns after the other, from kGroup on.
  template <int kGroup, class P, class Out>
  CUTE_DEVICE void gemm_pv(const P& sP, int keys, Out& tOrO) {
    if constexpr (kGroup < Traits::kHeadDimV / Traits::kColumnsV) {
      constexpr int kColumns = Traits::kColumnsV / (8 * Traits::kColumnWarps);  // MMAs of a warp
      auto tOrO_group = select_columns<kGroup * kColumns, kColumns>(tOrO);
      const unsigned thread_here = platform::rematerialize(thread_, keys);
      smem_gemm<LoadP, LoadVt>(TiledMma{}, thread_here, sP, sVt(chunk()), tOrO_group,
                               at_half([this] { midway(); }));
      next_chunk();
      gemm_pv<kGroup + 1>(sP, keys, tOrO);
    }
  }

  int next_block_;      // of the chunk that is next to be loaded; -1: there is none
  int next_chunk_ = 0;  // K's come first, then V's
  int slot_ = 0;        // where the chunk lies that is being multiplied
};

}  // namespace flash_cute::sm80
