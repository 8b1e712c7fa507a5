// What an SM90 forward kernel is launched with.
#pragma once

#include "common/pack_gqa.h"
#include "host/params.h"
#include "host/plan_fwd.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

struct Arguments {
  TensorMaps maps;
  FwdParams params;
  PackGqa pack_gqa;
  PersistentTileScheduler scheduler;
  PackedTileScheduler packed_scheduler;  // instead, for MaskKind::kPacked
};

}  // namespace flash_cute::sm90
