// What an SM90 backward kernel is launched with.
#pragma once

#include "common/tile_decoder.h"
#include "host/params.h"
#include "host/plan_bwd.h"

namespace flash_cute::sm90 {

struct BwdArguments {
  BwdTensorMaps maps;
  BwdParams params;
  TileDecoder decoder;  // as of the sm80 backward
  int heads_of_split;
  int heads_kv;
};

}  // namespace flash_cute::sm90
