// What an SM80 kernel is launched with.
#pragma once

#include "common/tile.h"
#include "params.h"
#include "sm80/tile_scheduler.h"

namespace flash_cute::sm80 {

struct Arguments {
  FwdParams params;
  PackGqa pack_gqa;
  TileScheduler scheduler;
};

}  // namespace flash_cute::sm80
