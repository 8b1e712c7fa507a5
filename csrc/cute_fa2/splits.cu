#include "splits.h"

#include <algorithm>

#include "combine/kernel.h"
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
  SplitKV in_parts(int64_t parts) const {
    parts = std::min({parts, count, int64_t{SplitKV::kMost}});
    if (parts <= 1) return {};
    const int64_t blocks_each = ceil_div(count, parts);
    SplitKV splits;
    splits.count = static_cast<int>(ceil_div(count, blocks_each));
    splits.keys = static_cast<int>(blocks_each * keys);
    return splits;
  }
};

// Of tiles that the busiest multiprocessor works on, `at_a_time`, one after the other.
double rounds(int64_t tiles, int at_a_time, int multiprocessors) {
  constexpr double kAlone = 0.7;  // of the time, for what does not fill a multiprocessor
  const int64_t on_one = ceil_div(tiles, multiprocessors);
  return on_one / at_a_time + (on_one % at_a_time > 0) * kAlone;
}

// The parts that take least, if that spares a quarter.
SplitKV best_splits(const FwdParams& params, const SplitCost& tiles, const KeyBlocks& blocks,
                    int multiprocessors) {
  constexpr int64_t kMostRounds = 4;  // of thread blocks that have a multiprocessor for themselves
  const int64_t rows = rows_of(params);
  const double whole = tiles.whole_rounds * (blocks.count * blocks.keys + tiles.of_tile);
  SplitKV best;
  double least = 0.75 * whole;
  for (int64_t round = 1; round <= kMostRounds; ++round) {
    const SplitKV splits = blocks.in_parts(round * multiprocessors / tiles.count);
    if (splits.count == 1) continue;
    const double time = rounds(splits.count * tiles.count, tiles.ctas_per_sm, multiprocessors) *
                            tiles.of_key * (splits.keys + tiles.of_tile) +
                        tiles.of_combining +
                        rows * (tiles.of_row + splits.count * tiles.of_row_of_part);
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

// Of what comes of the parts: (parts, batch, heads, rows) and so many elements each.
template <class Element>
TensorView<Element*> dense_view(const FwdParams& params, void* memory, int64_t elements) {
  const int64_t of_head = params.len_q * elements;
  return {static_cast<Element*>(memory), params.heads_q * of_head, of_head, elements};
}

int64_t rows_of_splits(const FwdParams& params) { return params.splits.count * rows_of(params); }

}  // namespace

int64_t tiles_of(const FwdParams& params, int block_m, int64_t most) {
  return PackGqa::make(params, block_m, most).tiles(params, block_m);
}

SplitCost SplitCost::of_sm80(const FwdParams& params, const TileEntrySm80& row,
                             int multiprocessors) {
  const int64_t count = tiles_of(params, row.config.block_m);
  return {
      .count = count,
      .block_n = row.config.block_n,
      .ctas_per_sm = row.ctas_per_sm,
      .of_key = 1,  // less with half of the rows, as in decoding, of which this takes no account
      .of_tile = 256,
      .of_combining = 256,
      .of_row = 0.1,
      .of_row_of_part = 1. / 60,
      .whole_rounds = rounds(count, row.ctas_per_sm, multiprocessors)};
}

SplitCost SplitCost::of_sm90(const FwdParams& params, MaskKind mask, const TileEntrySm90& row,
                             const TileEntrySm90& whole, int multiprocessors) {
  constexpr int kConsumerRows = FwdConfigSm90::kConsumerRows;
  const int64_t most = most_rows_of_query_sm90(params);
  const bool is_triangle = mask == MaskKind::kBanded && params.is_triangle();
  const int block_m = row.config.block_m(), whole_m = whole.config.block_m();
  const int64_t whole_tiles = tiles_of(params, whole_m, most);
  const PackGqa pack_gqa = PackGqa::make(params, block_m, most);
  // Whole keys take so many rows' time, on the busiest multiprocessor. In decoding one consumer has
  // all rows, and is faster alone.
  double rows = TailSplit::make(whole_m, mask, is_triangle, whole_tiles, multiprocessors)
                    .time(whole_m, is_triangle, multiprocessors);
  double of_key = 1;
  if (pack_gqa.count(params.len_q) <= kConsumerRows) {
    const auto of_one_consumer = [](int rows) { return 0.5 * (rows + kConsumerRows); };
    rows = ceil_div(whole_tiles, multiprocessors) * of_one_consumer(whole_m);
    of_key = of_one_consumer(block_m) / block_m;
  }
  const double scale = 128. / row.config.head_dim;  // with fewer columns keys are faster
  return {.count = pack_gqa.tiles(params, block_m),
          .block_n = row.config.block_n,
          .ctas_per_sm = 1,
          .of_key = of_key,
          .of_tile = 64 * scale,
          .of_combining = 400 * scale,
          .of_row = 0.06 * scale,
          .of_row_of_part = 0.034,
          .whole_rounds = rows * whole.row_cost / (block_m * row.row_cost)};
}

SplitKV choose_splits(const FwdParams& params, const SplitCost& tiles, int multiprocessors,
                      int64_t asked) {
  const KeyBlocks blocks = {ceil_div(params.len_k, tiles.block_n), tiles.block_n};
  // The keys before a window would be parts of their own.
  SplitKV splits = blocks.in_parts(asked);
  if (asked == 0 && !params.is_window()) {
    splits = best_splits(params, tiles, blocks, multiprocessors);
  }
  if (splits.count > 1) check_grid(rows_of(params));  // of launch_combine
  return splits;
}

int64_t bytes_of_splits(const FwdParams& params) {
  const int64_t of_row = params.head_dim * sizeof(float) + sizeof(RowStats);
  return rows_of_splits(params) * of_row;
}

void place_splits(FwdParams& params, void* memory) {
  params.splits.out = dense_view<float>(params, memory, params.head_dim);
  params.splits.rows = dense_view<RowStats>(
      params, params.splits.out.data + rows_of_splits(params) * params.head_dim, 1);
}

void launch_combine(const FwdParams& params, DType dtype, int device, cudaStream_t stream) {
  dtype_switch(dtype, [&](auto dtype_constant) {
    using Kernel = CombineKernel<dtype_constant()>;
    run_grid<Kernel>(typename Kernel::Arguments(params), rows_of(params), device, stream);
  });
}

}  // namespace flash_cute
