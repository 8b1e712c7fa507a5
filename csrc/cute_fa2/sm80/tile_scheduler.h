// Which tile a CTA works on.
#pragma once

#include <cute/config.hpp>

#include "common/pack_gqa.h"
#include "common/tile_decoder.h"
#include "host/tile_schedule.h"

namespace flash_cute::sm80 {

// SchedulePolicy::kOneTilePerCta, on a one-dimensional grid (y and z end at 65,535). CTAs start in
// the order of their numbers, each as soon as there is room for it.
class SingleTileScheduler {
 public:
  SingleTileScheduler(const TileSchedule& schedule, const PackGqa& pack_gqa, int batch)
      : decoder_(schedule.order, pack_gqa.heads, batch) {}

  CUTE_DEVICE TileCoord tile(int cta_index) const { return decoder_.tile(cta_index); }

 private:
  TileDecoder decoder_;
};

}  // namespace flash_cute::sm80
