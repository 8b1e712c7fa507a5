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

// Into how many parts `blocks` blocks of keys are split, where `tiles` tiles see them and `slots`
// thread blocks run at a time. Time is counted in blocks of keys: a thread block takes some more
// than its keys do, and combining the parts takes a launch. Both are guesses, which no GPU has been
// asked about; they are high, and a quarter has to be gained.
int64_t best_count(int64_t tiles, int64_t blocks, int64_t slots) {
  constexpr int64_t kOfThreadBlock = 8, kOfCombining = 16, kMostRounds = 4;
  const auto time = [&](int64_t count) {
    return ceil_div(count * tiles, slots) * (ceil_div(blocks, count) + kOfThreadBlock) +
           (count > 1 ? kOfCombining : 0);
  };
  int64_t best = 1;
  for (int64_t rounds = 1; rounds <= kMostRounds; ++rounds) {
    const int64_t count = std::min(blocks, rounds * slots / tiles);
    if (count > 1 && 4 * time(count) <= 3 * time(1) && time(count) < time(best)) best = count;
  }
  return best;
}

// Of what comes of the parts: (parts, batch, heads, rows) and so many elements each.
template <class Element>
TensorView<Element*> dense_view(const FwdParams& params, void* memory, int64_t elements) {
  const int64_t of_head = params.len_q * elements;
  return {static_cast<Element*>(memory), params.heads_q * of_head, of_head, elements};
}

int64_t rows_of_splits(const FwdParams& params) {
  return int64_t{params.splits.count} * params.batch * params.heads_q * params.len_q;
}

}  // namespace

KeySplits choose_splits(const FwdParams& params, const FwdRow& row, int multiprocessors,
                        int64_t asked) {
  const int block_m = row.config.block_m, block_n = row.config.block_n;
  const QueryRows query_rows = QueryRows::make(params, block_m);
  const int64_t blocks = ceil_div(params.len_k, block_n);
  // The keys before a window would be parts of their own.
  const bool is_window = params.band_begin > -params.len_q;
  int64_t count = asked;
  if (asked == 0 && !is_window) {
    const int64_t tiles =
        int64_t{query_rows.m_blocks(params.len_q, block_m)} * query_rows.heads() * params.batch;
    count = best_count(tiles, blocks, int64_t{multiprocessors} * row.blocks_per_sm);
  }
  count = std::min({count, blocks, int64_t{KeySplits::kMost}});
  if (count <= 1) return {};
  const int64_t blocks_each = ceil_div(blocks, count);
  KeySplits splits;
  splits.count = static_cast<int>(ceil_div(blocks, blocks_each));
  splits.keys = static_cast<int>(blocks_each * block_n);
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
  const int64_t rows = int64_t{params.batch} * params.heads_q * params.len_q;
  check_grid(rows);
  dtype_switch(dtype, [&](auto dtype_constant) {
    using Kernel = CombineKernel<dtype_constant()>;
    run_grid<Kernel>(typename Kernel::Arguments(params), rows, device, stream);
  });
}

}  // namespace flash_cute
