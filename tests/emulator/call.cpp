#include "call.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "host/tile_schedule.h"
#include "tma.h"

namespace flash_cute::emulator {

int multiprocessors = 0;

void add(Session& session, const char* name, GlobalMemory::Use use, const CTensor& t) {
  const int64_t bytes = t.element_bytes;
  session.global.add({name,
                      use,
                      t.data,
                      {t.sizes[0], t.sizes[1], t.sizes[2]},
                      {t.strides[0] * bytes, t.strides[1] * bytes, t.strides[2] * bytes},
                      t.sizes[3] * bytes});
}

Session begin_call(const CCall& call, AttentionParams& params) {
  params.q = call.q.view<const void>();
  params.k = call.k.view<const void>();
  params.v = call.v.view<const void>();
  params.batch = call.sequences != 0 ? call.sequences : static_cast<int>(call.q.sizes[0]);
  params.heads_q = static_cast<int>(call.q.sizes[1]);
  params.group_size = static_cast<int>(call.q.sizes[1] / call.k.sizes[1]);
  params.len_q = static_cast<int>(call.q.sizes[2]);
  params.len_k = static_cast<int>(call.k.sizes[2]);
  params.head_dim = static_cast<int>(call.q.sizes[3]);
  params.head_dim_v = static_cast<int>(call.v.sizes[3]);
  params.dtype = static_cast<DType>(call.dtype);
  params.scale = make_softmax_scale(call.softmax_scale);
  if (call.sequences != 0) {
    params.mask = MaskKind::kPacked;
    params.band = band_of_packed(call.window_left, call.window_right);
  } else {
    params.mask = set_band(params.band, params.len_q, params.len_k, call.window_left,
                           call.window_right, call.diagonal_offset);
  }
  multiprocessors = call.multiprocessors;
  Session session{.seed = call.seed, .workers = call.workers};
  add(session, "q", GlobalMemory::Use::kInput, call.q);
  add(session, "k", GlobalMemory::Use::kInput, call.k);
  add(session, "v", GlobalMemory::Use::kInput, call.v);
  const auto numbers = [&]<class T>(const char* name, const CTensor& t, const T*& address) {
    address = static_cast<const T*>(t.data);
    if (t.data) add(session, name, GlobalMemory::Use::kInput, t);
  };
  numbers("cu_seqlens_q", call.cu_seqlens_q, params.sequences.cu_seqlens_q);
  numbers("cu_seqlens_k", call.cu_seqlens_k, params.sequences.cu_seqlens_k);
  numbers("seqused_q", call.seqused_q, params.sequences.seqused_q);
  numbers("seqused_k", call.seqused_k, params.sequences.seqused_k);
  numbers("key_start", call.key_start, params.sequences.key_start);
  numbers("sink", call.sink, params.sink);
  const CTensor &slopes = call.slopes, &bias = call.bias;
  if (call.softcap != 0 || slopes.data || bias.data) {
    if (call.sequences == 0) params.band = band_of_packed(call.window_left, call.window_right);
    set_changes(params, {.softcap = static_cast<float>(call.softcap),
                         .slopes = {static_cast<const float*>(slopes.data), slopes.strides[2], 1},
                         .bias = {bias.data, bias.strides[0], bias.strides[1], bias.strides[2],
                                  bias.sizes[3] > 1, bias.element_bytes == 4}});
    if (slopes.data) add(session, "slopes", GlobalMemory::Use::kInput, slopes);
    if (bias.data) add(session, "bias", GlobalMemory::Use::kInput, bias);
  }
  return session;
}

void Workspace::allocate(int64_t bytes) {
  const int64_t chunks = ceil_div(bytes, int64_t{sizeof(Chunk)});
  memory_ = std::make_unique<Chunk[]>(chunks);
  std::memset(memory_.get(), 0xff, chunks * sizeof(Chunk));
}

void Workspace::add(Session& session, const char* name, const void* data, int64_t bytes,
                    GlobalMemory::Use use) {
  if (bytes == 0) return;
  session.global.add({name, use, data, {1, 1, 1}, {}, bytes});
}

void Workspace::add(Session& session, const BlockList& list, int splits) {
  if (!list.sorted) return;
  add(session, "workspace.counts", list.count, list.bound > 0 ? 2 * sizeof(int) : 0);
  add(session, "workspace.sorted", list.sorted, list.bound * splits * sizeof(SequenceTile),
      GlobalMemory::Use::kPartly);
}

}  // namespace flash_cute::emulator

using namespace flash_cute;

// What the host code asks of CUDA. L2 is so small that a few short heads make several head groups.
extern "C" {
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor         ? 9
           : attribute == cudaDevAttrMultiProcessorCount          ? emulator::multiprocessors
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
  *device = emulator::kDevice;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "none"; }
}
