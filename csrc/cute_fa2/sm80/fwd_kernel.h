// One tile of the forward from beginning to end: whose rows, which keys, the main loop, the
// epilogue.
#pragma once

#include "common/copy.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile.h"
#include "sm80/arguments.h"
#include "sm80/fwd_epilogue.h"
#include "sm80/fwd_mainloop.h"
#include "sm80/row_holders.h"
#include "sm80/traits.h"

namespace flash_cute::sm80 {

template <class Traits_, MaskKind kMask>
struct FwdKernel {
  using Traits = Traits_;
  using Arguments = sm80::Arguments;
  // As many as are faster (README.md): with more, ptxas finds a worse order of instructions, or
  // spills.
  static constexpr KeptAddresses kKeptAddresses =
      Traits::kScoresAhead                                    ? KeptAddresses::kThreadAndTarget
      : kMask == MaskKind::kBanded && Traits::kHeadDim >= 128 ? KeptAddresses::kThread
                                                              : KeptAddresses::kHead;
  using KeysValues = DenseKeysValues<Traits, kKeptAddresses>;
  using Mainloop = FwdMainloop<Traits, kMask, KeysValues>;
  using Epilogue = FwdEpilogue<Traits>;

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    using namespace cute;
    const FwdParams& params = arguments.params;
    const QueryRows& query_rows = arguments.query_rows;
    const TileCoord tile = tile_of(arguments, platform::block_index());
    const Sequence sequence(params, tile.split);
    const Mask<kMask> mask(params, sequence, query_rows);

    KeysValues keys_values(params, tile.batch,
                           platform::same_in_warp(query_rows.kv_head(tile.head)), sequence.len_k,
                           platform::thread_index());

    auto tOrO = partition_fragment_C(  // (4, MMA_M, kHeadDimV / 8)
        typename Traits::TiledMma{}, typename Traits::ShapeO{});
    typename Mainloop::Softmax softmax(params);
    Mainloop(arguments, tile, keys_values, mask, sequence.len_q, smem, softmax).run(tOrO);

    auto out = as_matrix(tOrO);  // (rows, columns)
    softmax.normalize(out, row_holders<Traits>(smem, platform::thread_index()));
    // Where the tile is, worked out again: it would hold registers all along.
    const TileCoord done =
        tile_of(arguments, platform::computed_here(platform::block_index(), sequence.len_q));
    if (params.splits.count == 1) {
      Epilogue::run(arguments, done, sequence.len_q, smem, tOrO, softmax);
    } else {
      Epilogue::run_split(arguments, done, sequence.len_q, tOrO, softmax);
    }
  }

 private:
  static CUTE_DEVICE TileCoord tile_of(const Arguments& arguments, int block) {
    const TileCoord tile = arguments.schedule.tile(block);
    return {platform::same_in_warp(tile.m_block), platform::same_in_warp(tile.head),
            platform::same_in_warp(tile.batch), platform::same_in_warp(tile.split)};
  }
};

}  // namespace flash_cute::sm80
