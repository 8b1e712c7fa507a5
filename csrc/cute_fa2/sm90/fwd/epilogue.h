// Writes a finished tile to global memory: O and the log-sum-exp. O goes by TMA from shared memory,
// a strip of a warp's rows at a time.
#pragma once

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "sm90/fwd/arguments.h"
#include "sm90/hopper.h"
#include "sm90/tile_scheduler.h"

namespace flash_cute::sm90 {

template <class Traits>
struct FwdEpilogue {
  using ElementOut = typename Traits::ElementOut;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kStripV = Traits::kStripV;
  static constexpr int kOutStrips = Traits::kOutStrips;

  // Of a consumer's rows, which begin with `row0`.
  // tOrO  ((2, 2, kHeadDimV / 8), 1, 1), normalised
  template <class Out, class Softmax>
  static CUTE_DEVICE void run(const Arguments& arguments, SharedMemory& smem, WorkTile tile,
                              int consumer, int row0, const Sequence& sequence, Out& tOrO,
                              const Softmax& softmax) {
    const int warp = warp_of_consumer();
    row0 += warp * Traits::kWarpRows;
    store_lse(arguments, tile, row0, sequence, softmax);
    store_out(arguments, smem, tile, consumer, warp, row0, sequence, tOrO);
  }

  // Of a warp's rows, which begin with `row0`.
  template <class Softmax>
  static CUTE_DEVICE void store_lse(const Arguments& arguments, WorkTile tile, int row0,
                                    const Sequence& sequence, const Softmax& softmax) {
    const PackGqa& pack_gqa = arguments.pack_gqa;
    const int lane = hopper::thread_in_warpgroup() % 32;
    const int mine = lane % 4;
    if (mine < Softmax::kRows) {  // each of two lanes has one of the rows
      const int row = row0 + lane / 4 + 8 * mine;
      if (pack_gqa.exists(row, sequence)) {
        *pack_gqa.find<float>(arguments.params.lse, tile, row, sequence) =
            softmax.lse(mine, pack_gqa.head(tile.head, row));
      }
    }
  }

  // Likewise; the columns of O from `first_column` on.
  template <class Out>
  static CUTE_DEVICE void store_out(const Arguments& arguments, SharedMemory& smem, WorkTile tile,
                                    int consumer, int warp, int row0, const Sequence& sequence,
                                    Out& tOrO, int first_column = 0) {
    using namespace cute;
    const PackGqa& pack_gqa = arguments.pack_gqa;
    const int lane = hopper::thread_in_warpgroup() % 32;
    // The map does not know where a sequence ends that another one follows.
    const int rows = pack_gqa.rows(sequence.len_q);
    const bool is_last = Traits::kIsPacked && row0 + Traits::kWarpRows > rows;  // fault: last-store
    if (is_last) {
      store_rows<ElementOut>(arguments, arguments.params.out, tile, row0, sequence, tOrO,
                             [](int, int) {});
      hopper::sync_warp();
      return;
    }

    auto words = make_tensor<uint32_t>(  // two columns each: (2 rows, kHeadDimV / 8)
        Int<decltype(size(tOrO))::value / 2>{});
    convert_to_words<ElementOut>(tOrO, words);
    // Where this lane's chunk of columns 0 to 15 lies. The swizzle is an XOR, so `first ^ column`
    // gives that of later columns.
    const int first = typename Traits::SmemLayoutO{}(lane % 16, lane / 16 * 8);
    CUTE_UNROLL
    for (int strip = 0; strip < Traits::kHeadDimV / kStripV; ++strip) {
      ElementOut* staged = smem.out[consumer][warp][strip % kOutStrips];
      if (strip == 0) {
        wait_until_read<0>();  // TMA has read the strips of the tile before; fault: store-wait
      } else if (strip >= kOutStrips) {
        wait_until_read<kOutStrips - 1>();  // TMA has read the strip that was here
      }
      CUTE_UNROLL
      for (int column = 0; column < kStripV; column += 16) {
        uint32_t block[4];  // (2 rows, 2 x 8 columns)
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) block[i] = words((strip * kStripV + column) / 4 + i);
        hopper::stmatrix(staged + (first ^ column), block);  // fault: swizzle
      }
      // What each lane wrote is visible to TMA, and once all lanes are here, to the box of lane 0.
      hopper::fence_async_proxy();  // fault: proxy-fence
      hopper::sync_warp();
      if (lane == 0) {
        hopper::tma_store(arguments.maps.out, staged, first_column + strip * kStripV,
                          pack_gqa.in_group(row0), pack_gqa.query(row0) + sequence.first_q,
                          tile.head, arguments.params.out.stride_batch != 0 ? tile.batch : 0);
        hopper::tma_store_commit();
      }
    }
  }

