// A thread block of the SM90 forward from beginning to end: the roles of its warpgroups, and for
// each tile the main loop and the epilogue.
#pragma once

#include "common/platform.h"
#include "sm90/fwd_epilogue.h"
#include "sm90/fwd_mainloop.h"
#include "sm90/hopper.h"
#include "sm90/traits.h"

namespace flash_cute::sm90 {

template <class Traits_, MaskKind kMask>
struct FwdKernel {
  using Traits = Traits_;
  using Mainloop = FwdMainloop<Traits, kMask>;
  using Epilogue = FwdEpilogue<Traits>;

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    if (hopper::is_first_thread()) {
      hopper::prefetch_map(arguments.q);
      hopper::prefetch_map(arguments.k);
      hopper::prefetch_map(arguments.v);
      Mainloop::init_barriers(smem);
      hopper::publish_barriers();
    }
    platform::sync_block();  // the barriers are there, for all threads

    const Schedule& schedule = arguments.schedule;
    const int block = platform::block_index();
    const int warpgroup = hopper::warpgroup_index();
    if (warpgroup == 0) {
      hopper::give_back_registers<Traits::kConfig.producer_registers()>();
      if (hopper::is_first_thread()) {
        typename Mainloop::Producer producer(arguments, smem);
        schedule.for_each_tile(block, [&](TileCoord tile) { producer.load_tile(tile); });
      }
    } else {
      hopper::take_registers<Traits::kConfig.consumer_registers()>();
      typename Mainloop::Consumer consumer(arguments, smem, warpgroup - 1);
      schedule.for_each_tile(
          block, [&](TileCoord tile) { consume(arguments, consumer, tile, warpgroup - 1); });
    }
  }

 private:
  static CUTE_DEVICE void consume(const Arguments& arguments, typename Mainloop::Consumer& consumer,
                                  TileCoord tile, int index) {
    using namespace cute;
    const Sequence sequence(arguments.params);
    const int row0 = tile.m_block * Traits::kBlockM + index * Traits::kRows;
    const int rows_q = min(Traits::kRows, arguments.rows.count(sequence.len_q) - row0);

    auto tOrO = partition_fragment_C(  // ((2, 2, kHeadDimV / 8), 1, 1)
        typename Traits::MmaO{}, typename Traits::ShapeO{});
    typename Mainloop::Softmax softmax(arguments.params);
    consumer.run(tile, row0, rows_q, softmax, tOrO);

    auto out = as_matrix(tOrO);  // (rows, columns)
    auto lse = softmax.finish(out);
    Epilogue::run(arguments, tile, row0, rows_q, sequence.len_q, tOrO, lse);
  }
};

}  // namespace flash_cute::sm90
