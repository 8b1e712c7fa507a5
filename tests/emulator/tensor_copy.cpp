#include "tensor_copy.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "cta.h"
#include "global_memory.h"

namespace flash_cute::emulator {

template <class F>
void TensorCopies::Copy::for_each_row(F&& f) const {
  for (int row = 0; row < map.box_rows(); ++row) {
    const unsigned char* address = map.data + int64_t{coordinates[0]} * TensorMap::kElementBytes;
    bool exists = coordinates[0] >= 0;
    for (int i = 1, rest = row; i < TensorMap::kRank; ++i) {
      const int64_t at = coordinates[i] + rest % map.box[i];
      rest /= map.box[i];
      exists = exists && at >= 0 && at < map.sizes[i];
      address += at * map.strides[i];
    }
    const int64_t columns = int64_t{map.sizes[0]} - coordinates[0];
    const auto bytes =
        static_cast<int>(std::clamp<int64_t>(columns * TensorMap::kElementBytes, 0, map.row_bytes));
    f(row * map.row_bytes, exists && bytes > 0 ? address : nullptr, bytes);
  }
}

void TensorCopies::begin(Thread& thread, const void* map, void* target, const void* barrier,
                         const std::array<int, TensorMap::kRank>& coordinates, const void* code) {
  Cta& cta = *thread.cta;
  Copy copy{{}, coordinates, cta.shared.offset_of(target), nullptr, code};
  const auto* params = static_cast<const char*>(cta.launch().params);
  if (static_cast<size_t>(static_cast<const char*>(map) - params) >=
          static_cast<size_t>(cta.launch().params_bytes) ||
      reinterpret_cast<uintptr_t>(map) % 64 != 0) {
    fail(thread, code, "names a tensor map at %p, which is not among the launch's parameters", map);
  }
  std::memcpy(&copy.map, map, sizeof copy.map);
  if (copy.map.mark != TensorMap::kMark) fail(thread, code, "names a tensor map that is none");
  if (!cta.shared.contains(target) || copy.target % 128 != 0) {
    fail(thread, code, "copies to %p, which is not in shared memory, or not aligned to 128 bytes",
         target);
  }
  copy.barrier = &cta.mbarriers.find_published(thread, barrier, code);
  copy.for_each_row([&](int offset, const unsigned char* address, int bytes) {
    for (int i = 0; i < copy.map.row_bytes; i += SharedMemory::kChunk) {
      cta.shared.begin_copy(thread, static_cast<char*>(target) + offset + i, SharedMemory::kChunk,
                            code);
    }
    if (!address) return;
    const std::string wrong = cta.launch().global->check_read(address, bytes, 16);
    if (!wrong.empty()) {
      fail(thread, code, "copies %d bytes from %p, %s", bytes, static_cast<const void*>(address),
           wrong.c_str());
    }
    cta.counters.box_bytes += bytes;
  });
  copies_.push_back(copy);
  cta.yield(thread);
}

void TensorCopies::land(Cta& cta, uint32_t dice) {
  std::swap(copies_[dice % copies_.size()], copies_.back());
  const Copy copy = copies_.back();
  copies_.pop_back();
  const Epoch written = cta.mbarriers.engine_epoch(cta, *copy.barrier);
  // Chunks are permuted among the rows of 128 bytes by the address: by its bits 7 to 9, or 7 and 8.
  const uint32_t permuted = copy.map.row_bytes / SharedMemory::kChunk - 1;
  copy.for_each_row([&](int row_offset, const unsigned char* address, int bytes) {
    for (int i = 0; i < copy.map.row_bytes; i += SharedMemory::kChunk) {
      unsigned char chunk[SharedMemory::kChunk] = {};
      if (address && i < bytes) {
        std::memcpy(chunk, address + i, std::min(bytes - i, SharedMemory::kChunk));
      }
      uint32_t offset = copy.target + row_offset + i;
      offset ^= (offset >> 7 & permuted) << 4;
      cta.shared.land_chunk(offset, chunk, written, copy.code);
    }
  });
  cta.mbarriers.complete(cta, *copy.barrier, copy.bytes());
}

void TensorCopies::check_done(Cta& cta) const {
  if (copies_.empty()) return;
  cta.fail("block " + std::to_string(cta.block()) + " ends while a copy is under way that began " +
           place(copies_.front().code));
}

namespace {

// As the driver's, of what the kernels here use; it refuses what the driver does.
CUresult encode(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank, void* data,
                const cuuint64_t* sizes, const cuuint64_t* outer_strides, const cuuint32_t* box,
                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap map = {.mark = TensorMap::kMark, .data = static_cast<const unsigned char*>(data)};
  bool good = !refuses_tensor_maps;
  good =
      good && (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  good = good && rank == TensorMap::kRank && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
         fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  good = good && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(result) % 64 == 0;
  for (int i = 0; i < TensorMap::kRank; ++i) {
    const uint64_t stride = i == 0 ? TensorMap::kElementBytes : outer_strides[i - 1];
    good = good && sizes[i] >= 1 && sizes[i] < uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 &&
           element_strides[i] == 1;
    good = good && (i == 0 || (stride % 16 == 0 && stride < uint64_t{1} << 40));
    // The documentation computes strides from the sizes: nothing overlaps.
    good = good && (i == 0 || stride >= sizes[0] * TensorMap::kElementBytes);
    map.strides[i] = static_cast<int64_t>(stride);
    map.sizes[i] = static_cast<uint32_t>(sizes[i]);
    map.box[i] = static_cast<int16_t>(box[i]);
  }
  map.row_bytes = static_cast<int16_t>(box[0] * TensorMap::kElementBytes);
  // A narrower box is allowed, but leaves gaps.
  good = good && map.row_bytes == (swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                                   : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                                          : 0);
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  *result = {};
  std::memcpy(result, &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace

bool refuses_tensor_maps = false;

void* encode_tensor_map() { return reinterpret_cast<void*>(&encode); }

}  // namespace flash_cute::emulator
