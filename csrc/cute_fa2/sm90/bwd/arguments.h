// What the kernels of an SM90 backward are launched with.
#pragma once

#include <cutlass/fast_math.h>

#include "common/gradient.h"
#include "common/mask.h"
#include "common/packed_tiles.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"
#include "host/plan_bwd.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

struct BwdArguments {
  BwdTensorMaps maps;
  BwdParams params;
  // Of tiles of keys, as of the sm80 backward. For dQ's own kernel: of tiles of query rows.
  TileDecoder decoder;
  cutlass::FastDivmod m_blocks;  // of dQ's sums, from an index to coordinates
  cutlass::FastDivmod heads_q;
  cutlass::FastDivmod group_size;
  int heads_of_split;  // query heads of a group that one head split has
  int heads_kv;
  DqBy dq_by;
  int dq_share;  // how many blocks of dQ's sums there are for each consumer of a tile
  int tiles;     // of keys, shared out among
  int ctas;
  PackedTilesToEnd packed_tiles;  // in place of the decoder, for MaskKind::kPacked
  NarrowWindow window;            // of DqBy::kWindow

  template <MaskKind kMask>
  CUTE_DEVICE int tile_count() const {
    return has_sequences(kMask) ? packed_tiles.count() : tiles;
  }
  // The first group of heads comes last: it may be larger than the others.
  template <MaskKind kMask>
  CUTE_DEVICE int in_order(int index) const {
    if constexpr (has_sequences(kMask)) return index;
    const int first = decoder.first_head_group_tiles();
    return index < tiles - first ? index + first : index - (tiles - first);  // fault: bwd90-order
  }
  // Tile `index` with its sequence. The blocks of rows of a sequence are numbered among all, as
  // their statistics and their sums of dQ lie in memory, from `first_index` on; those of a head lie
  // params.m_blocks apart. The preprocess has a CTA for each of them, so the numbers fit.
  struct PlacedTile {
    TileCoord at;
    Sequence sequence;
    int first_index;
    BlockRange seen;  // packed sequences: the blocks of the other side
  };
  template <MaskKind kMask>
  CUTE_DEVICE PlacedTile tile(int index) const {
    if constexpr (has_sequences(kMask)) {
      int head;
      const SequenceTile& entry = packed_tiles.entry(index, head);
      return {PackedTiles::coord(entry, head),
              PackedTiles::sequence(entry),
              entry.first_index,
              {entry.begin, entry.end}};
    } else {
      const TileCoord at = decoder.tile(index);
      return {at,
              Sequence::of<kMask>(params, at.batch),
              at.batch * params.heads_q * params.m_blocks,
              {}};
    }
  }
};

CUTE_DEVICE GradientPlace place_of_dq(const BwdParams& params, const Sequence& sequence, int batch,
                                      int head) {
  return {params.dq, batch, head, sequence.first_q, sequence.len_q, params.head_dim};
}

// Those of the inputs that are used most.
template <MaskKind kMask>
CUTE_DEVICE void prefetch_tensor_maps(const BwdTensorMaps& maps) {
  constexpr bool kIsPacked = has_sequences(kMask);
  hopper::prefetch_tensor_map(kIsPacked ? maps.ragged_q : maps.q);
  hopper::prefetch_tensor_map(kIsPacked ? maps.ragged_k : maps.k);
  hopper::prefetch_tensor_map(kIsPacked ? maps.ragged_v : maps.v);
  hopper::prefetch_tensor_map(kIsPacked ? maps.ragged_dout : maps.dout);
}

}  // namespace flash_cute::sm90
