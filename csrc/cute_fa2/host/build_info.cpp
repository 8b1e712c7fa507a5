#include "host/build_info.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "generated/variants.inc"
#include "host/named_numbers.h"
#include "host/plan_fwd.h"
#include "tiles/fwd_sm80.h"
#include "tiles/fwd_sm90.h"

#ifndef FLASH_CUTE_ARCHS
#error "FLASH_CUTE_ARCHS names the built architectures, separated by spaces"
#endif

namespace flash_cute {
namespace {

void append(std::string& items, const std::string& item) {
  items += items.empty() ? item : ", " + item;
}

std::string in_brackets(const std::string& items) { return "[" + items + "]"; }

class JsonObject {
 public:
  JsonObject& add(const char* name, const std::string& text) {
    return add_json(name, "\"" + text + "\"");
  }
  template <class Number>
    requires std::is_arithmetic_v<Number>
  JsonObject& add(const char* name, Number value) {
    return add_json(name, std::to_string(value));
  }
  JsonObject& add_json(const char* name, const std::string& value) {
    append(fields_, "\"" + std::string(name) + "\": " + value);
    return *this;
  }
  std::string str() const { return "{" + fields_ + "}"; }

 private:
  std::string fields_;
};

constexpr int kBytes = bytes_of(DType::kHalf);  // all dtypes that are built have as many

bool is_built(int head_dim) {
  return std::find(kBuiltHeadDims.begin(), kBuiltHeadDims.end(), head_dim) != kBuiltHeadDims.end();
}

JsonObject as_json(const TileEntrySm80& entry) {
  const FwdConfigSm80& config = entry.config;
  return JsonObject()
      .add("arch", "sm80")
      .add("op", "fwd")
      .add("mask", "any")
      .add("head_dim", config.head_dim)
      .add("head_dim_v", config.head_dim_v)
      .add("block_m", config.block_m)
      .add("block_n", config.block_n)
      .add("warps", config.threads() / 32)
      .add("column_warps", config.column_warps)
      .add("smem_bytes", config.smem_bytes(kBytes))
      .add("stages", config.stages())
      .add("ctas_per_sm", entry.ctas_per_sm)
      .add("max_registers", entry.max_registers());
}

JsonObject as_json(const TileEntrySm90& entry) {
  const FwdConfigSm90& config = entry.config;
  return JsonObject()
      .add("arch", "sm90")
      .add("op", "fwd")
      .add("mask", entry.full && entry.banded ? "any"
                   : entry.full               ? "full"
                   : entry.banded             ? "banded"
                                              : "none")
      .add("head_dim", config.head_dim)
      .add("head_dim_v", config.head_dim_v)
      .add("block_m", config.block_m())
      .add("block_n", config.block_n)
      .add("warps", config.threads() / 32)
      .add("smem_bytes", config.smem_bytes(kBytes))
      .add("stages", config.stages)
      .add("ctas_per_sm", 1)
      .add("max_registers", config.launch_registers())
      .add("split_kv", entry.split_kv)
      .add("q_stages", config.q_stages)
      .add("ping_pong", config.ping_pong)
      .add("producer_registers", config.producer_registers())
      .add("consumer_registers", config.consumer_registers());
}

// What `plan` is asked. fp16 and bf16 get the same plan.
struct Request {
  int64_t batch = 1, heads_q = 1, heads_kv = 1, len_q = 1, len_k = 1, head_dim = 64;
  int64_t head_dim_v = 0;  // as head_dim
  int64_t window_left = -1, window_right = -1;
  int64_t compute_capability = 90, multiprocessors = 132, l2_bytes = 50 << 20;
  int64_t smem_per_cta = 227 << 10;

  explicit Request(const std::string& text) {
    const struct {
      const char* name;
      int64_t& value;
      int64_t least, most;
    } fields[] = {{"batch", batch, 1, INT32_MAX},
                  {"heads_q", heads_q, 1, INT32_MAX},
                  {"heads_kv", heads_kv, 1, INT32_MAX},
                  {"len_q", len_q, 1, kMaxLength},
                  {"len_k", len_k, 0, kMaxLength},
                  {"head_dim", head_dim, 1, kMaxHeadDim},
                  {"head_dim_v", head_dim_v, 0, kMaxHeadDim},
                  {"window_left", window_left, -1, INT64_MAX},
                  {"window_right", window_right, -1, INT64_MAX},
                  {"compute_capability", compute_capability, 80, INT32_MAX},
                  {"multiprocessors", multiprocessors, 1, INT32_MAX},
                  {"l2_bytes", l2_bytes, 1, INT32_MAX},
                  {"smem_per_cta", smem_per_cta, 1, INT32_MAX}};
    std::string names;
    for (const auto& field : fields) append(names, field.name);
    read_named_numbers(text, "the request", "one of " + names,
                       [&](const std::string& name, int64_t value) {
                         for (const auto& field : fields) {
                           if (name == field.name) return field.value = value, true;
                         }
                         return false;
                       });
    for (const auto& [name, value, least, most] : fields) {
      if (value < least || value > most) {
        throw std::runtime_error(std::string("flash_cute: ") + name + " is " +
                                 std::to_string(value) + ": it must be " + std::to_string(least) +
                                 " to " + std::to_string(most));
      }
    }
    if (head_dim_v == 0) head_dim_v = head_dim;
    if (heads_q % heads_kv != 0 || batch * heads_q > INT32_MAX) {
      throw std::runtime_error(
          "flash_cute: heads_q is " + std::to_string(heads_q) +
          ": it must be a multiple of heads_kv, and batch x heads_q below 2^31");
    }
  }
};

// Dense (batch, heads, rows, columns).
template <class Pointer>
TensorView<Pointer> dense_view(int64_t heads, int64_t rows, int64_t columns) {
  return {nullptr, heads * rows * columns, rows * columns, columns};
}

}  // namespace

std::string build_info() {
  std::string archs, head_dims, tiles;
  const std::string names = FLASH_CUTE_ARCHS;
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(' ', begin), names.size());
    append(archs, "\"" + names.substr(begin, end - begin) + "\"");
    begin = end + 1;
  }
  for (int head_dim : kBuiltHeadDims) append(head_dims, std::to_string(head_dim));
  for (const TileEntrySm80& entry : kFwdTilesSm80) {
    if (is_built(entry.config.head_dim)) append(tiles, as_json(entry).str());
  }
  for (const TileEntrySm90& entry : kFwdTilesSm90) {
    if (kSm90IsBuilt && is_built(entry.config.head_dim)) append(tiles, as_json(entry).str());
  }
  return JsonObject()
      .add("cuda_runtime", CUDART_VERSION)
      .add("max_length", kMaxLength)
      .add("max_head_dim", kMaxHeadDim)
      .add_json("archs", in_brackets(archs))
      .add_json("head_dims", in_brackets(head_dims))
      .add("left_out", FLASH_CUTE_LEFT_OUT)
      .add_json("tiles", in_brackets(tiles))
      .str();
}

