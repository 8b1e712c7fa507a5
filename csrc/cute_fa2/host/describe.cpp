#include "host/describe.h"

#include <algorithm>

namespace flash_cute {

JsonObject as_json(const TileEntrySm80& entry, DType dtype) {
  const FwdConfigSm80& config = entry.config;
  return JsonObject()
      .add("arch", "sm80")
      .add("op", dtype == DType::kFloat ? "fwd_fp32" : "fwd")
      .add("mask", "any")
      .add("head_dim", config.head_dim)
      .add("head_dim_v", config.head_dim_v)
      .add("block_m", config.block_m)
      .add("block_n", config.block_n)
      .add("warps", config.threads() / 32)
      .add("column_warps", config.column_warps)
      .add("q_in_registers", config.q_in_registers)
      .add("k_columns", config.k_columns)
      .add("v_keys", config.v_keys)
      .add("v_columns", config.v_columns)
      .add("smem_bytes", config.smem_bytes(bytes_of(dtype)))
      .add("stages", config.stages())
      .add("ctas_per_sm", entry.ctas_per_sm)
      .add("max_registers", entry.max_registers())
      .add("dense_only", entry.dense_only);
}

JsonObject as_json(const TileEntrySm90& entry, DType dtype) {
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
      .add("smem_bytes", config.smem_bytes(bytes_of(dtype)))
      .add("stages", config.stages)
      .add("ctas_per_sm", 1)
      .add("max_registers", config.launch_registers())
      .add("split_kv", entry.split_kv)
      .add("packed", entry.packed)
      .add("bias", entry.bias)
      .add("q_stages", config.q_stages)
      .add("ping_pong", config.ping_pong)
      .add("column_groups", config.column_groups)
      .add("producer_registers", config.producer_registers())
      .add("scores_registers", config.is_large() ? config.scores_registers() : 0)
      .add("consumer_registers", config.consumer_registers());
}

JsonObject as_json(const BwdEntrySm80& entry, DType dtype) {
  const BwdConfigSm80& config = entry.config;
  return JsonObject()
      .add("arch", "sm80")
      .add("op", dtype == DType::kFloat ? "bwd_fp32" : "bwd")
      .add("mask", "any")
      .add("head_dim", config.head_dim)
      .add("head_dim_v", config.head_dim_v)
      .add("block_m", config.block_m)
      .add("block_n", config.block_n)
      .add("warps", config.threads() / 32)
      .add("smem_bytes", config.smem_bytes(bytes_of(dtype)))
      .add("stages", config.stages)
      .add("ctas_per_sm", entry.ctas_per_sm)
      .add("max_registers", entry.max_registers());
}

JsonObject as_json(const LargeBwdEntrySm80& entry, DType dtype) {
  const LargeBwdConfigSm80& config = entry.config;
  return JsonObject()
      .add("arch", "sm80")
      .add("op", dtype == DType::kFloat ? "bwd_fp32" : "bwd")
      .add("mask", "any")
      .add("head_dim", entry.head_dim)
      .add("head_dim_v", entry.head_dim)
      .add("block_m", config.block_rows)
      .add("block_n", config.kTileRows)
      .add("columns", config.columns)
      .add("chunk_columns", config.chunk_columns)
      .add("chunk_rows", config.chunk_rows)
      .add("warps", config.kThreads / 32)
      .add("smem_bytes", config.smem_bytes(bytes_of(dtype)))
      .add("stages", config.stages)
      .add("ctas_per_sm", 1)
      .add("max_registers", entry.max_registers());
}

JsonObject as_json(const BwdConfigSm90& config, DType dtype) {
  return JsonObject()
      .add("arch", "sm90")
      .add("op", "bwd")
      .add("mask", "any")
      .add("head_dim", config.head_dim)
      .add("head_dim_v", config.head_dim_v)
      .add("block_m", config.kBlockM)
      .add("block_n", config.block_n())
      .add("warps", config.roles().threads() / 32)
      .add("smem_bytes", config.smem_bytes(bytes_of(dtype)))
      .add("stages", config.stages)
      .add("ctas_per_sm", 1)
      .add("max_registers", config.roles().launch_registers())
      .add("producer_registers", config.roles().producer_registers())
      .add("consumer_registers", config.roles().consumer_registers());
}

JsonObject as_json(const DqConfigSm90& config, DType dtype) {
  return JsonObject()
      .add("arch", "sm90")
      .add("op", "dq")
      .add("mask", "any")
      .add("head_dim", config.head_dim)
      .add("head_dim_v", config.head_dim_v)
      .add("block_m", config.block_m())
      .add("block_n", config.block_n)
      .add("warps", config.roles().threads() / 32)
      .add("smem_bytes", config.smem_bytes(bytes_of(dtype)))
      .add("stages", std::min(config.k_stages, config.v_stages))
      .add("k_stages", config.k_stages)
      .add("v_stages", config.v_stages)
      .add("ctas_per_sm", 1)
      .add("max_registers", config.roles().launch_registers())
      .add("producer_registers", config.roles().producer_registers())
      .add("consumer_registers", config.roles().consumer_registers());
}

JsonObject as_json(const WindowConfigSm90& config, DType dtype) {
  return JsonObject()
      .add("arch", "sm90")
      .add("op", "window")
      .add("mask", "any")
      .add("head_dim", config.head_dim)
      .add("head_dim_v", config.head_dim)
      .add("block_m", config.kBlock)
      .add("block_n", config.kBlock)
      .add("warps", config.roles().threads() / 32)
      .add("smem_bytes", config.smem_bytes(bytes_of(dtype)))
      .add("stages", config.kStages)
      .add("k_stages", config.kKStages)
      .add("ctas_per_sm", 1)
      .add("max_registers", config.roles().launch_registers())
      .add("producer_registers", config.roles().producer_registers())
      .add("consumer_registers", config.roles().consumer_registers());
}

const char* name_of(DqBy dq_by) {
  switch (dq_by) {
    case DqBy::kTile:
      return "tile";
    case DqBy::kSums:
      return "sums";
    case DqBy::kOwnKernel:
      return "own kernel";
    case DqBy::kWindow:
      return "window";
  }
  __builtin_unreachable();
}

std::string describe(const FwdPlan& plan, const FwdParams& params, const DeviceProperties& device) {
  const bool is_sm80 = plan.arch == Arch::kSm80;
  const auto tiles_sm80 = fwd_tiles_sm80(bytes_of(params.dtype));
  JsonObject json = is_sm80 ? as_json(tiles_sm80[plan.tile], params.dtype)
                            : as_json(kFwdTilesSm90[plan.tile], params.dtype);
  const int ctas_per_sm = is_sm80 ? tiles_sm80[plan.tile].ctas_per_sm : 1;
  const TileSchedule& schedule = plan.schedule;
  const double at_once = static_cast<double>(ctas_per_sm) * device.multiprocessors;
  // sm90's kernels for splits of dense calls serve any mask, those of packed ones likewise.
  const char* kernel_mask = !is_sm80 && plan.splits.count > 1 ? "any, split-KV"
                            : params.is_full()                ? "full"
                            : params.is_packed()              ? "packed"
                                                              : "banded";
  return json.add("kernel_mask", kernel_mask)
      .add("rows_per_query", plan.gqa.rows_per_query())
      .add("packed_heads", plan.gqa.packed_heads)
      .add("tiles", int64_t{schedule.order.tiles()})
      .add("splits", plan.splits.count)
      .add("split_keys", plan.splits.count > 1 ? plan.splits.keys : params.len_k)
      .add("scheduler", name_of(schedule.policy))
      .add("head_group", schedule.order.head_group)
      .add("tail_tiles", schedule.tail.tail_tiles)
      .add("subtiles", schedule.tail.subtiles)
      .add("ctas", schedule.ctas)
      .add("waves", schedule.tail.work_tiles() / at_once)
      .add("workspace_bytes", plan.workspace_bytes)
      .add("why_not_sm90", plan.why_not_sm90)
      .str();
}

std::string describe(const BwdPlan& plan, const BwdParams& params, const DeviceProperties& device) {
  const bool is_sm80 = plan.arch == Arch::kSm80;
  const bool is_large = plan.columns > 0;
  const auto large_tiles = large_bwd_tiles_sm80(bytes_of(params.dtype));
  const auto tiles_sm80 = bwd_tiles_sm80(bytes_of(params.dtype));
  const bool is_window = plan.dq_by == DqBy::kWindow;
  JsonObject json = is_large    ? as_json(large_tiles[plan.tile], params.dtype)
                    : is_sm80   ? as_json(tiles_sm80[plan.tile], params.dtype)
                    : is_window ? as_json(kBwdTilesSm90[plan.tile].window(), params.dtype)
                                : as_json(kBwdTilesSm90[plan.tile].keys, params.dtype);
  const int ctas_per_sm = is_sm80 && !is_large ? tiles_sm80[plan.tile].ctas_per_sm : 1;
  const double at_once = static_cast<double>(ctas_per_sm) * device.multiprocessors;
  const int tiles = plan.order.tiles();
  return json
      .add("kernel_mask", params.is_full()     ? "full"
                          : params.is_packed() ? "packed"
                                               : "banded")
      .add("m_blocks", plan.m_blocks)
      .add("n_blocks", plan.n_blocks)
      .add("stretch", plan.window.stretch)
      .add("dq_by", name_of(plan.dq_by))
      .add("head_splits", plan.head_splits)
      .add("head_group", plan.order.head_group)
      .add("ctas", plan.ctas)
      .add("waves", tiles / at_once)
      .add("workspace_bytes", plan.workspace_bytes)
      .add("why_not_sm90", plan.why_not_sm90)
      .str();
}

}  // namespace flash_cute
