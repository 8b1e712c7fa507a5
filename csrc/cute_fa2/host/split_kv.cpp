#include "host/split_kv.h"

#include <algorithm>

namespace flash_cute {
namespace {

// The keys of a call in blocks of a tile.
struct KeyBlocks {
  int64_t count;
  int keys;  // of a block

  // At most so many splits: fewer if they have all of the blocks then.
  SplitKV in_splits(int64_t splits) const {
    splits = std::min({splits, count, int64_t{SplitKV::kMaxCount}});
    if (splits <= 1) return {};
    const int64_t blocks_each = ceil_div(count, splits);
    return {.count = static_cast<int>(ceil_div(count, blocks_each)),
            .keys = static_cast<int>(blocks_each * keys)};
  }
};

// Rounds on the busiest SM, which runs `at_a_time` tiles together.
double rounds(int64_t tiles, int at_a_time, int multiprocessors) {
  constexpr double kPartlyFilled = 0.7;  // of a round that does not fill the SM
  const int64_t on_one = ceil_div(tiles, multiprocessors);
  return on_one / at_a_time + (on_one % at_a_time > 0) * kPartlyFilled;
}

SplitKV best_splits(const FwdParams& params, const SplitCost& cost, const KeyBlocks& blocks,
                    int multiprocessors) {
  constexpr int64_t kMaxRounds = 4;  // as many splits as give an SM 1, 2, 3 or 4 tiles
  const double unsplit = cost.rounds_unsplit * (blocks.count * blocks.keys + cost.tile);
  SplitKV best;
  double least = 0.8 * unsplit;
  for (int64_t round = 1; round <= kMaxRounds; ++round) {
    const SplitKV splits = blocks.in_splits(round * multiprocessors / cost.tiles);
    if (splits.count == 1) continue;
    const double time = rounds(splits.count * cost.tiles, cost.ctas_per_sm, multiprocessors) *
                            cost.key * (splits.keys + cost.tile) +
                        cost.combine +
                        params.rows() * (cost.row + splits.count * cost.row_of_split);
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

}  // namespace

SplitCost SplitCost::of_sm80(const FwdParams& params, const GqaLayout& gqa,
                             const TileEntrySm80& entry, int multiprocessors) {
  const int64_t tiles = gqa.tiles(params, entry.config.block_m);
  return {.tiles = tiles,
          .block_n = entry.config.block_n,
          .ctas_per_sm = entry.ctas_per_sm,
          .key = 1,  // decoding works on half of the rows, which this leaves out
          .tile = 256,
          .combine = 240,
          .row = 0.002,
          .row_of_split = 0.0006,
          .rounds_unsplit = rounds(tiles, entry.ctas_per_sm, multiprocessors)};
}

SplitCost SplitCost::of_sm90(const FwdParams& params, const GqaLayout& gqa,
                             const TileEntrySm90& entry, const TileEntrySm90& unsplit,
                             const TailSplit& tail, int multiprocessors) {
  constexpr int kConsumerRows = FwdConfigSm90::kConsumerRows;
  const int block_m = entry.config.block_m(), unsplit_m = unsplit.config.block_m();
  // In decoding one consumer has all rows, and is faster alone.
  double rows = tail.time(params, unsplit_m, multiprocessors);
  double key = 1;
  if (gqa.rows(params.len_q) <= kConsumerRows) {
    const auto one_consumer = [](int rows) { return 0.5 * (rows + kConsumerRows); };
    const int64_t tiles = tail.whole_tiles + tail.tail_tiles;
    rows = ceil_div(tiles, multiprocessors) * one_consumer(unsplit_m);
    key = one_consumer(block_m) / block_m;
  }
  const double scale = 128. / entry.config.head_dim;  // with fewer columns keys are faster
  return {.tiles = gqa.tiles(params, block_m),
          .block_n = entry.config.block_n,
          .ctas_per_sm = 1,
          .key = key,
          .tile = 64 * scale,
          .combine = 300 * scale,
          .row = 0.005 * scale,
          .row_of_split = 0.005,
          .rounds_unsplit = rows * unsplit.row_cost / (block_m * entry.row_cost)};
}

SplitKV choose_splits(const FwdParams& params, const SplitCost& cost, int multiprocessors,
                      int64_t asked) {
  const KeyBlocks blocks = {ceil_div(params.len_k, cost.block_n), cost.block_n};
  if (asked != 0) return blocks.in_splits(asked);
  // The keys before a window would be splits of their own.
  return params.is_window() ? SplitKV{} : best_splits(params, cost, blocks, multiprocessors);
}

int64_t split_workspace_bytes(const FwdParams& params) {
  if (params.splits.count == 1) return 0;
  const int64_t of_row = params.head_dim_v * sizeof(float) + sizeof(RowStats);
  return params.splits.count * params.rows() * of_row;
}

void place_splits(SplitKV& splits, const FwdParams& params, void* workspace) {
  const auto view = [&](auto* data, int columns) {
    return dense_view(data, params.heads_q, params.len_q, columns);
  };
  float* out = static_cast<float*>(workspace);
  splits.out = view(out, params.head_dim_v);
  const int64_t outputs = splits.count * params.rows() * params.head_dim_v;
  splits.stats = view(reinterpret_cast<RowStats*>(out + outputs), 1);
}

}  // namespace flash_cute
