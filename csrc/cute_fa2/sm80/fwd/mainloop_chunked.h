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

  // Starts the copies of Q and of the first chunks.
  CUTE_DEVICE void load_first(int n_block) {
    next_block_ = n_block;
    this->load_q();  // in a group with the first chunk
    CUTE_NO_UNROLL
    for (unsigned slot = 0; slot < kStages - 1; ++slot) {
      load_chunk(slot);
      platform::commit_copies();
    }
    if (arguments_.params.scale.q_sign != 1.f) {
      platform::wait_copies<0>();  // this thread's part of Q is there
      this->multiply_q_by_sign();
    }
  }

  // The next chunk in the order of use, where it lies in shared memory.
  CUTE_DEVICE Element* next_chunk() {
    // This chunk (and Q, in the first step) is there, for all threads. So is what they have written
    // themselves. All warps are done with the chunk before, which may be overwritten.
    platform::wait_copies<kStages - 2>();  // fault: chunk-wait
    platform::sync_cta();
    const unsigned free = slot_;
    slot_ = free + 1 == kStages ? 0 : free + 1;
    load_chunk(free);
    platform::commit_copies();  // an empty group too, as groups are counted
    return smem_.chunks[slot_];
  }

  // Starts the copy of the chunk that is next to be loaded, if there is one.
  CUTE_DEVICE void load_chunk(unsigned slot) {
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
    auto tSrS = partition_fragment_C(TiledMma{}, ShapeS{});  // (4, MMA_M, N / 8)
    clear(tSrS);
    CUTE_NO_UNROLL
    for (int chunk = 0; chunk < kv_source_.chunks_k(); ++chunk) {
      auto tQ = make_tensor(  // (kBlockM, kColumnsK)
          make_smem_ptr(smem_.q + chunk * (kBlockM * Traits::kColumnsK)),
          typename Traits::SmemLayoutQChunk{});
      Element* const k = next_chunk();
      const unsigned thread_here = platform::rematerialize(thread_, chunk);
      smem_gemm<LoadQ, LoadK>(TiledMma{}, thread_here, tQ, sK(k), tSrS);
    }

    auto scores = as_matrix(tSrS);  // (rows, columns)
    auto out = as_matrix(tOrO);     // (rows, columns)
    const int key0 = n_block * kBlockN;
    Traits::ScoreMod::apply(arguments_.params, scores, row0_, key0);
    this->template apply_mask<kBlockM>(row0_, key0, scores);
    const bool is_first = !has_previous(n_block);
    const bool updated =
        softmax_.update_limits(scores, softmax_.may_exceed(scores), is_first,
                               row_allreduce<Traits>(smem_, platform::rematerialize(thread_)));
    // Before the first block O is 0.
    if (updated && !is_first) softmax_.rescale(out);
    softmax_.apply_exp2(scores, softmax_.subtrahends());

    // P's columns come from all warps of a row, through shared memory. The barrier of the next
    // chunk makes them visible; since P was last read there have been those of K's chunks.
    auto sP = make_tensor(make_smem_ptr(smem_.exchange.p),  // (kBlockM, kBlockN)
                          typename Traits::Exchange::SmemLayoutP{});
    auto tSrP = convert<Element>(tSrS);  // (4, MMA_M, N / 8)
    auto store_p = StoreP{}.get_slice(platform::rematerialize(thread_, n_block));
    // Both (2, 2 MMA_M, N / 8).
    copy(StoreP{}, store_p.retile_S(tSrP), store_p.partition_D(sP));
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
      Element* const v = next_chunk();
      const unsigned thread_here = platform::rematerialize(thread_, keys);
      smem_gemm<LoadP, LoadVt>(TiledMma{}, thread_here, sP, sVt(v), tOrO_group);
      gemm_pv<kGroup + 1>(sP, keys, tOrO);
    }
  }

  int next_block_;               // of the chunk that is next to be loaded; -1: there is none
  int next_chunk_ = 0;           // K's come first, then V's
  unsigned slot_ = kStages - 1;  // of the last chunk that was asked for
};

}  // namespace flash_cute::sm80
