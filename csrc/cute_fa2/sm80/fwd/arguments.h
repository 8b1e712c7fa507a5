// What an SM80 forward kernel is launched with.
#pragma once

#include "common/pack_gqa.h"
#include "common/packed_tiles.h"
#include "host/params.h"
#include "sm80/tile_scheduler.h"

namespace flash_cute::sm80 {

struct Arguments {
  FwdParams params;
  PackGqa pack_gqa;
  SingleTileScheduler scheduler;
  PackedTiles packed_tiles;  // instead, for MaskKind::kPacked
};

}  // namespace flash_cute::sm80