std::string tiles_for(int64_t smem_per_cta) {
  if (smem_per_cta < 0) {
    throw std::runtime_error("flash_cute: smem_per_cta is " + std::to_string(smem_per_cta) +
                             ": it must be a number of bytes");
  }
  std::string tiles;
  const int limit = static_cast<int>(std::min<int64_t>(smem_per_cta, INT32_MAX));
  for (int head_dim : kBuiltHeadDims) {
    const int index = select_fwd_sm80(head_dim, limit, kBytes);
    if (index >= 0) append(tiles, as_json(kFwdTilesSm80[index]).str());
  }
  return in_brackets(tiles);
}

std::string plan(const std::string& request, const std::string& tuning) {
  const Request r(request);
  const auto whole_chunks = [](int64_t head_dim) {
    return static_cast<int>((head_dim + 7) / 8 * 8);
  };
  FwdParams params{};
  params.head_dim = whole_chunks(r.head_dim);
  params.head_dim_v = whole_chunks(r.head_dim_v);
  params.q = dense_view<const void*>(r.heads_q, r.len_q, params.head_dim);
  params.k = dense_view<const void*>(r.heads_kv, r.len_k, params.head_dim);
  params.v = dense_view<const void*>(r.heads_kv, r.len_k, params.head_dim_v);
  params.out = dense_view<void*>(r.heads_q, r.len_q, params.head_dim_v);
  params.batch = static_cast<int>(r.batch);
  params.heads_q = static_cast<int>(r.heads_q);
  params.group_size = static_cast<int>(r.heads_q / r.heads_kv);
  params.len_q = static_cast<int>(r.len_q);
  params.len_k = static_cast<int>(r.len_k);
  params.dtype = DType::kBFloat16;
  params.mask =
      set_band(params.band, r.len_q, r.len_k, r.window_left, r.window_right, r.len_k - r.len_q);
  params.scale = make_softmax_scale(1 / std::sqrt(static_cast<double>(r.head_dim)));
  const DeviceProperties device = {static_cast<int>(r.compute_capability / 10),
                                   static_cast<int>(r.multiprocessors),
                                   static_cast<int>(r.l2_bytes), static_cast<int>(r.smem_per_cta)};
  return describe(plan_fwd(params, parse_overrides(tuning), device, nullptr), params, device);
}

std::string describe(const FwdPlan& plan, const FwdParams& params, const DeviceProperties& device) {
  const bool is_sm80 = plan.arch == Arch::kSm80;
  JsonObject json = is_sm80 ? as_json(kFwdTilesSm80[plan.tile]) : as_json(kFwdTilesSm90[plan.tile]);
  const int ctas_per_sm = is_sm80 ? kFwdTilesSm80[plan.tile].ctas_per_sm : 1;
  const TileSchedule& schedule = plan.schedule;
  const double at_once = static_cast<double>(ctas_per_sm) * device.multiprocessors;
  // The sm90 kernels for splits serve any mask.
  const char* kernel_mask = !is_sm80 && plan.splits.count > 1 ? "any, split-KV"
                            : params.mask == MaskKind::kFull  ? "full"
                                                              : "banded";
  return json.add("kernel_mask", kernel_mask)
      .add("rows_per_query", plan.gqa.rows_per_query())
      .add("packed_heads", plan.gqa.packed_heads)
      .add("tiles", int64_t{schedule.order.tiles()})
      .add("splits", plan.splits.count)
      .add("split_keys", plan.splits.count > 1 ? plan.splits.keys : params.len_k)
      .add("scheduler", name_of(schedule.policy))
      .add("head_group", schedule.order.head_group)
      .add("tail_tiles", schedule.tail.subtiles > 1 ? schedule.tail.tail_tiles : 0)
      .add("subtiles", schedule.tail.subtiles)
      .add("ctas", schedule.ctas)
      .add("waves", schedule.tail.work_tiles() / at_once)
      .add("workspace_bytes", plan.workspace_bytes)
      .add("why_not_sm90", plan.why_not_sm90)
      .str();
}

}  // namespace flash_cute
