#include "tma.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "cta.h"
#include "global_memory.h"

namespace flash_cute::emulator {

template <class F>
void Tma::Box::for_each_row(F&& f) const {
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

template <class F>
void Tma::Box::for_each_chunk(F&& f) const {
  // Chunks are permuted among the rows of 128 bytes by the address: by its bits 7 to 9, or 7 and 8.
  const uint32_t permuted = map.row_bytes / SharedMemory::kChunk - 1;
  for_each_row([&](int row_offset, const unsigned char* address, int bytes) {
    for (int i = 0; i < map.row_bytes; i += SharedMemory::kChunk) {
      const uint32_t at = offset + row_offset + i;
      const bool exists = address && i < bytes;
      f(at ^ (at >> 7 & permuted) << 4, exists ? address + i : nullptr,
        exists ? std::min(bytes - i, SharedMemory::kChunk) : 0);
    }
  });
}

void Tma::reset() {
  loads_.clear();
  stores_.clear();
  unread_ = 0;
  additions_.clear();
}

Tma::Box Tma::box_at(Thread& thread, const char* verb, const void* map, const void* shared,
                     const Coordinates& coordinates, const void* code) {
  Cta& cta = *thread.cta;
  Box box{{}, coordinates, cta.shared.offset_of(shared), code};
  const auto* params = static_cast<const char*>(cta.launch().params);
  if (static_cast<size_t>(static_cast<const char*>(map) - params) >=
          static_cast<size_t>(cta.launch().params_bytes) ||
      reinterpret_cast<uintptr_t>(map) % 64 != 0) {
    fail(thread, code, "names a tensor map at %p, which is not among the launch's parameters", map);
  }
  std::memcpy(&box.map, map, sizeof box.map);
  if (box.map.mark != TensorMap::kMark) fail(thread, code, "names a tensor map that is none");
  if (!cta.shared.contains(shared) || box.offset % 128 != 0) {
    fail(thread, code, "%s %p, which is not in shared memory, or not aligned to 128 bytes", verb,
         shared);
  }
  return box;
}

// Its rows are the chunks, one behind the other: nothing is permuted.
Tma::Box Tma::flat_box(Thread& thread, const char* verb, const void* global, const void* shared,
                       int bytes, const void* code) {
  constexpr int kChunk = SharedMemory::kChunk;
  const SharedMemory& memory = thread.cta->shared;
  if (!memory.contains(shared) || memory.offset_of(shared) % kChunk != 0 || bytes <= 0 ||
      bytes % kChunk != 0 || bytes > SharedMemory::kMaxBytes) {
    fail(thread, code, "%s %d bytes at %p, which are not whole chunks of shared memory", verb,
         bytes, shared);
  }
  const auto chunks = static_cast<uint32_t>(bytes / kChunk);
  constexpr int kElements = kChunk / TensorMap::kElementBytes;
  const TensorMap map = {.mark = TensorMap::kMark,
                         .data = static_cast<const unsigned char*>(global),
                         .strides = {TensorMap::kElementBytes, kChunk},
                         .sizes = {kElements, chunks, 1, 1, 1},
                         .box = {kElements, static_cast<int16_t>(chunks), 1, 1, 1},
                         .row_bytes = kChunk};
  return {map, {}, memory.offset_of(shared), code};
}

void Tma::load(Thread& thread, const void* map, void* target, const void* barrier,
               const Coordinates& coordinates, const void* code) {
  begin_load(thread, box_at(thread, "copies to", map, target, coordinates, code), barrier);
}

void Tma::bulk_load(Thread& thread, const void* source, void* target, int bytes,
                    const void* barrier, const void* code) {
  begin_load(thread, flat_box(thread, "copies to", source, target, bytes, code), barrier);
}

void Tma::begin_load(Thread& thread, const Box& box, const void* barrier) {
  Cta& cta = *thread.cta;
  const Load load{box, &cta.mbarriers.find_published(thread, barrier, box.code)};
  bool is_outside = true;
  box.for_each_row([&](int offset, const unsigned char* address, int bytes) {
    for (int i = 0; i < box.map.row_bytes; i += SharedMemory::kChunk) {
      cta.shared.begin_copy(thread, cta.shared.data() + box.offset + offset + i,
                            SharedMemory::kChunk, box.code);
    }
    if (!address) return;
    is_outside = false;
    const std::string wrong = cta.launch().global->read(address, bytes, SharedMemory::kChunk);
    if (!wrong.empty()) {
      fail(thread, box.code, "copies %d bytes from %p, %s", bytes,
           static_cast<const void*>(address), wrong.c_str());
    }
    cta.counters.tma_load_bytes += bytes;
  });
  // The hardware touches the base even then. That of a ragged map is no tensor's.
  if (is_outside && !cta.launch().global->read(box.map.data, 1, 1).empty()) {
    fail(thread, box.code, "copies a box outside of a map whose base, %p, is not readable",
         static_cast<const void*>(box.map.data));
  }
  loads_.push_back(load);
  cta.yield(thread);
}

void Tma::land(Cta& cta, const Load& load) {
  const Epoch written = cta.mbarriers.tma_epoch(cta, *load.barrier);
  load.box.for_each_chunk([&](uint32_t offset, const unsigned char* address, int bytes) {
    unsigned char chunk[SharedMemory::kChunk] = {};
    if (address) std::memcpy(chunk, address, bytes);
    cta.shared.land_chunk(offset, chunk, written, load.box.code);
  });
  cta.mbarriers.complete(cta, *load.barrier, load.box.bytes());
}

void Tma::store(Thread& thread, const void* map, const void* source, const Coordinates& coordinates,
                const void* code) {
  begin_store(thread, box_at(thread, "stores from", map, source, coordinates, code),
              Store::Kind::kTensor);
}

void Tma::bulk_store(Thread& thread, float* target, const void* source, int bytes,
                     const void* code) {
  begin_store(thread, flat_box(thread, "stores at", target, source, bytes, code),
              Store::Kind::kFlat);
}

void Tma::bulk_reduce_add(Thread& thread, float* sums, const void* source, int bytes,
                          const void* code) {
  const Box box = flat_box(thread, "adds", sums, source, bytes, code);
  thread.cta->add_in_turn(thread, code);
  begin_store(thread, box, Store::Kind::kAdds);
}

void Tma::begin_store(Thread& thread, const Box& box, Store::Kind kind) {
  Cta& cta = *thread.cta;
  const Store store{box, kind, &thread, thread.tma_store_group, false};
  begin_read(cta, store);
  box.for_each_row([&](int, const unsigned char* address, int bytes) {
    if (!address) return;
    if (kind == Store::Kind::kAdds) {
      cta.check_sum(thread, address, bytes, box.code);
      cta.counters.tma_reduce_bytes += bytes;
      return;
    }
    const std::string wrong = cta.launch().global->write(address, bytes, SharedMemory::kChunk);
    if (!wrong.empty()) {
      fail(thread, box.code, "stores %d bytes at %p, %s", bytes, static_cast<const void*>(address),
           wrong.c_str());
    }
    cta.counters.tma_store_bytes += bytes;
  });
  stores_.push_back(store);
  ++unread_;
  cta.yield(thread);
}

void Tma::begin_read(Cta& cta, const Store& store) {
  const auto& reader =
      store.kind == Store::Kind::kAdds ? SharedMemory::kTmaReduction : SharedMemory::kTmaStore;
  SharedMemory::AsyncRead read(cta.shared, reader, {store.thread, 1}, store.box.code);
  store.box.for_each_chunk([&](uint32_t offset, const unsigned char*, int) { read.begin(offset); });
}

void Tma::read(Cta& cta, Store& store) {
  store.has_read = true;
  --unread_;
  // A tensor that is stored is one that may be written.
  if (store.kind != Store::Kind::kTensor) {
    const auto* x = reinterpret_cast<const float*>(cta.shared.data() + store.box.offset);
    auto* sums = reinterpret_cast<float*>(const_cast<unsigned char*>(store.box.map.data));
    additions_.push_back({store.thread,
                          store.group,
                          sums,
                          {x, x + store.box.bytes() / 4},
                          store.kind == Store::Kind::kAdds});
    return;
  }
  store.box.for_each_chunk([&](uint32_t offset, const unsigned char* address, int bytes) {
    if (address)
      std::memcpy(const_cast<unsigned char*>(address), cta.shared.data() + offset, bytes);
  });
}

void Tma::wait(Thread& thread, int groups_in_flight) {
  Cta& cta = *thread.cta;
  const Epoch now = thread.clocks.epoch();
  const int warp = thread.index / 32;
  auto is_waited_for = [&](const Store& store) {
    return store.thread == &thread && store.group < thread.tma_store_group - groups_in_flight;
  };
  for (Store& store : stores_) {
    if (!is_waited_for(store)) continue;
    if (!store.has_read) read(cta, store);
    store.box.for_each_chunk([&](uint32_t offset, const unsigned char*, int) {
      cta.shared.end_read(offset, warp, now, store.box.code);
    });
  }
  std::erase_if(stores_, is_waited_for);
  // Where those read too that are still there, the warp is not done.
  for (const Store& store : stores_) {
    if (store.thread->index / 32 == warp) begin_read(cta, store);
  }
}

void Tma::Addition::land() const {
  if (adds) return add_to(sums, x);
  std::copy(x.begin(), x.end(), sums);
}

void Tma::wait_complete(Thread& thread, const void* code) {
  wait(thread, 0);
  auto is_waited_for = [&](const Addition& addition) {
    return addition.thread == &thread && addition.group < thread.tma_store_group;
  };
  for (const Addition& addition : additions_) {
    if (!is_waited_for(addition)) continue;
    thread.cta->add_in_turn(thread, code);  // it is now that there is something to publish
    addition.land();
  }
  std::erase_if(additions_, is_waited_for);
}

bool Tma::adds(const Thread& thread) const {
  auto is_its = [&](const auto& other) { return other.thread == &thread; };
  return std::ranges::any_of(additions_, is_its) ||
         std::ranges::any_of(
             stores_, [&](const Store& s) { return s.kind != Store::Kind::kTensor && is_its(s); });
}

void Tma::check_stored(const Thread& thread) const {
  for (const Store& store : stores_) {
    if (store.thread != &thread) continue;
    fail(thread, store.box.code, "ends without having %s its TMA %s",
         store.group == thread.tma_store_group ? "committed" : "waited for",
         store.kind == Store::Kind::kAdds ? "reduction" : "store");
  }
}

void Tma::happen(Cta& cta, uint32_t dice) {
  const size_t which = dice % (loads_.size() + unread_);
  if (which < loads_.size()) {
    std::swap(loads_[which], loads_.back());
    const Load load = loads_.back();
    loads_.pop_back();
    return land(cta, load);
  }
  size_t skipped = loads_.size();
  for (Store& store : stores_) {
    if (!store.has_read && skipped++ == which) return read(cta, store);
  }
}

void Tma::end(Cta& cta) {
  if (!loads_.empty()) {
    cta.fail("CTA " + std::to_string(cta.index()) +
             " ends while a TMA load is under way that began " + place(loads_.front().box.code));
  }
  for (const Addition& addition : additions_) addition.land();
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
