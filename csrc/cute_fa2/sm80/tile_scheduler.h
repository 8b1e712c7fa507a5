// Which tile a thread block works on.
#pragma once

#include <cute/config.hpp>

#include "common/tile.h"
#include "common/tile_order.h"
#include "params.h"

namespace flash_cute::sm80 {

// One block for each tile, on a one-dimensional grid (y and z end at 65,535). Blocks start in the
// order of their numbers, each as soon as there is room for it.
class TileScheduler {
 public:
  static TileScheduler make(const FwdParams& params, const PackGqa& pack_gqa, MaskKind mask,
                            int block_m, int l2_bytes) {
    // Equal tiles need no order but that of memory. That a head's last may take half of their time,
    // where it has few rows, is left out of account.
    const int thirds_of_l2 = params.head_dim <= 64 ? 1 : 2;  // csrc README has what was measured
    const int section = mask == MaskKind::kFull
                            ? 1
                            : TileOrder::kv_heads_within(l2_bytes / 3 * thirds_of_l2, params);
    TileScheduler scheduler;
    scheduler.order_ = TileOrder::make(params, pack_gqa, mask, block_m, block_m, section);
    return scheduler;
  }

  int blocks() const { return order_.tiles(); }

  CUTE_DEVICE TileCoord tile(int cta_index) const { return order_.tile(cta_index); }

 private:
  TileOrder order_;
};

}  // namespace flash_cute::sm80
