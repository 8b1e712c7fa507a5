// The forward as Python calls it (emulator.py has the same structs): the project's own dispatch, on
// what it asks of CUDA.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <vector>

#include "device.h"
#include "dispatch.h"
#include "launch.h"
#include "sm80/tile_scheduler.h"
#include "sm90/tile_scheduler.h"
#include "splits.h"
#include "tensor_copy.h"

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
  int64_t arch;
  int64_t smem_limit;
  int64_t splits;
  int32_t capability_major;  // of the device
  int32_t multiprocessors;
  int32_t refuses_tensor_maps;
  uint64_t seed;
};

// The call that goes on.
static const CForward* current_call = nullptr;
// So that nothing of it is remembered for another call, which may have another.
constexpr int kDevice = kMaxDevices;

// What the launch code asks of CUDA. L2 is so small that a few short heads make several sections.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor         ? current_call->capability_major
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
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "none"; }

// JSON: what was built, and the tile table.
__attribute__((visibility("default"))) const char* describe_build() {
  static const std::string description = build_info();
  return description.c_str();
}

// The sizes of a call, with no tensors.
static FwdParams params_of(int batch, int heads, int heads_kv, int len_q, int len_k, int head_dim) {
  FwdParams params{};
  params.batch = batch;
  params.heads_q = heads;
  params.group_size = heads / heads_kv;
  params.len_q = len_q;
  params.len_k = len_k;
  params.head_dim = head_dim;
  params.q.stride_head = 1;  // heads that are not expanded
  return params;
}

// Of sm90, the row of the tile table that a call gets if its keys stay whole.
static const TileEntrySm90& row_of_sm90(const FwdParams& params, MaskKind mask, bool is_triangle,
                                        int multiprocessors) {
  const auto tiles = [&](int block_m) {
    return tiles_of(params, block_m, most_rows_of_query_sm90(params));
  };
  return kFwdTilesSm90[select_fwd_sm90(params.head_dim, mask, is_triangle, params.len_k,
                                       multiprocessors, tiles)];
}

// Of sm90, how many rows the tiles of a call have.
__attribute__((visibility("default"))) int block_m_of_sm90(int batch, int heads, int heads_kv,
                                                           int len_q, int len_k, int head_dim,
                                                           int is_banded, int is_triangle,
                                                           int multiprocessors) {
  const FwdParams params = params_of(batch, heads, heads_kv, len_q, len_k, head_dim);
  const MaskKind mask = is_banded ? MaskKind::kBanded : MaskKind::kFull;
  return row_of_sm90(params, mask, is_triangle, multiprocessors).config.block_m();
}

// Into how many parts a device of so many multiprocessors, which lends a block `smem_limit` bytes,
// splits the keys; of how many keys each goes to `keys`.
__attribute__((visibility("default"))) int splits_of(int arch, int batch, int heads, int heads_kv,
                                                     int len_q, int len_k, int head_dim,
                                                     int window_left, int window_right,
                                                     int multiprocessors, int smem_limit,
                                                     int32_t* keys) {
  FwdParams params = params_of(batch, heads, heads_kv, len_q, len_k, head_dim);
  const MaskKind mask = set_band(params, window_left, window_right, len_k - len_q);
  const bool is_triangle = mask == MaskKind::kBanded && params.is_triangle();
  const SplitCost tiles =
      arch == 80 ? SplitCost::of_sm80(params, kFwdTilesSm80[select_fwd_sm80(head_dim, smem_limit)],
                                      multiprocessors)
                 : SplitCost::of_sm90(params, mask, kFwdTilesSm90[select_splits_sm90(head_dim)],
                                      row_of_sm90(params, mask, is_triangle, multiprocessors),
                                      multiprocessors);
  const SplitKV splits = choose_splits(params, tiles, multiprocessors, 0);
  *keys = splits.keys;
  return splits.count;
}

// Which thread blocks get which tiles, of `block_m` rows: for each block in turn, its tiles, or
// parts of such, go to `tiles`, one after the other, as (block, first row, end of the rows, head,
// batch); returns how many there are.
__attribute__((visibility("default"))) int64_t deal(int arch, int batch, int heads, int heads_kv,
                                                    int len_q, int len_k, int head_dim,
                                                    int window_left, int window_right, int block_m,
                                                    int multiprocessors, int l2_bytes,
                                                    int32_t* tiles) {
  FwdParams params = params_of(batch, heads, heads_kv, len_q, len_k, head_dim);
  const MaskKind mask = set_band(params, window_left, window_right, len_k - len_q);
  const PackGqa pack_gqa = PackGqa::make(params, block_m);
  int64_t count = 0;
  const int row_count = pack_gqa.count(len_q);
  auto add = [&](int block, sm90::WorkTile tile) {
    for (int number : {block, tile.row0, tile.row_end, tile.head, tile.batch}) *tiles++ = number;
    ++count;
  };
  if (arch == 80) {
    const auto schedule = sm80::TileScheduler::make(params, pack_gqa, mask, block_m, l2_bytes);
    for (int block = 0; block < schedule.blocks(); ++block) {
      const TileCoord tile = schedule.tile(block);
      const int row0 = tile.m_block * block_m;
      add(block, {row0, std::min(row0 + block_m, row_count), tile.head, tile.batch});
    }
  } else {
    const auto schedule =
        sm90::TileScheduler::make(params, pack_gqa, mask, block_m, multiprocessors, l2_bytes);
    for (int block = 0; block < schedule.blocks(); ++block) {
      sm90::TileScheduler::Tiles of_block(block);
      for (int i; schedule.has(i = of_block.next(schedule));) {
        const sm90::WorkTile tile = schedule.tile(i, row_count);
        if (tile.row0 < tile.row_end) add(block, tile);
      }
    }
  }
  return count;
}

// Returns 0, or 1 with a sentence in `error`. Counters are added to.
__attribute__((visibility("default"))) int emulate_forward(const CForward* call,
                                                           emulator::Counters* counters,
                                                           char* error, size_t error_bytes) {
  FwdParams params;
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
  set_scale(params, call->softmax_scale);
  const MaskKind mask =
      set_band(params, call->window_left, call->window_right, call->diagonal_offset);

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
  std::vector<std::unique_ptr<float4[]>> workspaces;
  auto allocate = [&](int64_t bytes) {
    workspaces.push_back(std::make_unique<float4[]>(bytes / sizeof(float4) + 1));
    void* data = workspaces.back().get();
    session.global.add(
        {"workspace", GlobalMemory::Use::kWorkspace, data, {1, 1, 1}, {0, 0, 0}, bytes});
    return data;
  };
  auto launch = [&] {
    launch_fwd(params, call->is_half ? DType::kHalf : DType::kBFloat16, mask,
               {call->arch, call->smem_limit, call->splits}, kDevice, nullptr, allocate);
  };
  current_call = call;
  emulator::refuses_tensor_maps = call->refuses_tensor_maps;
  return emulator::run_session(session, launch, counters, error, error_bytes);
}
}
