// A tile that has no row in csrc/cute_fa2/config.h, as a library of its own, which bench.run times
// beside the others; keys stay whole. bench/tiles.py compiles it with
//   FLASH_CUTE_ARCH    80 or 90
//   FLASH_CUTE_TILE    the members of FwdConfig or FwdSm90Config
//   FLASH_CUTE_DTYPE   a member of DType
//   FLASH_CUTE_BLOCKS  thread blocks that a multiprocessor is to have registers for (of 80); 0: as
//                      the library has it
#if FLASH_CUTE_ARCH == 90
#include "sm90/launch.h"
#else
#include "sm80/launch.h"
#endif

#include <exception>
#include <string>

namespace flash_cute {
namespace {

// As Call in bench/tiles.py.
struct Call {
  void* data[4];  // q, k, v, out
  float* lse;
  int64_t strides[4][3];  // batch, head, row
  int64_t batch, heads, kv_heads, q_len, kv_len, head_dim;
  double scale;
  int64_t is_causal;
  int64_t device;
  cudaStream_t stream;
};

template <class Pointer>
TensorView<Pointer> view(const Call& call, int i) {
  const auto& strides = call.strides[i];
  return {call.data[i], strides[0], strides[1], strides[2]};
}

#if FLASH_CUTE_ARCH == 90
using Traits = sm90::FwdTraits<DType::FLASH_CUTE_DTYPE, FwdSm90Config{FLASH_CUTE_TILE}, false>;
#else
using TraitsOfTable = sm80::FwdTraits<DType::FLASH_CUTE_DTYPE, FwdConfig{FLASH_CUTE_TILE}>;
struct Traits : TraitsOfTable {
  static constexpr int kMinBlocks =
      FLASH_CUTE_BLOCKS > 0 ? FLASH_CUTE_BLOCKS : TraitsOfTable::kMinBlocks;
};
#endif

template <MaskKind kMask>
void launch(const FwdParams& params, const Call& call) {
  const int device = static_cast<int>(call.device);
#if FLASH_CUTE_ARCH == 90
  sm90::launch<sm90::FwdKernel<Traits, kMask>>(params, DType::FLASH_CUTE_DTYPE, kMask, device,
                                               call.stream);
#else
  sm80::launch<sm80::FwdKernel<Traits, kMask>>(params, kMask, device, call.stream);
#endif
}

}  // namespace
}  // namespace flash_cute

// Returns nullptr, or what went wrong, which stays valid until the next call.
extern "C" __attribute__((visibility("default"))) const char* forward(
    const flash_cute::Call* call) {
  using namespace flash_cute;
  static std::string error;
  FwdParams params;
  params.q = view<const void*>(*call, 0);
  params.k = view<const void*>(*call, 1);
  params.v = view<const void*>(*call, 2);
  params.out = view<void*>(*call, 3);
  params.lse = {call->lse, call->heads * call->q_len, call->q_len, 1};
  params.batch = static_cast<int>(call->batch);
  params.heads_q = static_cast<int>(call->heads);
  params.heads_per_kv_head = static_cast<int>(call->heads / call->kv_heads);
  params.len_q = static_cast<int>(call->q_len);
  params.len_k = static_cast<int>(call->kv_len);
  params.head_dim = static_cast<int>(call->head_dim);
  set_scale(params, call->scale);
  try {
    if (set_band(params, -1, call->is_causal ? 0 : -1, call->kv_len - call->q_len) ==
        MaskKind::kFull) {
      launch<MaskKind::kFull>(params, *call);
    } else {
      launch<MaskKind::kBanded>(params, *call);
    }
    return nullptr;
  } catch (const std::exception& exception) {
    error = exception.what();
    return error.c_str();
  }
}

// What a block takes of a multiprocessor, registers apart.
extern "C" __attribute__((visibility("default"))) void tile_needs(int* threads, int* smem_bytes) {
  *threads = flash_cute::Traits::kThreads;
  *smem_bytes = sizeof(flash_cute::Traits::SharedMemory);
}
