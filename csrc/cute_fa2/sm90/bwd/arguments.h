// What the kernels of an SM90 backward are launched with.
#pragma once

#include <cutlass/fast_math.h>

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
};

CUTE_DEVICE void prefetch_tensor_maps(const BwdTensorMaps& maps) {
  hopper::prefetch_tensor_map(maps.q);
  hopper::prefetch_tensor_map(maps.k);
  hopper::prefetch_tensor_map(maps.v);
  hopper::prefetch_tensor_map(maps.dout);
}

}  // namespace flash_cute::sm90
