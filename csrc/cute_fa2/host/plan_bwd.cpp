#include "host/plan_bwd.h"

#include <algorithm>
#include <limits>

#include "host/built.h"
#include "host/named_numbers.h"
#include "host/why_no_tensor_map.h"
#include "host/workspace.h"
#include "tiles/bias_gradient_sm80.h"
#include "tiles/bwd_sm80.h"
#include "tiles/bwd_sm80_large.h"
#include "tiles/bwd_sm90.h"

namespace flash_cute {
namespace {

// The entries of the batch that blocks are counted in.
int64_t entries(const BwdParams& params) { return params.is_packed() ? 1 : params.batch; }

// Query rows of a head, of all sequences that its tiles go through.
int64_t rows_of_head(const BwdParams& params) {
  const bool is_padded = params.is_packed() && !params.sequences.cu_seqlens_q;
  return int64_t{params.len_q} * (is_padded ? params.batch : 1);
}

// The most blocks of `of_block` rows that a head of an entry has.
int count_blocks(const BwdParams& params, const int* cu_seqlens, int rows, int of_block) {
  const int64_t of_one = ceil_div(rows, of_block);
  const int64_t blocks = cu_seqlens           ? int64_t{rows / of_block} + params.batch
                         : params.is_packed() ? of_one * params.batch
                                              : of_one;
  check_grid(blocks);
  return static_cast<int>(blocks);
}

// The CTAs of a group share its query heads where there are fewer than two tiles for each SM, or
// under a mask, where tiles differ, four.
int choose_head_splits(const BwdParams& params, int64_t tiles, int multiprocessors, int64_t asked) {
  const int64_t group = params.group_size;
  const int64_t enough = (params.is_full() ? 2 : 4) * int64_t{multiprocessors};
  const int64_t wanted = asked != 0 ? asked : ceil_div(enough, tiles);
  const int64_t heads = ceil_div(group, std::clamp<int64_t>(wanted, 1, group));  // of a split
  return static_cast<int>(ceil_div(group, heads));
}

// The gradient of a bias that is expanded over rows or keys has few tiles, and under a mask unequal
// ones: CTAs share what adds up to a tile, and their sums are small. If it has both, only where
// tiles would not fill the GPU.
int choose_bias_splits(const BwdParams& params, const BwdPlan& plan,
                       const DeviceProperties& device) {
  const BiasGradient& bias = params.dbias;
  if (!bias.data || plan.columns > 0) return 1;  // there splits have no kernel
  const BiasTileSm80 tile = bias_tile_sm80(plan.head_dim);
  const int64_t row_blocks = ceil_div(params.len_q, tile.block_m);
  const int64_t key_blocks = ceil_div(params.len_k, tile.block_n);
  const auto of = [](bool has, int64_t count) { return has ? count : 1; };
  const int64_t tiles = of(bias.has_batch, params.batch) * of(bias.has_heads, params.heads_q) *
                        of(bias.has_rows, row_blocks) * of(bias.has_keys, key_blocks);
  const int64_t shared = of(!bias.has_batch, params.batch) * of(!bias.has_heads, params.heads_q) *
                         of(!bias.has_rows, row_blocks);
  const int64_t enough = (bias.has_rows && bias.has_keys ? 8 : 32) * device.multiprocessors;
  const int64_t most = std::clamp<int64_t>(shared / 4, 1, 256);
  return static_cast<int>(std::clamp<int64_t>(enough / std::max<int64_t>(tiles, 1), 1, most));
}

// Tiles are taken from the first keys on: under a causal mask those have the most rows. And so a
// block of dQ gets its sums in the order of the keys, each from a tile that was taken earlier.
// Equal tiles need no order of heads but that of memory. Unequal ones go through several heads side
// by side: as many as leave their Q, dO and dQ in two thirds of L2; on sm80 all if the tiles are
// few; on sm90, which adds to dQ faster than memory takes it, four to eight
// (notes/sm90_backward.md).
TileOrder order_tiles(const BwdParams& params, const BwdPlan& plan,
                      const DeviceProperties& device) {
  const int64_t columns = params.head_dim + params.head_dim_v;
  const int64_t rows = rows_of_head(params) * ceil_div(params.group_size, plan.head_splits);
  const int64_t head_bytes = std::max<int64_t>(rows, 1) *
                             (columns * bytes_of(params.dtype) + params.head_dim * sizeof(float));
  const int heads = params.heads_kv() * static_cast<int>(entries(params)) * plan.head_splits;
  const bool are_few = int64_t{heads} * plan.n_blocks < 8 * int64_t{device.multiprocessors};
  const int64_t in_l2 = device.l2_bytes / 3 * 2 / head_bytes;
  const int64_t side_by_side = plan.arch == Arch::kSm90 ? std::clamp<int64_t>(in_l2, 4, 8)
                               : are_few                ? heads
                                                        : in_l2;
  // A head of packed sequences is a head of each. At most 16 of those; above head dim 64, where
  // dQ's sums keep L2 busy, at most 4 (notes/packed.md).
  const bool sums_are_many = plan.dq_by == DqBy::kSums && plan.head_dim > 64;
  const int64_t packed_most = (sums_are_many ? 4 : 16) / std::max(params.batch, 1);
  const int64_t packed_side_by_side =
      plan.arch == Arch::kSm90 ? std::min<int64_t>(in_l2, packed_most) : in_l2;
  const int head_group = params.is_full() ? 1
                         : params.is_packed()
                             ? packed_head_group(heads, packed_side_by_side)
                             : static_cast<int>(std::clamp<int64_t>(side_by_side, 1, heads));
  // sm90 goes through the first group last. So that its short tiles fill the gaps at the end, it
  // has 32 heads or more, if L2 has room for them.
  const int most_first = plan.arch == Arch::kSm90 && !params.is_full()
                             ? static_cast<int>(std::clamp<int64_t>(in_l2, 1, 32))
                             : 1;
  const int first = std::clamp(most_first, 1, heads);
  return {.m_blocks = plan.n_blocks,
          .heads = heads,
          .head_group = head_group,
          .first_head_group = first + (heads - first) % head_group,
          .ascending = true,
          .before_last = 0};
}

// Tiles of query rows, as those of a forward: from the last rows to the first, which under a causal
// mask have the fewest keys; unequal ones through as many heads side by side as leave their K and V
// in two thirds of L2.
TileOrder order_dq_tiles(const BwdParams& params, int block_m, const DeviceProperties& device) {
  const int64_t columns = params.head_dim + params.head_dim_v;
  const bool is_padded = params.is_packed() && !params.sequences.cu_seqlens_k;
  const int64_t keys = std::max<int64_t>(params.len_k, 1) * (is_padded ? params.batch : 1);
  const int64_t kv_head_bytes = keys * columns * bytes_of(params.dtype);
  const int m_blocks = count_blocks(params, params.sequences.cu_seqlens_q, params.len_q, block_m);
  check_grid(params.heads_q * entries(params) * m_blocks);
  const int heads = params.heads_q * static_cast<int>(entries(params));
  const int64_t side_by_side = device.l2_bytes / 3 * 2 / kv_head_bytes * params.group_size;
  const int head_group = params.is_full() ? 1
                         : params.is_packed()
                             ? packed_head_group(heads, side_by_side)
                             : static_cast<int>(std::clamp<int64_t>(side_by_side, 1, heads));
  return {.m_blocks = m_blocks,
          .heads = heads,
          .head_group = head_group,
          .first_head_group = (heads - 1) % head_group + 1,
          .ascending = false,
          .before_last = 0};
}

// Where dQ has a kernel of its own.
void set_dq_tiles(BwdPlan& plan, const BwdParams& params, int block_m,
                  const DeviceProperties& device) {
  plan.dq_order = order_dq_tiles(params, block_m, device);
  plan.dq_block_m = block_m;
  plan.dq_blocks = params.is_packed() ? plan.dq_order.m_blocks : 0;
}

BwdWorkspace allocate(Allocator& memory, const BwdPlan& plan, const BwdParams& params) {
  const int64_t blocks_q = entries(params) * params.heads_q * plan.m_blocks;
  const int64_t rows_q = blocks_q * plan.block_m;
  const int64_t rows_k = entries(params) * params.heads_kv() * plan.n_blocks * plan.block_n;
  const bool sums = plan.dq_by == DqBy::kSums;
  const bool in_order = sums && params.deterministic;
  const int64_t split_rows = plan.head_splits > 1 ? plan.head_splits * rows_k : 0;
  BwdWorkspace workspace;
  workspace.stats = memory.take<RowGradStats>(rows_q);
  workspace.dq = memory.take<float>(sums ? rows_q * plan.head_dim : 0);
  workspace.dk = memory.take<float>(split_rows * plan.head_dim);
  workspace.dv = memory.take<float>(split_rows * plan.head_dim_v);
  workspace.dbias =
      memory.take<float>(plan.bias_splits > 1 ? plan.bias_splits * params.dbias.elements : 0);
  const bool is_sm80 = plan.arch == Arch::kSm80;
  workspace.adders = memory.take<DqAdders>(sums && !is_sm80 ? blocks_q : 0);
  workspace.finished = memory.take<int>(sums && !is_sm80 ? DqFinished::kBlocks + blocks_q : 0);
  workspace.tickets = memory.take<int>(in_order || !is_sm80 ? 1 : 0);
  workspace.added = memory.take<int>(in_order && is_sm80 ? blocks_q : 0);
  return workspace;
}

// The blocks of a plan, once its tile is known.
void count_blocks(BwdPlan& plan, const BwdParams& params) {
  plan.m_blocks = count_blocks(params, params.sequences.cu_seqlens_q, params.len_q, plan.block_m);
  plan.n_blocks = count_blocks(params, params.sequences.cu_seqlens_k, params.len_k, plan.block_n);
}

// The rest of a plan, once it is known where dQ comes from.
void finish(BwdPlan& plan, const BwdParams& params, const BwdOverrides& overrides,
            const DeviceProperties& device) {
  const int64_t tiles = entries(params) * params.heads_kv() * plan.n_blocks;
  plan.head_splits = params.is_packed() || plan.columns > 0
                         ? 1
                         : choose_head_splits(params, std::max<int64_t>(tiles, 1),
                                              device.multiprocessors, overrides.head_splits);
  check_grid(tiles * plan.head_splits, "key");
  check_grid(entries(params) * params.heads_q * plan.m_blocks);
  plan.bias_splits = choose_bias_splits(params, plan, device);
  plan.order = order_tiles(params, plan, device);
  const int tiles_of_all = params.is_packed() ? static_cast<int>(tiles) : plan.order.tiles();
  const bool has_cta_each = plan.arch == Arch::kSm80 || plan.dq_by == DqBy::kWindow;
  plan.ctas = has_cta_each ? tiles_of_all : std::min(tiles_of_all, device.multiprocessors);
  Allocator count(nullptr);
  allocate(count, plan, params);
  if (params.is_packed()) {
    count.take_list(plan.n_blocks);
    count.take_list(plan.dq_blocks);
    count.take<SequenceBlock>(plan.m_blocks);
  }
  plan.workspace_bytes = count.bytes();
}

// Calls that have kernels of their own (sm80/bwd/large/): a CTA has a group of columns of one
// gradient. In fp32 those serve what has no other tile, and a bias that is trained.
bool is_large(const BwdParams& params, int head_dim, int tile) {
  return head_dim > kLargeAbove ||
         (params.dtype == DType::kFloat && (tile < 0 || params.dbias.data));
}

void plan_large(BwdPlan& plan, const BwdParams& params, int smem_limit,
                const DeviceProperties& device) {
  plan.tile = select_bwd_sm80_large(plan.head_dim, smem_limit, bytes_of(params.dtype));
  if (plan.tile < 0) refuse_tile(params, smem_limit);
  const LargeBwdConfigSm80& config = large_bwd_tiles_sm80(bytes_of(params.dtype))[plan.tile].config;
  plan.columns = config.columns;
  plan.block_m = config.block_rows;
  plan.block_n = config.kTileRows;
  count_blocks(plan, params);
  plan.dq_by = DqBy::kOwnKernel;
  set_dq_tiles(plan, params, config.kTileRows, device);
  const int64_t groups = ceil_div(plan.head_dim, config.columns);
  check_grid(entries(params) * params.heads_kv() * plan.n_blocks * groups, "key");
  check_grid(plan.dq_order.tiles() * groups);
}

BwdPlan plan_sm80(const BwdParams& params, const BwdOverrides& overrides,
                  const DeviceProperties& device) {
  BwdPlan plan{};
  plan.arch = Arch::kSm80;
  plan.head_dim = plan.head_dim_v = built_head_dim(params);
  const int64_t lent = device.smem_per_cta;
  const int limit =
      static_cast<int>(overrides.smem_limit > 0 ? std::min(overrides.smem_limit, lent) : lent);
  plan.tile = select_bwd_sm80(plan.head_dim, limit, bytes_of(params.dtype));
  if (is_large(params, plan.head_dim, plan.tile)) {
    plan_large(plan, params, limit, device);
    finish(plan, params, overrides, device);
    return plan;
  }
  if (plan.tile < 0) refuse_tile(params, limit);
  const BwdConfigSm80& config = bwd_tiles_sm80(bytes_of(params.dtype))[plan.tile].config;
  plan.block_m = config.block_m;
  plan.block_n = config.block_n;
  count_blocks(plan, params);
  plan.dq_by =
      config.stores_dq() && plan.n_blocks == 1 && !params.is_packed() ? DqBy::kTile : DqBy::kSums;
  finish(plan, params, overrides, device);
  return plan;
}

// Why the sm90 kernels cannot serve the call, or nothing.
std::string why_not_sm90(const BwdParams& p, const BwdOverrides& overrides,
                         const DeviceProperties& device) {
  if (!kSm90IsBuilt) return "this build has no such kernels (FLASH_CUTE_ARCHS has to name 90a)";
  if (p.dtype == DType::kFloat) return "fp32 has kernels of sm80 alone";
  if (device.compute_capability_major != 9) return "the GPU's compute capability is not 9.x";
  if (overrides.smem_limit != 0) return "smem_limit chooses among the tiles of sm80";
  if (p.len_k == 0) return "k has no keys";
  if (std::max(p.head_dim, p.head_dim_v) > kLargeAbove) {
    return "the head dim is above " + std::to_string(kLargeAbove);
  }
  if (p.changes.bias.data &&
      !kBwdTilesSm90[select_bwd_sm90(built_head_dim(p), p.head_dim_v)].bias) {
    return "kernels of sm80 alone read a bias at this head dim";
  }
  const int bytes = bytes_of(p.dtype);
  std::string why_not = why_no_tensor_map("q", p.q, p.batch, p.heads_q, p.len_q, p.head_dim, bytes);
  if (why_not.empty()) {
    why_not = why_no_tensor_map("k", p.k, p.batch, p.heads_kv(), p.len_k, p.head_dim, bytes);
  }
  if (why_not.empty()) {
    why_not = why_no_tensor_map("v", p.v, p.batch, p.heads_kv(), p.len_k, p.head_dim_v, bytes);
  }
  if (why_not.empty()) {
    why_not = why_no_tensor_map("dout", p.dout, p.batch, p.heads_q, p.len_q, p.head_dim_v, bytes);
  }
  return why_not;
}

// Whether a strip of the tile has no column of Q and K, or of V and dO. A box that lies outside of
// a ragged map would touch other memory.
bool lacks_strips(const BwdParams& p, const BwdConfigSm90& tile) {
  const auto lacks = [](int columns, int tile_columns) {
    return columns <= tile_columns - FwdConfigSm90::strip(tile_columns);
  };
  return lacks(p.head_dim, tile.head_dim) || lacks(p.head_dim_v, tile.head_dim_v);
}

// A window of which sm90/bwd/window/ has kernels, and how many blocks a tile has there; or none.
// Rows and keys are numbered alike, and no head of K has two of Q: a CTA would keep dQ of several.
NarrowWindow narrow_window(const BwdParams& params, const BwdEntrySm90& entry,
                           const DeviceProperties& device) {
  constexpr int kBlock = WindowConfigSm90::kBlock;
  const Band& band = params.band;
  const SequenceTable& table = params.sequences;
  const bool are_alike = params.len_q == params.len_k && table.cu_seqlens_q == table.cu_seqlens_k &&
                         !table.seqused_q && !table.seqused_k && !table.key_start;
  if (!entry.has_window(params.mask) || !are_alike || params.group_size > 1) return {};
  if (params.len_k <= entry.keys.block_n() || band.begin > 0 || band.end < 1) return {};
  NarrowWindow window = {static_cast<int>(ceil_div(-int64_t{band.begin}, kBlock)),
                         static_cast<int>(ceil_div(int64_t{band.end} - 1, kBlock)), 0};
  if (int64_t{window.before} + window.behind >= WindowConfigSm90::kSpan) return {};
  // As many tiles as there are multiprocessors, or some times as many: so that the busiest one has
  // the least to do. Around its rows a tile takes as long as three blocks more do.
  constexpr int kAround = 3, kLeast = 4;
  const int64_t heads = entries(params) * params.heads_q;
  const int64_t blocks = ceil_div(params.len_k, kBlock), ctas = device.multiprocessors;
  const int64_t first = ceil_div(heads, ctas);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t waves = first; waves < first + 8; ++waves) {
    const int64_t stretch = std::max<int64_t>(ceil_div(blocks, waves * ctas / heads), kLeast);
    if (waves * (stretch + kAround) >= least) continue;
    least = waves * (stretch + kAround);
    window.stretch = static_cast<int>(stretch);
  }
  return window;
}

BwdPlan plan_sm90(const BwdParams& params, const BwdOverrides& overrides,
                  const DeviceProperties& device, EncodeBwdTensorMaps encode_tensor_maps) {
  BwdPlan plan{};
  plan.arch = Arch::kSm90;
  plan.head_dim = built_head_dim(params);
  plan.why_not_sm90 = why_not_sm90(params, overrides, device);
  if (!plan.why_not_sm90.empty()) return plan;
  plan.tile = select_bwd_sm90(plan.head_dim, params.head_dim_v);
  const BwdEntrySm90& entry = kBwdTilesSm90[plan.tile];
  plan.head_dim_v = entry.keys.head_dim_v;
  if (params.is_packed() && lacks_strips(params, entry.keys)) {
    plan.why_not_sm90 = "packed sequences have to fill the tile's strips of columns, D and Dv";
    return plan;
  }
  plan.block_m = entry.keys.kBlockM;
  plan.block_n = entry.keys.block_n();
  plan.window = narrow_window(params, entry, device);
  if (plan.window.stretch > 0) {
    plan.block_n = plan.window.stretch * WindowConfigSm90::kBlock;
  }
  count_blocks(plan, params);
  // Sums in memory are in any order.
  const bool one_pass = entry.keys.is_one_pass();
  plan.dq_by = plan.window.stretch > 0                                 ? DqBy::kWindow
               : one_pass && plan.n_blocks == 1 && !params.is_packed() ? DqBy::kTile
               : one_pass && !params.deterministic                     ? DqBy::kSums
                                                                       : DqBy::kOwnKernel;
  if (plan.dq_by == DqBy::kOwnKernel) {
    set_dq_tiles(plan, params, entry.rows.block_m(), device);
  }
  finish(plan, params, overrides, device);
  if (encode_tensor_maps) {
    plan.why_not_sm90 = encode_tensor_maps(params, plan, plan.tensor_maps);
  }
  return plan;
}

}  // namespace

