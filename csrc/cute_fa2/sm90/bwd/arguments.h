// What the kernels of an SM90 backward are launched with.
#pragma once

#include <cutlass/fast_math.h>

#include "common/packed_tiles.h"
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
  int heads_of_split;
  int heads_kv;
  DqBy dq_by;
  int tiles;  // of keys, shared out among
  int ctas;
  PackedTiles packed_tiles;  // in place of the decoder, for MaskKind::kPacked

  template <MaskKind kMask>
  CUTE_DEVICE int tile_count() const {
    return kMask == MaskKind::kPacked ? packed_tiles.count() : tiles;
  }
  template <MaskKind kMask>
  CUTE_DEVICE TileCoord tile(int index) const {
    return kMask == MaskKind::kPacked ? packed_tiles.tile(index) : decoder.tile(index);
  }
};

CUTE_DEVICE void prefetch_tensor_maps(const BwdTensorMaps& maps) {
  hopper::prefetch_tensor_map(maps.q);
  hopper::prefetch_tensor_map(maps.k);
  hopper::prefetch_tensor_map(maps.v);
  hopper::prefetch_tensor_map(maps.dout);
}

}  // namespace flash_cute::sm90
