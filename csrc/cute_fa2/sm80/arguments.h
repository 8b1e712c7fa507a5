// What an SM80 kernel is launched with.
#pragma once

#include "common/tile.h"
#include "params.h"
#include "sm80/schedule.h"

namespace flash_cute::sm80 {

struct Arguments {
  FwdParams params;
  QueryRows query_rows;
  Schedule schedule;
};

}  // namespace flash_cute::sm80
