// What an SM90 kernel is launched with.
#pragma once

#include <cuda.h>

#include "common/tile.h"
#include "params.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

struct Arguments {
  CUtensorMap q;    // boxes of (queries of a consumer, heads of a group, a strip of the head dim)
  CUtensorMap k;    // boxes of (kBlockN, a strip)
  CUtensorMap v;    // as k
  CUtensorMap out;  // boxes of (queries of a warp, heads of a group, a strip)
  FwdParams params;
  PackGqa pack_gqa;
  TileScheduler scheduler;
};

}  // namespace flash_cute::sm90
