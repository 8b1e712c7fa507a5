// The forward as Python calls it (emulator.py has the same structs), and what the host code tells
// of plans and schedules.
#include "call.h"
#include "host/build_info.h"
#include "host/launch_fwd.h"
#include "host/plan_fwd.h"
#include "host/tile_schedule.h"
#include "planted.h"
#include "sm80/tile_scheduler.h"
#include "sm90/tensor_map.h"
#include "sm90/tile_scheduler.h"
#include "tma.h"

using namespace flash_cute;
using emulator::GlobalMemory;

extern "C" {

struct CForward : emulator::CCall {
  int32_t refuses_tensor_maps;
};

// The plan of a call, as JSON (host/build_info.h); a sentence if there is none.
__attribute__((visibility("default"))) const char* describe_plan(const char* request,
                                                                 const char* tuning) {
  static std::string description;
  try {
    description = plan(request, tuning);
  } catch (const std::exception& refusal) {
    description = refusal.what();
  }
  return description.c_str();
}

// Switches a planted fault on, or with 0 off.
__attribute__((visibility("default"))) void plant(int fault) { planted = fault; }

// Which CTAs get which tiles, of `block_m` rows. Writes each CTA's work tiles in turn to `tiles`,
// as (CTA, first row, end of the rows, head, batch). Returns how many.
__attribute__((visibility("default"))) int64_t schedule(int arch, int batch, int heads,
                                                        int heads_kv, int len_q, int len_k,
                                                        int head_dim, int window_left,
                                                        int window_right, int block_m,
                                                        int multiprocessors, int l2_bytes,
                                                        int32_t* tiles) {
  FwdParams params{};
  params.batch = batch;
  params.heads_q = heads;
  params.group_size = heads / heads_kv;
  params.len_q = len_q;
  params.len_k = len_k;
  params.head_dim = params.head_dim_v = head_dim;
  params.mask = set_band(params.band, len_q, len_k, window_left, window_right, len_k - len_q);
  const GqaLayout gqa = GqaLayout::make(params, block_m, kMaxLength);
  const PackGqa pack_gqa(gqa);
  const TileGrid grid = {params, gqa, block_m, l2_bytes};
  int64_t count = 0;
  const int row_count = gqa.rows(len_q);
  auto add = [&](int cta, int row0, int row_end, int head, int batch) {
    if (row0 >= std::min(row_end, row_count)) return;
    for (int number : {cta, row0, std::min(row_end, row_count), head, batch}) *tiles++ = number;
    ++count;
  };
  if (arch == 80) {
    const TileSchedule plan = one_tile_per_cta(grid);
    const sm80::SingleTileScheduler scheduler(plan, pack_gqa, batch);
    for (int cta = 0; cta < plan.ctas; ++cta) {
      const TileCoord tile = scheduler.tile(cta);
      const int row0 = tile.m_block * block_m;
      add(cta, row0, row0 + block_m, tile.head, tile.batch);
    }
  } else {
    const TailSplit tail = TailSplit::make(params, block_m, grid.tiles(), multiprocessors);
    const TileSchedule plan = persistent_schedule(grid, tail, multiprocessors);
    const sm90::PersistentTileScheduler scheduler(plan, pack_gqa, batch);
    for (int cta = 0; cta < plan.ctas; ++cta) {
      sm90::PersistentTileScheduler::Iterator of_cta(cta);
      for (int i; (i = of_cta.next(scheduler)) < scheduler.count();) {
        const sm90::WorkTile tile = scheduler.tile(i);
        add(cta, tile.row0, tile.row_end, tile.head, tile.batch);
      }
    }
  }
  return count;
}

// Returns 0, or 1 with a sentence in `error`. Counters are added to.
__attribute__((visibility("default"))) int emulate_forward(const CForward* call,
                                                           emulator::Counters* counters,
                                                           char* error, size_t error_bytes) {
  FwdParams params{};
  emulator::Session session = emulator::begin_call(*call, params);
  params.out = call->out.view<void>();
  params.lse = call->lse.view<float>();
  add(session, "out", GlobalMemory::Use::kOutput, call->out);
  add(session, "lse", GlobalMemory::Use::kOutput, call->lse);
  emulator::Workspace workspace;
  emulator::refuses_tensor_maps = call->refuses_tensor_maps;
  auto launch = [&] {
    const FwdPlan plan = plan_fwd(params, parse_overrides(call->tuning),
                                  properties_of(emulator::kDevice), sm90::encode_fwd_maps);
    workspace.allocate(plan.workspace_bytes);
    if (params.is_packed()) {
      FwdParams placed = params;
      place_workspace(plan, placed, workspace.data());
      emulator::Workspace::add(session, placed.tiles, plan.splits.count);
      if (plan.splits.count > 1) {
        using Use = emulator::GlobalMemory::Use;
        const SplitKV& splits = placed.splits;
        const int64_t rows = splits.count * params.rows();
        workspace.add(session, "workspace.out", splits.out.data,
                      rows * params.head_dim_v * sizeof(float), Use::kPartly);
        workspace.add(session, "workspace.stats", splits.stats.data, rows * sizeof(RowStats),
                      Use::kCleared);
      }
    } else {
      workspace.add(session, "workspace", workspace.data(), plan.workspace_bytes);
    }
    launch_fwd(plan, params, workspace.data(), emulator::kDevice, nullptr);
  };
  return emulator::run_session(session, launch, counters, error, error_bytes);
}
}
