// The backward as Python calls it (emulator.py has the same struct).
#include "call.h"
#include "host/launch_bwd.h"
#include "host/plan_bwd.h"
#include "sm90/tensor_map.h"

using namespace flash_cute;
using emulator::CTensor;
using emulator::GlobalMemory;

namespace {

// Each part on its own: between them there may be padding.
void add(emulator::Session& session, const BwdParams& params, const BwdPlan& plan) {
  const BwdWorkspace& workspace = params.workspace;
  const int64_t entries = params.is_packed() ? 1 : params.batch;
  const int64_t blocks_q = entries * params.heads_q * plan.m_blocks;
  const int64_t rows_q = blocks_q * plan.block_m;
  const int64_t rows_k =
      plan.head_splits * entries * params.heads_kv() * plan.n_blocks * plan.block_n;
  // Of packed sequences some places stay empty.
  const auto in_order =
      params.is_packed() ? GlobalMemory::Use::kPartly : GlobalMemory::Use::kWorkspace;
  const auto in_any = workspace.adders ? GlobalMemory::Use::kSums : in_order;
  auto add_part = [&](const char* name, const auto* data, int64_t count, auto use) {
    if (data) emulator::Workspace::add(session, name, data, count * int64_t{sizeof *data}, use);
  };
  add_part("workspace.stats", workspace.stats, rows_q, in_order);
  add_part("workspace.dq", workspace.dq, rows_q * plan.head_dim, in_any);
  add_part("workspace.dk", workspace.dk, rows_k * plan.head_dim, in_order);
  add_part("workspace.dv", workspace.dv, rows_k * plan.head_dim_v, in_order);
  add_part("workspace.dbias", workspace.dbias, plan.bias_splits * params.dbias.elements,
           GlobalMemory::Use::kWorkspace);
  add_part("workspace.adders", workspace.adders, blocks_q, in_any);
  add_part("workspace.finished", workspace.finished, DqFinished::kBlocks + blocks_q, in_order);
  add_part("workspace.tickets", workspace.tickets, 1, in_order);
  add_part("workspace.added", workspace.added, blocks_q, in_order);
  add_part("workspace.row_blocks", params.row_blocks, plan.m_blocks, GlobalMemory::Use::kWorkspace);
  emulator::Workspace::add(session, params.key_tiles);
  emulator::Workspace::add(session, params.dq_tiles);
}

}  // namespace

extern "C" {

struct CBackward : emulator::CCall {
  CTensor dout, dlse;                // dlse.data may be null
  CTensor dq, dk, dv, dsink, dbias;  // the last two's data may be null
  int32_t deterministic;
};

// As emulate_forward.
__attribute__((visibility("default"))) int emulate_backward(const CBackward* call,
                                                            emulator::Counters* counters,
                                                            char* error, size_t error_bytes) {
  BwdParams params{};
  emulator::Session session = emulator::begin_call(*call, params);
  params.dout = call->dout.view<const void>();
  params.out = call->out.view<const void>();
  params.lse = call->lse.view<const float>();
  params.dlse = call->dlse.view<const float>();
  params.dq = call->dq.view<void>();
  params.dk = call->dk.view<void>();
  params.dv = call->dv.view<void>();
  params.dsink = static_cast<float*>(const_cast<void*>(call->dsink.data));
  params.deterministic = call->deterministic;
  if (const CTensor& dbias = call->dbias; dbias.data) {
    const int64_t whole[4] = {params.batch, params.heads_q, params.len_q, params.len_k};
    const auto has = [&](int dim) { return dbias.sizes[dim] == whole[dim]; };
    const bool has_keys = has(3);
    params.dbias = {
        dbias.data, dbias.strides[0], dbias.strides[1], dbias.strides[2],         has_keys, has(0),
        has(1),     has(2),           has_keys,         dbias.element_bytes == 4, 1};
    for (const int64_t size : dbias.sizes) params.dbias.elements *= size;
    add(session, "dbias", GlobalMemory::Use::kOutput, dbias);
  }
  add(session, "dout", GlobalMemory::Use::kInput, call->dout);
  add(session, "out", GlobalMemory::Use::kInput, call->out);
  add(session, "lse", GlobalMemory::Use::kInput, call->lse);
  if (call->dlse.data) add(session, "dlse", GlobalMemory::Use::kInput, call->dlse);
  add(session, "dq", GlobalMemory::Use::kOutput, call->dq);
  add(session, "dk", GlobalMemory::Use::kOutput, call->dk);
  add(session, "dv", GlobalMemory::Use::kOutput, call->dv);
  if (call->dsink.data) add(session, "dsink", GlobalMemory::Use::kOutput, call->dsink);
  emulator::Workspace workspace;
  auto launch = [&] {
    const BwdPlan plan = plan_bwd(params, parse_bwd_overrides(call->tuning),
                                  properties_of(emulator::kDevice), sm90::encode_bwd_maps);
    workspace.allocate(plan.workspace_bytes);
    BwdParams placed = params;
    place_workspace(plan, placed, workspace.data());
    add(session, placed, plan);
    launch_bwd(plan, params, workspace.data(), emulator::kDevice, nullptr);
  };
  return emulator::run_session(session, launch, counters, error, error_bytes);
}
}