  // Gives the sink its share of a consumer's rows of `out`, (2 rows, columns).
  template <class Out, class Softmax>
  static CUTE_DEVICE void join_sink(const Arguments& arguments, WorkTile tile, int row0, Out& out,
                                    const Softmax& softmax) {
    const PackGqa& pack_gqa = arguments.pack_gqa;
    const int lane = hopper::thread_in_warpgroup() % 32;
    row0 += warp_of_consumer() * Traits::kWarpRows + lane / 4;
    softmax.join_sink(out, [&](int r) { return pack_gqa.query_of(tile.head, row0 + 8 * r).head; });
  }

  // The result of a split: O in fp32, and the rows' statistics.
  template <class Out, class Softmax>
  static CUTE_DEVICE void run_split(const Arguments& arguments, WorkTile tile, int row0,
                                    const Sequence& sequence, Out& tOrO, const Softmax& softmax) {
    const SplitKV& splits = arguments.params.splits;
    const int lane = hopper::thread_in_warpgroup() % 32;
    const auto store_stats = [&](int r, int row) {
      if (r != lane % 4) return;  // each of two lanes of a quad has one of the rows
      *arguments.pack_gqa.find<RowStats>(splits.stats, tile, row, sequence) = softmax.stats(r);
    };
    store_rows<float>(arguments, splits.out, tile,
                      row0 + hopper::warp_in_warpgroup() * Traits::kWarpRows, sequence, tOrO,
                      store_stats);
  }

  // Before the CTA ends: its shared memory has been read.
  static CUTE_DEVICE void finish() { wait_until_read<0>(); }

 private:
  // Of packed sequences computed here: ahead of the main loop it would hold a register.
  static CUTE_DEVICE int warp_of_consumer() {
    if constexpr (Traits::kIsPacked) {
      return platform::warp_uniform(hopper::thread_in_warpgroup_here() / 32);
    } else {
      return hopper::warp_in_warpgroup();
    }
  }

  // Stores a warp's rows, which begin with `row0`, from registers to `view`, each if it exists.
  // Splits have no tensor map of their results. Calls visit(index of the row, row) for each.
  template <class Element, class View, class Out, class Visit>
  static CUTE_DEVICE void store_rows(const Arguments& arguments, const View& view, WorkTile tile,
                                     int row0, const Sequence& sequence, Out& tOrO,
                                     const Visit& visit) {
    using namespace cute;
    const int lane = hopper::thread_in_warpgroup() % 32;
    row0 += lane / 4;
    auto out = as_matrix(tOrO);  // (2 rows, columns): two neighbouring columns of each 8
    CUTE_UNROLL
    for (int r = 0; r < size<0>(out); ++r) {
      const int row = row0 + 8 * r;
      if (!arguments.pack_gqa.exists(row, sequence)) continue;
      visit(r, row);
      Element* to = arguments.pack_gqa.find<Element>(view, tile, row, sequence) + 2 * (lane % 4);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(out); c += 2) {
        if (4 * c + 2 * (lane % 4) >= arguments.params.head_dim_v) continue;
        auto pair = make_tensor<Element>(_2{});
        pair(0) = Element(out(r, c));
        pair(1) = Element(out(r, c + 1));
        using Pair = uint_bit_t<2 * sizeof_bits_v<Element>>;
        copy(Copy_Atom<UniversalCopy<Pair>, Element>{}, pair,
             make_tensor(make_gmem_ptr(to + 4 * c), Shape<_2>{}));
      }
    }
  }

  // Waits until TMA has read all but the newest kStripsReading boxes of this warp. The first lane
  // has issued them and waits. After sync_warp all lanes may write there again.
  template <int kStripsReading>
  static CUTE_DEVICE void wait_until_read() {
    if (hopper::is_first_lane()) hopper::tma_store_wait<kStripsReading>();
    hopper::sync_warp();
  }
};

}  // namespace flash_cute::sm90
