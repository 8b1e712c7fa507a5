#include "host/plan_fwd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>

#include "host/built.h"
#include "host/named_numbers.h"
#include "host/split_kv.h"
#include "host/why_no_tensor_map.h"
#include "host/workspace.h"
#include "tiles/fwd_sm80.h"
#include "tiles/fwd_sm90.h"

namespace flash_cute {
namespace {

// The rest of a plan, once tile, packing and splits are known. `schedule` makes one of a TileGrid.
template <class Schedule>
void finish(FwdPlan& plan, const FwdParams& params, int block_m, const DeviceProperties& device,
            const Schedule& schedule) {
  check_grid(plan.gqa.tiles(params, block_m) * plan.splits.count);
  FwdParams split = params;
  split.splits = plan.splits;
  plan.schedule = schedule(TileGrid{split, plan.gqa, block_m, device.l2_bytes});
  check_grid(plan.schedule.tail.work_tiles());
  plan.workspace_bytes = split_workspace_bytes(split);
  if (plan.splits.count > 1) check_grid(params.rows());  // combine counts in 32 bits
}

// The same of packed sequences, whose lengths the device alone knows. `ctas`: at most so many, if
// they are persistent; else 0.
void finish_packed(FwdPlan& plan, const FwdParams& params, int block_m, int ctas,
                   const DeviceProperties& device) {
  const int queries = block_m >> plan.gqa.log2_rows;  // of a tile
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  const int64_t blocks = is_packed ? int64_t{params.len_q / queries} + params.batch
                                   : ceil_div(params.len_q, queries) * params.batch;
  plan.blocks = static_cast<int>(blocks);
  check_grid(blocks * plan.gqa.heads * plan.splits.count);
  const int tiles = plan.blocks * plan.gqa.heads * plan.splits.count;
  // Their K and V stay in two thirds of L2.
  const int64_t keys = int64_t{params.len_k} * (params.sequences.cu_seqlens_k ? 1 : params.batch);
  const int64_t columns = params.head_dim + params.head_dim_v;
  const int64_t head_bytes = std::max<int64_t>(1, keys * columns * bytes_of(params.dtype));
  const int head_group = plan.gqa.heads_per_kv *
                         packed_head_group(params.heads_kv(), device.l2_bytes / 3 * 2 / head_bytes);
  // A list takes a kernel ahead. It pays where its order does. (Where scores change, kernels would
  // spill without one.)
  const bool has_list = ctas < tiles || plan.splits.count > 1 || params.mask == MaskKind::kScored;
  const SchedulePolicy policy = ctas == 0  ? SchedulePolicy::kList
                                : has_list ? SchedulePolicy::kPersistentList
                                           : SchedulePolicy::kPlaces;
  plan.schedule = {.policy = policy,
                   .block_m = block_m,
                   .order = {.m_blocks = plan.blocks * plan.splits.count,
                             .heads = plan.gqa.heads,
                             .head_group = head_group,
                             .first_head_group = head_group},
                   .tail = TailSplit::none(tiles, block_m),
                   .ctas = ctas == 0 ? tiles : std::min(ctas, tiles)};
  FwdParams split = params;
  split.splits = plan.splits;
  if (plan.splits.count > 1) check_grid(params.rows());  // combine counts in 32 bits
  Allocator count(nullptr);
  if (policy != SchedulePolicy::kPlaces) count.take_list(blocks, plan.splits.count);
  plan.workspace_bytes = count.bytes() + split_workspace_bytes(split);
}

// The call as it would be if all sequences were of the mean length. By that the host decides.
FwdParams of_mean_length(FwdParams params) {
  const auto mean = [&](int rows) { return static_cast<int>(ceil_div(rows, params.batch)); };
  if (params.sequences.cu_seqlens_q) params.len_q = mean(params.len_q);
  if (params.sequences.cu_seqlens_k) params.len_k = mean(params.len_k);
  params.sequences = {};
  return params;
}

// Whether sequences may be longer than the mean that the host decides by.
bool has_longer_ones(const FwdParams& params) {
  return params.sequences.cu_seqlens_k && params.batch > 1;
}

// A tile of packed sequences begins with a whole query.
GqaLayout gqa_layout(const FwdParams& params, int block_m, int64_t max_rows) {
  if (params.is_packed()) max_rows = std::min<int64_t>(max_rows, block_m);
  return GqaLayout::make(params, block_m, max_rows);
}

// Whether the rows of a head fit one consumer of sm90.
bool is_decoding(const GqaLayout& gqa, const FwdParams& params) {
  return gqa.rows(params.len_q) <= FwdConfigSm90::kConsumerRows;
}

// Sequences longer than the mean may have more splits. All results of splits take no more memory
// than those of four tiles for each multiprocessor, as in a dense call. In decoding that leaves
// room.
void split_longer_ones(FwdPlan& plan, const FwdParams& params, int block_m,
                       const DeviceProperties& device) {
  const int count = plan.splits.count;
  if (count == 1 || !has_longer_ones(params) || !is_decoding(plan.gqa, of_mean_length(params))) {
    return;
  }
  const int64_t room =
      int64_t{4} * device.multiprocessors * block_m / std::max<int64_t>(1, params.rows());
  const int64_t most = std::clamp<int64_t>(room, count, SplitKV::kMaxCount);
  plan.splits.count = static_cast<int>(std::min<int64_t>(4 * count, most));
}

// -- sm80 -----------------------------------------------------------------------------------------

FwdPlan plan_sm80(const FwdParams& params, const FwdOverrides& overrides,
                  const DeviceProperties& device) {
  FwdPlan plan{};
  plan.arch = Arch::kSm80;
  plan.head_dim = built_head_dim(params);
  const int64_t lent = device.smem_per_cta;
  const int limit =
      static_cast<int>(overrides.smem_limit > 0 ? std::min(overrides.smem_limit, lent) : lent);
  plan.tile =
      select_fwd_sm80(plan.head_dim, params.head_dim_v, params.mask, limit, bytes_of(params.dtype));
  if (plan.tile < 0) refuse_tile(params, limit);
  const TileEntrySm80& entry = fwd_tiles_sm80(bytes_of(params.dtype))[plan.tile];
  const int block_m = entry.config.block_m;
  plan.block_n = entry.config.block_n;
  const FwdParams usual = params.is_packed() ? of_mean_length(params) : params;
  plan.gqa = gqa_layout(usual, block_m, kMaxLength);
  plan.splits =
      choose_splits(usual, SplitCost::of_sm80(usual, plan.gqa, entry, device.multiprocessors),
                    device.multiprocessors, overrides.splits);
  if (params.is_packed()) {
    if (overrides.splits == 0) split_longer_ones(plan, params, block_m, device);
    finish_packed(plan, params, block_m, /*ctas=*/0, device);
  } else {
    finish(plan, params, block_m, device, one_tile_per_cta);
  }
  return plan;
}

// -- sm90 -----------------------------------------------------------------------------------------

// The same of the large head dims, which have kernels for whole keys of dense calls alone.
std::string why_not_large_sm90(const FwdParams& p, int head_dim, const FwdOverrides& overrides,
                               const DeviceProperties& device) {
  const std::string above = "above head dim " + std::to_string(kLargeAbove) + " ";
  if (p.is_packed()) {
    return above + "packed sequences and changed scores have kernels of sm80 alone";
  }
  if (!has_fwd_sm90(head_dim, p.mask)) {
    return "the head dim is above " + std::to_string(kLargeSm90);
  }
  const bool decides = overrides.arch != 90;
  if (decides && plan_sm80(p, overrides, device).splits.count > 1) {
    return above + "split-KV has kernels of sm80 alone";
  }
  return {};
}

// Whether a call with changed scores gets split-KV, which has kernels of sm80 alone: if these take
// less time than sm90's with whole keys, of which an SM has one tile at a time. The unit is a key
// of a tile of sm90. In decoding that is short, so splits cost more of them. Both have sm80's
// tiles: the numbers were set by packed calls (notes/split_kv.md).
bool splits_scored(const FwdParams& p, const FwdOverrides& overrides,
                   const DeviceProperties& device) {
  const FwdPlan plan = plan_sm80(p, overrides, device);
  if (plan.splits.count == 1 || overrides.splits != 0) return plan.splits.count > 1;
  const FwdParams usual = of_mean_length(p);
  const TileEntrySm80& entry = fwd_tiles_sm80(bytes_of(p.dtype))[plan.tile];
  const int64_t tiles = plan.gqa.tiles(usual, entry.config.block_m);
  const double key = plan.head_dim <= 64 ? 1.1 : 2.6;
  const double cost = is_decoding(plan.gqa, usual) ? 1800 : 1500;
  const double time = key * usual.len_k * tiles / device.multiprocessors + cost;
  return time < usual.len_k * ceil_div(tiles, device.multiprocessors);
}

// Why the sm90 kernels cannot serve the call, or nothing. `head_dim` is the one that was built.
std::string why_not_sm90(const FwdParams& p, int head_dim, const FwdOverrides& overrides,
                         const DeviceProperties& device) {
  if (!kSm90IsBuilt) return "this build has no such kernels (FLASH_CUTE_ARCHS has to name 90a)";
  if (p.dtype == DType::kFloat) return "fp32 has kernels of sm80 alone";
  if (device.compute_capability_major != 9) return "the GPU's compute capability is not 9.x";
  if (overrides.smem_limit != 0) return "smem_limit chooses among the tiles of sm80";
  if (p.len_k == 0) return "k has no keys";
  if (p.changes.bias.data && !reads_bias_sm90(head_dim)) {
    return "kernels of sm80 alone read a bias at this head dim";
  }
  if (p.scale.q_sign != 1.f) return "softmax_scale is not above 0";
  if (head_dim > kLargeAbove) {
    const std::string why_not = why_not_large_sm90(p, head_dim, overrides, device);
    if (!why_not.empty()) return why_not;
  }
  const int bytes = bytes_of(p.dtype);
  std::string why_not = why_no_tensor_map("q", p.q, p.batch, p.heads_q, p.len_q, p.head_dim, bytes);
  if (why_not.empty()) {
    why_not = why_no_tensor_map("k", p.k, p.batch, p.heads_kv(), p.len_k, p.head_dim, bytes);
  }
  if (why_not.empty()) {
    why_not = why_no_tensor_map("v", p.v, p.batch, p.heads_kv(), p.len_k, p.head_dim_v, bytes);
  }
  if (why_not.empty() && p.mask == MaskKind::kScored && overrides.arch != 90 &&
      splits_scored(p, overrides, device)) {
    return "split-KV of changed scores has kernels of sm80 alone";
  }
  return why_not;
}

// The most tile rows that one query may take in the sm90 kernels. A consumer's rows are one TMA
// box, in which an expanded dimension cannot be.
int64_t max_rows_per_query_sm90(const FwdParams& params) {
  return params.q.stride_head != 0 ? FwdConfigSm90::kConsumerRows : 1;
}

// A tile entry with what it makes of the call.
struct ChoiceSm90 {
  int tile = -1;
  GqaLayout gqa;
  TailSplit tail;
};

// Query rows x keys that the busiest SM goes through under a window. All tiles go through as many
// keys, but those whose windows reach beyond the first or the last key: short tiles, which fill
// gaps behind the others. Around its keys a tile takes as long as 200 keys more do
// (notes/sm90_forward.md).
double window_work(const FwdParams& params, const GqaLayout& gqa, const FwdConfigSm90& config,
                   const TailSplit& tail, int multiprocessors) {
  constexpr int kAround = 200;
  const int block_m = config.block_m(), block_n = config.block_n;
  const int64_t begin = params.band.begin, end = params.band.end;
  const int64_t len_q = params.len_q, len_k = params.len_k;
  const int64_t queries = std::max(1, block_m >> gqa.log2_rows);
  // The first tile's blocks, as if there were keys ahead of the first one.
  const int64_t into_block = (begin % block_n + block_n) % block_n;
  const int64_t blocks =
      ceil_div(into_block + std::max<int64_t>(1, end - begin) - 1 + queries, block_n);
  const int64_t keys = std::min(blocks, ceil_div(len_k, block_n)) * block_n;
  const int64_t tiles = gqa.tiles(params, block_m);
  const int64_t time = keys + kAround;  // of a whole tile
  if (tiles < multiprocessors) return tail.time(params, block_m, multiprocessors) * time;

  // Queries that see fewer keys, and how many keys the first and the last tile have.
  const double cut_begin = std::clamp<int64_t>(-begin, 0, len_q);
  const double cut_end = std::clamp<int64_t>(len_q - 1 + end - len_k, 0, len_q);
  const double cut = cut_begin + cut_end;
  const double first = std::clamp<int64_t>(end - 1 + queries, 0, keys);
  const double last = std::clamp<int64_t>(len_k - len_q - begin + queries, 0, keys);
  const double least = cut > 0 ? (cut_begin * first + cut_end * last) / cut : keys;
  const double shortest = (least + kAround) / time;  // of a whole tile's time
  const double short_tiles = tiles * std::min(1.0, cut / len_q), whole_tiles = tiles - short_tiles;

  double rounds = std::ceil(whole_tiles / multiprocessors);
  const int64_t whole_rounds = std::max(1.0, rounds);
  const double work = whole_tiles + short_tiles * (1 + shortest) / 2;
  const double left = work / multiprocessors - rounds;
  if (left > 0) rounds += rounds > 1 ? std::max(0.5, left) : left;  // some short ones fit no gap
  // Of the longest round x multiprocessors + 1 tiles some SM has round + 1. Few rounds show it.
  for (int64_t round = whole_rounds; round < whole_rounds + 4; ++round) {
    const double behind = round * multiprocessors - whole_tiles;
    if (behind >= short_tiles) break;
    rounds = std::max(rounds, (round + 1) * (1 - (1 - shortest) * behind / short_tiles));
  }
  return rounds * block_m * time;
}

// The entry that takes an SM the least time: row_cost x query rows x keys in whole blocks. So long
// sequences get large tiles. Few queries get small ones, which more SMs share; and so do narrow
// windows, of which the rows of a large tile leave much of its keys out.
ChoiceSm90 choose_tile_sm90(const FwdParams& params, int head_dim, int multiprocessors) {
  ChoiceSm90 best;
  double least = std::numeric_limits<double>::infinity();
  // Changed scores have other costs, which were not timed under windows.
  const bool by_window = params.is_window() && params.mask != MaskKind::kScored;
  // The larger tile comes first. Another has to save more than a window's estimate may be off.
  const double margin = by_window ? 0.985 : 1.0;
  for (size_t i = 0; i < std::size(kFwdTilesSm90); ++i) {
    const TileEntrySm90& entry = kFwdTilesSm90[i];
    if (entry.config.head_dim != head_dim || entry.config.head_dim_v < params.head_dim_v) continue;
    if (!entry.serves(params.mask) || (params.changes.bias.data && !entry.bias)) continue;
    const int block_m = entry.config.block_m(), block_n = entry.config.block_n;
    const GqaLayout gqa = gqa_layout(params, block_m, max_rows_per_query_sm90(params));
    const TailSplit tail =
        TailSplit::make(params, block_m, gqa.tiles(params, block_m), multiprocessors);
    const double work = by_window ? window_work(params, gqa, entry.config, tail, multiprocessors)
                                  : tail.time(params, block_m, multiprocessors) *
                                        ceil_div(params.len_k, block_n) * block_n;
    const double time = entry.row_cost * work;
    if (time < margin * least) {
      least = time;
      best = {static_cast<int>(i), gqa, tail};
    }
  }
  return best;
}

constexpr bool every_head_dim_has_tiles_sm90() {
  for (int built : kBuiltHeadDims) {
    if (select_split_kv_sm90(built) < 0) return false;
    bool full = false, banded = false, packed = false;
    for (const TileEntrySm90& entry : kFwdTilesSm90) {
      if (entry.config.head_dim != built || entry.config.head_dim_v != built) continue;
      full |= entry.full;
      banded |= entry.banded;
      packed |= entry.packed;
    }
    if (!full || !banded || !packed) return false;
  }
  return true;
}
static_assert(every_head_dim_has_tiles_sm90());

FwdPlan plan_sm90(const FwdParams& params, const FwdOverrides& overrides,
                  const DeviceProperties& device, EncodeTensorMaps encode_tensor_maps) {
  FwdPlan plan{};
  plan.arch = Arch::kSm90;
  plan.head_dim = built_head_dim(params);
  plan.why_not_sm90 = why_not_sm90(params, plan.head_dim, overrides, device);
  if (!plan.why_not_sm90.empty()) return plan;

  const FwdParams usual = params.is_packed() ? of_mean_length(params) : params;
  // Packed sequences (notes/split_kv.md). Splits need a list of tiles, which costs that much, as
  // SplitCost counts. Whole keys of the longest sequence take that many times as long as the
  // mean's.
  constexpr double kList = 500, kLongest = 1.25;
  const ChoiceSm90 unsplit = choose_tile_sm90(usual, plan.head_dim, device.multiprocessors);
  plan.tile = select_split_kv_sm90(plan.head_dim);
  if (plan.tile >= 0 && params.mask != MaskKind::kScored) {
    plan.gqa = gqa_layout(usual, kFwdTilesSm90[plan.tile].config.block_m(),
                          max_rows_per_query_sm90(params));
    SplitCost cost =
        SplitCost::of_sm90(usual, plan.gqa, kFwdTilesSm90[plan.tile], kFwdTilesSm90[unsplit.tile],
                           unsplit.tail, device.multiprocessors);
    if (params.is_packed()) cost.combine += kList;
    if (has_longer_ones(params)) {
      const int64_t tiles = unsplit.gqa.tiles(usual, kFwdTilesSm90[unsplit.tile].config.block_m());
      const int64_t rounds = std::max<int64_t>(1, ceil_div(tiles, device.multiprocessors));
      cost.rounds_unsplit *= std::max(1.0, kLongest / rounds);
    }
    plan.splits = choose_splits(usual, cost, device.multiprocessors, overrides.splits);
  }
  if (plan.splits.count == 1) {
    plan.tile = unsplit.tile;
    plan.gqa = unsplit.gqa;
  }
  plan.block_n = kFwdTilesSm90[plan.tile].config.block_n;
  if (params.is_packed()) {
    const int block_m = kFwdTilesSm90[plan.tile].config.block_m();
    if (overrides.splits == 0) split_longer_ones(plan, params, block_m, device);
    finish_packed(plan, params, block_m, device.multiprocessors, device);
    if (encode_tensor_maps) {
      plan.why_not_sm90 = encode_tensor_maps(params, plan, plan.tensor_maps);
    }
    return plan;
  }
  finish(plan, params, kFwdTilesSm90[plan.tile].config.block_m(), device,
         [&](const TileGrid& grid) {
           // Split keys have tiles for all SMs, and no tile is split.
           const TailSplit tail =
               plan.splits.count == 1 ? unsplit.tail : TailSplit::none(grid.tiles(), grid.block_m);
           return persistent_schedule(grid, tail, device.multiprocessors);
         });
  if (encode_tensor_maps) {
    plan.why_not_sm90 = encode_tensor_maps(params, plan, plan.tensor_maps);
  }
  return plan;
}

}  // namespace

FwdOverrides parse_overrides(const std::string& text) {
  FwdOverrides overrides;
  const auto take = [&](const std::string& name, int64_t value) {
    if (value < 0) {
      refuse(name + " in tuning is " + std::to_string(value) + ": it must be 0 or more");
    }
    if (name == "arch" && value != 0 && value != 80 && value != 90) {
      refuse("arch is " + std::to_string(value) + ": it must be 80, 90, or 0 for the default");
    }
    if (name == "arch") {
      overrides.arch = value;
    } else if (name == "smem_limit") {
      overrides.smem_limit = value;
    } else if (name == "splits") {
      overrides.splits = value;
    } else {
      return name == "head_splits";  // of its backward
    }
    return true;
  };
  read_named_numbers(text, "tuning", "arch, smem_limit, splits or head_splits", take);
  return overrides;
}

FwdPlan plan_fwd(const FwdParams& params, const FwdOverrides& overrides,
                 const DeviceProperties& device, EncodeTensorMaps encode_tensor_maps) {
  std::string why_not_sm90;
  if (overrides.arch != 80) {
    FwdPlan plan = plan_sm90(params, overrides, device, encode_tensor_maps);
    if (plan.why_not_sm90.empty()) return plan;
    why_not_sm90 = plan.why_not_sm90;
    if (overrides.arch == 90) {
      refuse("arch is 'sm90', but its kernels cannot serve this call: " + why_not_sm90);
    }
  }
  FwdPlan plan = plan_sm80(params, overrides, device);
  plan.why_not_sm90 = why_not_sm90;
  return plan;
}

void place_workspace(const FwdPlan& plan, FwdParams& params, void* memory) {
  params.splits = plan.splits;
  Allocator allocator(memory);
  if (plan.schedule.policy == SchedulePolicy::kPlaces) {
    params.tiles.bound = plan.blocks;
  } else if (params.is_packed()) {
    params.tiles = allocator.take_list(plan.blocks, plan.splits.count);
  }
  if (plan.splits.count > 1) {
    place_splits(params.splits, params, static_cast<char*>(memory) + allocator.bytes());
  }
}

}  // namespace flash_cute
