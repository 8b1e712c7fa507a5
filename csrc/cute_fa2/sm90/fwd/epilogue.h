// What a finished tile leaves in global memory: O, which the copy engine takes from shared memory,
// a strip of a warp's rows at a time, and the log-sum-exp.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/platform.h"
#include "common/tile.h"
#include "sm90/fwd/arguments.h"
#include "sm90/hopper.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits>
struct FwdEpilogue {
  using ElementOut = typename Traits::ElementOut;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kStrip = Traits::kStrip;
  static constexpr int kOutStrips = Traits::kOutStrips;

  // Of a consumer's rows, which begin with `row0`.
  // tOrO  ((2, 2, kHeadDimV / 8), 1, 1), normalised
  template <class Out, class Softmax>
  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem, WorkTile tile,
                              int consumer, int row0, int len_q, const Out& tOrO,
                              const Softmax& softmax) {
    using namespace cute;
    const PackGqa& pack_gqa = arguments.pack_gqa;
    const int warp = hopper::warp_in_warpgroup();
    const int lane = hopper::thread_in_warpgroup() % 32;
    row0 += warp * Traits::kWarpRows;

    const int mine = lane % 4;
    if (mine < Softmax::kRows) {  // each of two lanes has one of the rows
      const int row = row0 + lane / 4 + 8 * mine;
      if (pack_gqa.exists(row, len_q)) {
        *pack_gqa.find<float>(arguments.params.lse, tile, row) = softmax.lse(mine);
      }
    }

    auto words = make_tensor<uint32_t>(  // two columns each: (2 rows, kHeadDimV / 8)
        Int<decltype(size(tOrO))::value / 2>{});
    convert_to_words<ElementOut>(tOrO, words);
    // Of 16 columns, the chunk of 8 that this lane names, as the first of the strip lies.
    const int first = typename Traits::SmemLayoutO{}(lane % 16, lane / 16 * 8);
    CUTE_UNROLL
    for (int strip = 0; strip < Traits::kHeadDimV / kStrip; ++strip) {
      ElementOut* staged = smem.out[consumer][warp][strip % kOutStrips];
      if (strip == 0) {
        wait_until_read<0>();  // the tile before
      } else if (strip >= kOutStrips) {
        wait_until_read<kOutStrips - 1>();  // the strip that was here
      }
      CUTE_UNROLL
      for (int column = 0; column < kStrip; column += 16) {
        uint32_t block[4];  // (2 rows, 2 x 8 columns)
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) block[i] = words((strip * kStrip + column) / 4 + i);
        hopper::stmatrix(staged + (first ^ column), block);
      }
      hopper::fence_async_proxy();
      hopper::sync_warp();
      if (lane == 0) {
        hopper::tma_store(arguments.out, staged, strip * kStrip, pack_gqa.in_group(row0),
                          pack_gqa.query(row0), tile.head, tile.batch);
        hopper::tma_store_commit();
      }
    }
  }

  // The same of a part of the keys: O in fp32, straight from registers, and the rows' stats.
  template <class Out, class Softmax>
  static CUTE_DEVICE void run_split(const Arguments& arguments, WorkTile tile, int row0, int len_q,
                                    Out& tOrO, const Softmax& softmax) {
    using namespace cute;
    const FwdParams& params = arguments.params;
    const PackGqa& pack_gqa = arguments.pack_gqa;
    const int lane = hopper::thread_in_warpgroup() % 32;
    const int mine = lane % 4;
    row0 += hopper::warp_in_warpgroup() * Traits::kWarpRows + lane / 4;
    auto out = as_matrix(tOrO);  // (2 rows, columns), of which two that lie together in each 8
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      const int row = row0 + 8 * r;
      if (!pack_gqa.exists(row, len_q)) continue;
      if (r == mine) {
        *pack_gqa.find<RowStats>(params.splits.rows, tile, row) = softmax.stats(r);
      }
      float* to = pack_gqa.find<float>(params.splits.out, tile, row) + 2 * mine;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(out); c += 2) {
        auto pair = make_tensor<float>(_2{});
        pair(0) = out(r, c);
        pair(1) = out(r, c + 1);
        if (4 * c + 2 * mine < params.head_dim) {
          copy(Copy_Atom<UniversalCopy<uint64_t>, float>{}, pair,
               make_tensor(make_gmem_ptr(to + 4 * c), Shape<_2>{}));
        }
      }
    }
  }

  // Shared memory has to be there until it has been read.
  static CUTE_DEVICE void finish() { wait_until_read<0>(); }

 private:
  template <int kStripsReading>
  static CUTE_DEVICE void wait_until_read() {
    if (hopper::is_first_lane()) hopper::tma_store_wait<kStripsReading>();
    hopper::sync_warp();
  }
};

}  // namespace flash_cute::sm90
