// A thread block of the SM90 forward from beginning to end: the roles of its warpgroups, and for
// each tile the main loop and the epilogue.
#pragma once

#include "common/layout.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "sm90/arguments.h"
#include "sm90/fwd_epilogue.h"
#include "sm90/fwd_mainloop.h"
#include "sm90/fwd_producer.h"
#include "sm90/hopper.h"
#include "sm90/rings.h"
#include "sm90/schedule.h"
#include "sm90/traits.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct FwdKernel {
  using Traits = Traits_;
  using Arguments = sm90::Arguments;
  using Producer = FwdProducer<Traits, kMask>;
  using Mainloop = FwdMainloop<Traits, kMask>;
  using Epilogue = FwdEpilogue<Traits>;

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    if (hopper::is_first_thread()) {
      hopper::prefetch_map(arguments.q);
      hopper::prefetch_map(arguments.k);
      hopper::prefetch_map(arguments.v);
      hopper::prefetch_map(arguments.out);
      Rings<Traits, kMask>::init_barriers(smem);
      hopper::publish_barriers();
    }
    platform::sync_block();  // the barriers are there, for all threads

    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::give_back_registers<Traits::kConfig.producer_registers()>();
      if (hopper::is_first_thread()) {
        Producer producer(arguments, smem);
        producer.run(Schedule::Tiles(platform::block_index()));
      }
    } else {
      hopper::take_registers<Traits::kConfig.consumer_registers()>();
      const int index = warpgroup - 1;
      Mainloop mainloop(arguments, smem, index);
      mainloop.run([&](Tile tile, int row0, auto& softmax, auto& tOrO) {
        auto out = as_matrix(tOrO);  // (rows, columns)
        softmax.normalize(out);
        const int len_q = Sequence(arguments.params).len_q;
        if constexpr (Traits::kSplits) {
          Epilogue::run_split(arguments, tile, row0, len_q, tOrO, softmax);
        } else {
          Epilogue::run(arguments, smem, tile, index, row0, len_q, tOrO, softmax);
        }
      });
      Epilogue::finish();
    }
  }
};

}  // namespace flash_cute::sm90
