// One tile of the SM80 forward from beginning to end: which rows and keys, the main loop, the
// epilogue.
#pragma once

#include <type_traits>

#include "common/mask.h"
#include "common/pack_gqa.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "sm80/chunked_kv.h"
#include "sm80/fwd/arguments.h"
#include "sm80/fwd/epilogue.h"
#include "sm80/fwd/mainloop.h"
#include "sm80/fwd/mainloop_chunked.h"
#include "sm80/fwd/mainloop_fp32.h"
#include "sm80/fwd/mainloop_pipelined.h"
#include "sm80/fwd/traits.h"
#include "sm80/kv_source.h"
#include "sm80/row_allreduce.h"

namespace flash_cute::sm80 {

template <class Traits_, MaskKind kMask>
struct FwdKernel {
  using Traits = Traits_;
  using Arguments = sm80::Arguments;
  static constexpr bool kIsFp32 = std::is_same_v<typename Traits::Element, float>;
  // Addresses that the K/V source keeps in registers: as many as make the kernel faster. With more,
  // ptxas finds a worse order of instructions, or spills.
  static constexpr KeptAddresses kKeptAddresses =
      kMask == MaskKind::kScored && Traits::kHeadDim != 64 ? KeptAddresses::kHead
      : Traits::kPipelinedQk                               ? KeptAddresses::kThreadAndTarget
      : (kMask != MaskKind::kFull || Traits::kQInRegisters || kIsFp32) && Traits::kHeadDim >= 128
          ? KeptAddresses::kThread
          : KeptAddresses::kHead;
  using KVSource =
      std::conditional_t<Traits::kIsChunked, ChunkedKV<Traits>, DenseKV<Traits, kKeptAddresses>>;
  using Mainloop = std::conditional_t<
      kIsFp32, FwdMainloopFp32<Traits, kMask, KVSource>,
      std::conditional_t<
          Traits::kIsChunked, FwdMainloopChunked<Traits, kMask, KVSource>,
          std::conditional_t<Traits::kPipelinedQk, FwdMainloopPipelined<Traits, kMask, KVSource>,
                             FwdMainloop<Traits, kMask, KVSource>>>>;
  using Epilogue = FwdEpilogue<Traits>;

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    using namespace cute;
    const FwdParams& params = arguments.params;
    const PackGqa& pack_gqa = arguments.pack_gqa;
    if constexpr (has_sequences(kMask)) {  // the grid is as large as there may be tiles
      if (platform::cta_index() >= arguments.packed_tiles.count()) return;
    }
    const TileCoord tile = tile_of(arguments, platform::cta_index());
    const Sequence sequence = sequence_of(arguments, tile, platform::cta_index());
    const Mask<kMask, GqaLayout, true> mask(params, sequence, pack_gqa);

    Sequence of_kv = sequence;
    // Keys behind the split's last are masked. Two lengths would take a register that is not there.
    if constexpr (kMask == MaskKind::kPacked && Traits::kHeadDim == 128) {
      of_kv.len_k = sequence.key_end;
    }
    KVSource kv_source(params, tile.batch, platform::warp_uniform(pack_gqa.kv_head(tile.head)),
                       of_kv, platform::thread_index());

    auto tOrO = partition_fragment_C(  // (4, MMA_M, kHeadDimV / 8)
        typename Traits::TiledMma{}, typename Traits::ShapeO{});
    typename Mainloop::Softmax softmax(params);
    Mainloop(arguments, tile, kv_source, mask, sequence, smem, softmax).run(tOrO);

    auto out = as_matrix(tOrO);  // (rows, columns)
    softmax.normalize(out, row_allreduce<Traits>(smem, platform::thread_index()));
    // Rematerialized: the tile would hold registers through the main loop.
    const TileCoord done =
        tile_of(arguments, platform::rematerialize(platform::cta_index(), params.len_q));
    // Read again: it would hold registers, too.
    const Sequence of_done =
        has_sequences(kMask)
            ? sequence_of(arguments, done,
                          platform::rematerialize(platform::cta_index(), params.len_k))
            : sequence;
    if (params.splits.count == 1) {
      if (params.sink) Epilogue::join_sink(arguments, done, tOrO, softmax);
      Epilogue::run(arguments, done, of_done, smem, tOrO, softmax);
    } else {
      Epilogue::run_split(arguments, done, of_done, tOrO, softmax);
    }
  }

 private:
  static CUTE_DEVICE Sequence sequence_of(const Arguments& arguments, TileCoord tile, int cta) {
    return has_sequences(kMask) ? arguments.packed_tiles.split_sequence(cta)
                                : Sequence::of_split(arguments.params, tile.split);
  }

  static CUTE_DEVICE TileCoord tile_of(const Arguments& arguments, int cta) {
    const TileCoord tile = has_sequences(kMask) ? arguments.packed_tiles.split_tile(cta)
                                                : arguments.scheduler.tile(cta);
    return {platform::warp_uniform(tile.m_block), platform::warp_uniform(tile.head),
            platform::warp_uniform(tile.batch), platform::warp_uniform(tile.split)};
  }
};

}  // namespace flash_cute::sm80
