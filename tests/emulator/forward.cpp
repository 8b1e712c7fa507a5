// The forward as Python calls it (emulator.py has the same structs): the project's own host code,
// on an emulated device.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "host/build_info.h"
#include "host/device.h"
#include "host/launch_fwd.h"
#include "host/plan_fwd.h"
#include "host/tile_schedule.h"
#include "launch.h"
#include "planted.h"
#include "sm80/tile_scheduler.h"
#include "sm90/tensor_map.h"
#include "sm90/tile_scheduler.h"
#include "tma.h"

using namespace flash_cute;
using emulator::GlobalMemory;

extern "C" {

// A (batch, heads, rows, columns) tensor; strides in elements, columns contiguous.
struct CTensor {
  void* data;
  int64_t sizes[4];
  int64_t strides[3];
};

struct CForward {
  CTensor q, k, v, out;
  float* lse;  // (batch, heads, rows), contiguous
  int32_t is_half;
  int32_t workers;
  double softmax_scale;
  int64_t window_left, window_right, diagonal_offset;
  const char* tuning;       // as the op takes it
  int32_t multiprocessors;  // of the device
  int32_t refuses_tensor_maps;
  uint64_t seed;
};

// The call that goes on.
static const CForward* current_call = nullptr;
// Nothing is remembered of it: another call may have another device.
constexpr int kDevice = kMaxDevices;

// What the host code asks of CUDA. L2 is so small that a few short heads make several head groups.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor         ? 9
           : attribute == cudaDevAttrMultiProcessorCount          ? current_call->multiprocessors
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 * 1024
           : attribute == cudaDevAttrL2CacheSize                  ? 128 << 10
                                                                  : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const auto get_current = +[](CUcontext* context) {
    *context = nullptr;
    return CUDA_SUCCESS;
  };
  *function = !std::strcmp(name, "cuTensorMapEncodeTiled") ? emulator::encode_tensor_map()
              : !std::strcmp(name, "cuCtxGetCurrent")      ? reinterpret_cast<void*>(get_current)
                                                           : nullptr;
  *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = kDevice;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "none"; }

// JSON: what was built, and the tile table.
__attribute__((visibility("default"))) const char* describe_build() {
  static const std::string description = build_info();
  return description.c_str();
}

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
      for (int i; scheduler.has(i = of_cta.next(scheduler));) {
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
  params.q = {call->q.data, call->q.strides[0], call->q.strides[1], call->q.strides[2]};
  params.k = {call->k.data, call->k.strides[0], call->k.strides[1], call->k.strides[2]};
  params.v = {call->v.data, call->v.strides[0], call->v.strides[1], call->v.strides[2]};
  params.out = {call->out.data, call->out.strides[0], call->out.strides[1], call->out.strides[2]};
  params.lse = {call->lse, call->q.sizes[1] * call->q.sizes[2], call->q.sizes[2], 1};
  params.batch = static_cast<int>(call->q.sizes[0]);
  params.heads_q = static_cast<int>(call->q.sizes[1]);
  params.group_size = static_cast<int>(call->q.sizes[1] / call->k.sizes[1]);
  params.len_q = static_cast<int>(call->q.sizes[2]);
  params.len_k = static_cast<int>(call->k.sizes[2]);
  params.head_dim = static_cast<int>(call->q.sizes[3]);
  params.head_dim_v = static_cast<int>(call->v.sizes[3]);
  params.dtype = call->is_half ? DType::kHalf : DType::kBFloat16;
  params.scale = make_softmax_scale(call->softmax_scale);
  params.mask = set_band(params.band, params.len_q, params.len_k, call->window_left,
                         call->window_right, call->diagonal_offset);

  emulator::Session session{.seed = call->seed, .workers = call->workers};
  auto add = [&](const char* name, GlobalMemory::Use use, const CTensor& t) {
    constexpr int64_t kBytes = 2;
    session.global.add({name,
                        use,
                        t.data,
                        {t.sizes[0], t.sizes[1], t.sizes[2]},
                        {t.strides[0] * kBytes, t.strides[1] * kBytes, t.strides[2] * kBytes},
                        t.sizes[3] * kBytes});
  };
  add("q", GlobalMemory::Use::kInput, call->q);
  add("k", GlobalMemory::Use::kInput, call->k);
  add("v", GlobalMemory::Use::kInput, call->v);
  add("out", GlobalMemory::Use::kOutput, call->out);
  const int64_t rows = call->q.sizes[2], heads = call->q.sizes[1];
  session.global.add({"lse",
                      GlobalMemory::Use::kOutput,
                      call->lse,
                      {1, call->q.sizes[0], heads},
                      {0, heads * rows * 4, rows * 4},
                      rows * 4});
  std::unique_ptr<float4[]> workspace;
  auto launch = [&] {
    const FwdPlan plan = plan_fwd(params, parse_overrides(call->tuning), properties_of(kDevice),
                                  sm90::encode_fwd_maps);
    if (const int64_t bytes = plan.workspace_bytes) {
      workspace = std::make_unique<float4[]>(bytes / sizeof(float4) + 1);
      session.global.add({"workspace",
                          GlobalMemory::Use::kWorkspace,
                          workspace.get(),
                          {1, 1, 1},
                          {0, 0, 0},
                          bytes});
    }
    launch_fwd(plan, params, workspace.get(), kDevice, nullptr);
  };
  current_call = call;
  emulator::refuses_tensor_maps = call->refuses_tensor_maps;
  return emulator::run_session(session, launch, counters, error, error_bytes);
}
}
