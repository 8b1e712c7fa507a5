#include "splits.h"

#include <algorithm>

#include "common/combine_kernel.h"
#include "common/grid.h"
#include "common/tile.h"
#include "device.h"
#include "static_switch.h"

namespace flash_cute {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t rows_of(const FwdParams& params) {
  return int64_t{params.batch} * params.heads_q * params.len_q;
}

// The keys of a call as blocks of a tile, of which each part has as many, but for the last.
struct KeyBlocks {
  int64_t count;
  int keys;  // of a block

  // At most so many parts: fewer if they have all of the blocks then.
  KeySplits in_parts(int64_t parts) const {
    parts = std::min({parts, count, int64_t{KeySplits::kMost}});
    if (parts <= 1) return {};
    const int64_t blocks_each = ceil_div(count, parts);
    KeySplits splits;
    splits.count = static_cast<int>(ceil_div(count, blocks_each));
    splits.keys = static_cast<int>(blocks_each * keys);
    return splits;
  }
};

// What a call takes, in the time that a multiprocessor full of thread blocks takes for a key of
// each, with all rows of a tile. (With half of them, as in decoding, a key takes less.) These have
// costs beside their keys, and combining the parts has its own: guesses by a model of the GPU.
// bench/results/decode.json has what they choose beside other numbers of parts.
struct Cost {
  int64_t tiles, rows;
  KeyBlocks blocks;
  int multiprocessors, blocks_per_sm;

  double of(const KeySplits& splits) const {
    constexpr double kAlone = 0.7;  // of the time, for what does not fill a multiprocessor
    constexpr double kOfThreadBlock = 256, kOfCombining = 256, kOfRow = 0.1, kOfRowsPart = 1. / 60;
    const int64_t thread_blocks = ceil_div(splits.count * tiles, multiprocessors);  // of one
    const double rounds =
        thread_blocks / blocks_per_sm + (thread_blocks % blocks_per_sm > 0) * kAlone;
    const int64_t keys = std::min(int64_t{splits.keys}, blocks.count * blocks.keys);
    const double combining = kOfCombining + rows * (kOfRow + splits.count * kOfRowsPart);
    return rounds * (keys + kOfThreadBlock) + (splits.count > 1) * combining;
  }

  // The parts that take least, if that spares a quarter.
  KeySplits best() const {
    constexpr int64_t kMostThreadBlocks = 4;  // of a multiprocessor
    KeySplits best;
    double least = 0.75 * of(best);
    for (int64_t thread_blocks = 1; thread_blocks <= kMostThreadBlocks; ++thread_blocks) {
      const KeySplits splits = blocks.in_parts(thread_blocks * multiprocessors / tiles);
      if (of(splits) < least) {
        least = of(splits);
        best = splits;
      }
    }
    return best;
  }
};

// Of what comes of the parts: (parts, batch, heads, rows) and so many elements each.
template <class Element>
TensorView<Element*> dense_view(const FwdParams& params, void* memory, int64_t elements) {
  const int64_t of_head = params.len_q * elements;
  return {static_cast<Element*>(memory), params.heads_q * of_head, of_head, elements};
}

int64_t rows_of_splits(const FwdParams& params) { return params.splits.count * rows_of(params); }

}  // namespace

int64_t tiles_of(const FwdParams& params, int block_m, int64_t most) {
  return QueryRows::make(params, block_m, most).tiles(params, block_m);
}

KeySplits choose_splits(const FwdParams& params, const FwdRow& row, int multiprocessors,
                        int64_t asked) {
  const int block_n = row.config.block_n;
  const KeyBlocks blocks = {ceil_div(params.len_k, block_n), block_n};
  // The keys before a window would be parts of their own.
  KeySplits splits = blocks.in_parts(asked);
  if (asked == 0 && !params.is_window()) {
    splits = Cost{tiles_of(params, row.config.block_m), rows_of(params), blocks, multiprocessors,
                  row.blocks_per_sm}
                 .best();
  }
  if (splits.count > 1) check_grid(rows_of(params));  // of combine_splits
  return splits;
}

int64_t bytes_of_splits(const FwdParams& params) {
  const int64_t of_row = params.head_dim * sizeof(float) + sizeof(RowStatistics);
  return rows_of_splits(params) * of_row;
}

void place_splits(FwdParams& params, void* memory) {
  params.splits.out = dense_view<float>(params, memory, params.head_dim);
  params.splits.rows = dense_view<RowStatistics>(
      params, params.splits.out.data + rows_of_splits(params) * params.head_dim, 1);
}

void combine_splits(const FwdParams& params, DType dtype, int device, cudaStream_t stream) {
  dtype_switch(dtype, [&](auto dtype_constant) {
    using Kernel = CombineKernel<dtype_constant()>;
    run_grid<Kernel>(typename Kernel::Arguments(params), rows_of(params), device, stream);
  });
}

}  // namespace flash_cute