BwdOverrides parse_bwd_overrides(const std::string& text) {
  BwdOverrides overrides;
  const auto take = [&](const std::string& name, int64_t value) {
    if (value < 0) {
      refuse(name + " in tuning is " + std::to_string(value) + ": it must be 0 or more");
    }
    if (name == "arch" && value != 0 && value != 80 && value != 90) {
      refuse("arch is " + std::to_string(value) + ": it must be 80, 90, or 0 for the default");
    }
    if (name == "arch") overrides.arch = value;
    if (name == "smem_limit") overrides.smem_limit = value;
    if (name == "head_splits") overrides.head_splits = value;
    return name == "arch" || name == "smem_limit" || name == "head_splits" ||
           name == "splits";  // of its forward
  };
  read_named_numbers(text, "tuning", "one of arch, smem_limit, splits, head_splits", take);
  return overrides;
}

BwdPlan plan_bwd(const BwdParams& params, const BwdOverrides& overrides,
                 const DeviceProperties& device, EncodeBwdTensorMaps encode_tensor_maps) {
  std::string why_not_sm90;
  if (overrides.arch != 80) {
    BwdPlan plan = plan_sm90(params, overrides, device, encode_tensor_maps);
    if (plan.why_not_sm90.empty()) return plan;
    why_not_sm90 = plan.why_not_sm90;
    if (overrides.arch == 90) {
      refuse("arch is 'sm90', but its kernels cannot serve this call: " + why_not_sm90);
    }
  }
  BwdPlan plan = plan_sm80(params, overrides, device);
  plan.why_not_sm90 = why_not_sm90;
  return plan;
}

void place_workspace(const BwdPlan& plan, BwdParams& params, void* memory) {
  params.m_blocks = plan.m_blocks;
  params.n_blocks = plan.n_blocks;
  params.head_splits = plan.head_splits;
  Allocator allocator(memory);
  params.workspace = allocate(allocator, plan, params);
  if (params.is_packed()) {
    params.key_tiles = allocator.take_list(plan.n_blocks);
    params.dq_tiles = allocator.take_list(plan.dq_blocks);
    params.row_blocks = allocator.take<SequenceBlock>(plan.m_blocks);
  }
}

}  // namespace flash_cute
