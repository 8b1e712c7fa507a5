// What an SM80 backward kernel is launched with.
#pragma once

#include <cutlass/fast_math.h>

#include "common/packed_tiles.h"
#include "common/tile_decoder.h"
#include "host/params.h"

namespace flash_cute::sm80 {

struct BwdArguments {
  BwdParams params;
  TileDecoder decoder;  // its m_block is the key block, its split that of the group's query heads
  int heads_of_split;
  int heads_kv;
  PackedTiles packed_tiles;  // in place of the decoder, for MaskKind::kPacked
};

}  // namespace flash_cute::sm80
