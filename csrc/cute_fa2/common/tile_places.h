// The tiles of few sequences of their own lengths, without a list (SchedulePolicy::kPlaces): each
// place that a block of rows may have in memory (Sequence::first_block), in each head. Its CTA
// looks up what is there, and clears the rows of results there that no sequence has.
#pragma once

#include <cutlass/fast_math.h>

#include <cmath>
#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/block_size.h"
#include "common/pack_gqa.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "common/warp_search.h"
#include "host/params.h"

namespace flash_cute {

class TilePlaces {
 public:
  // A block has so many queries.
  TilePlaces(int places, int heads, int queries)
      : places_(places), queries_(queries), heads_(heads) {}

  CUTE_DEVICE int count() const { return places_ * heads_.divisor; }

  // The last sequence whose blocks do not begin behind the place. `m_block` is below 0 ahead of the
  // first sequence, and may be behind the last block of a sequence. All lanes of a warp call it
  // alike.
  CUTE_DEVICE TileCoord tile(const AttentionParams& params, int index) const {
    int place, head;
    heads_(place, head, index);
    const int batch =
        last_in_warp(params.batch, [&](int batch) { return first_block(params, batch) <= place; });
    return {place - first_block(params, batch), head, batch, 0};
  }

  // Of the rows in the tile's place those that no sequence has: out is 0 there, and the log-sum-exp
  // -inf. By `threads` threads; out has 16 bits.
  CUTE_DEVICE void clear_unused(const FwdParams& params, const PackGqa& pack_gqa, TileCoord tile,
                                const Sequence& sequence, int thread, int threads) const {
    const int* const cu_seqlens = params.sequences.cu_seqlens_q;
    const bool has_next = cu_seqlens && tile.batch + 1 < params.batch;
    const int next = has_next ? cute::min(cu_seqlens[tile.batch + 1], params.len_q) : params.len_q;
    const int queries = int{queries_}, row0 = sequence.first_q + tile.m_block * queries;
    const int end = cute::min(row0 + queries, next);
    const bool is_first = tile.batch == 0 && row0 < queries;
    clear_rows(params, pack_gqa, tile, is_first ? 0 : row0, cute::min(end, sequence.first_q),
               thread, threads);
    clear_rows(params, pack_gqa, tile, cute::max(row0, sequence.first_q + sequence.len_q), end,
               thread, threads);
  }

 private:
  CUTE_DEVICE int first_block(const AttentionParams& params, int batch) const {
    return Sequence::first_block(params.sequences.cu_seqlens_q, params.len_q, batch, queries_);
  }

  static CUTE_DEVICE void clear_rows(const FwdParams& params, const PackGqa& pack_gqa,
                                     TileCoord tile, int begin, int end, int thread, int threads) {
    const int entry = params.sequences.cu_seqlens_q ? 0 : tile.batch;
    for (int i = 0; i < pack_gqa.packed_heads; ++i) {
      const int head = tile.head * pack_gqa.packed_heads + i;
      uint32_t* const out = static_cast<uint32_t*>(params.out.data) +
                            (entry * params.out.stride_batch + head * params.out.stride_head) / 2;
      float* const lse =
          params.lse.data + entry * params.lse.stride_batch + head * params.lse.stride_head;
      for (int row = begin; row < end; ++row) {
        for (int word = thread; word < params.head_dim_v / 2; word += threads) {
          out[row * params.out.stride_row / 2 + word] = 0;
        }
        if (thread == 0) lse[row * params.lse.stride_row] = -INFINITY;
      }
    }
  }

  int places_;
  BlockSize queries_;
  cutlass::FastDivmod heads_;
};

}  // namespace flash_cute
