// What calls of both directions from Python have in common: the project's own host code runs, on an
// emulated device (device.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "host/device.h"
#include "host/params.h"
#include "launch.h"

namespace flash_cute::emulator {

// Nothing is remembered of it: another call may have another device.
constexpr int kDevice = kMaxDevices;
extern int multiprocessors;  // of the device, for the call that goes on

// A (batch, heads, rows, columns) tensor; strides in elements, columns contiguous.
struct CTensor {
  void* data;
  int64_t sizes[4];
  int64_t strides[3];
  int64_t element_bytes;

  template <class T>
  TensorView<T*> view() const {
    return {static_cast<T*>(data), strides[0], strides[1], strides[2]};
  }
};

struct CCall {
  CTensor q, k, v, out;
  CTensor lse;  // (batch, heads, rows, 1)
  // Packed or padded sequences (SequenceTable), and a sink for each head; `data` may be null.
  CTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, key_start, sink;
  CTensor slopes, bias;  // of ALiBi, (1, 1, batch, heads); `data` may be null
  double softcap;
  int32_t sequences;  // how many; 0: the entries of the batch, all of one length
  int32_t dtype;      // as DType numbers them
  int32_t workers;
  double softmax_scale;
  int64_t window_left, window_right, diagonal_offset;
  const char* tuning;       // as the op takes it
  int32_t multiprocessors;  // of the device
  uint64_t seed;
};

void add(Session& session, const char* name, GlobalMemory::Use use, const CTensor& tensor);

// Sets of `params` what both directions have. The session gets q, k and v.
Session begin_call(const CCall& call, AttentionParams& params);

// Memory that kernels hand on, filled with NaN.
class Workspace {
 public:
  void allocate(int64_t bytes);
  void* data() const { return memory_.get(); }
  // A part of it, of which each byte must be written. None if `bytes` is 0.
  static void add(Session& session, const char* name, const void* data, int64_t bytes,
                  GlobalMemory::Use use = GlobalMemory::Use::kWorkspace);
  static void add(Session& session, const BlockList& list, int splits = 1);

 private:
  struct alignas(16) Chunk {
    unsigned char bytes[16];
  };
  std::unique_ptr<Chunk[]> memory_;
};

}  // namespace flash_cute::emulator
