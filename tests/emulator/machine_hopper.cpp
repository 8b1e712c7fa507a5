// The functions of machine_hopper.h.
#include "machine_hopper.h"

#include <cstring>

#include "cta.h"

namespace flash_cute::emulator {

// Where the kernel called the function that asks.
#define CALLER __builtin_extract_return_addr(__builtin_return_address(0))

void init_barrier(const void* barrier, int arrivals) {
  running->cta->mbarriers.init(*running, barrier, arrivals, CALLER);
}
void fence_barrier_init() { running->cta->mbarriers.publish(*running); }
void arrive_at_barrier(const void* barrier, int64_t expected_bytes) {
  running->cta->mbarriers.arrive(*running, barrier, expected_bytes, CALLER);
}
void wait_at_barrier(const void* barrier, uint32_t parity) {
  running->cta->mbarriers.wait(*running, barrier, parity, CALLER);
}
bool is_barrier_over(const void* barrier, uint32_t parity) {
  return running->cta->mbarriers.is_over(*running, barrier, parity, CALLER);
}
void check_barrier_is_over(const void* barrier, uint32_t parity) {
  running->cta->mbarriers.check_is_over(*running, barrier, parity, CALLER);
}

void arrive_named(int id, int threads) {
  running->cta->barrier(*running, id, threads, CALLER, false);
}

void store_matrix(void* row, const uint32_t (&words)[4]) {
  struct Operands {
    void* row;
    const uint32_t* words;
    const void* code;
  } mine{row, words, CALLER};
  auto complete = [](Cta& cta, Thread* threads, void* const(&lanes)[32]) {
    std::array<uint32_t, 32> offsets;
    for (int i = 0; i < 32; ++i) {
      const auto& lane = *static_cast<Operands*>(lanes[i]);
      if (!cta.shared.contains(lane.row)) {
        fail(threads[i], lane.code, "gives stmatrix the row %p, which is not in shared memory",
             lane.row);
      }
      cta.shared.write(threads[i], lane.row, 16, lane.code);
      offsets[i] = cta.shared.offset_of(lane.row);
      // Row i % 8 of matrix i / 8: each of four lanes has 2 elements.
      for (int j = 0; j < 4; ++j) {
        const auto& holder = *static_cast<Operands*>(lanes[i % 8 * 4 + j]);
        std::memcpy(static_cast<char*>(lane.row) + 4 * j, &holder.words[i / 8], 4);
      }
    }
    BankConflicts::add(offsets, ~0u, 16, cta.counters.store_matrix);
  };
  running->cta->with_warp(*running, "stmatrix", &mine, complete, CALLER);
}

void tma_load(const void* map, void* target, const void* barrier, std::array<int, 5> coordinates) {
  running->cta->tma.load(*running, map, target, barrier, coordinates, CALLER);
}
void tma_store(const void* map, const void* source, std::array<int, 5> coordinates) {
  running->cta->tma.store(*running, map, source, coordinates, CALLER);
}
void fence_async_proxy() { running->clocks.fence(); }
void tma_store_commit() { ++running->tma_store_group; }
void tma_store_wait(int groups_in_flight) { running->cta->tma.wait(*running, groups_in_flight); }
void prefetch_tensor_map(const void*) {}

void bulk_load(const void* source, void* target, int bytes, const void* barrier) {
  running->cta->tma.bulk_load(*running, source, target, bytes, barrier, CALLER);
}
void bulk_store(float* target, const void* source, int bytes) {
  running->cta->tma.bulk_store(*running, target, source, bytes, CALLER);
}
void bulk_reduce_add(float* sums, const void* source, int bytes) {
  running->cta->tma.bulk_reduce_add(*running, sums, source, bytes, CALLER);
}
void bulk_wait_complete() { running->cta->tma.wait_complete(*running, CALLER); }

void reduce_add(float* sums, const float (&x)[4]) { running->cta->add(*running, sums, x, CALLER); }

void register_dealloc(int registers) {
  running->cta->warpgroups.register_dealloc(*running, registers, CALLER);
}
void register_alloc(int registers) {
  running->cta->warpgroups.register_alloc(*running, registers, CALLER);
}

void wgmma(const Wgmma& product) { running->cta->warpgroups.issue(*running, product, CALLER); }
void wgmma_fence() { running->cta->warpgroups.fence(*running, CALLER); }
void wgmma_commit() { running->cta->warpgroups.commit(*running, CALLER); }
void wgmma_wait(int groups_in_flight) {
  running->cta->warpgroups.wait(*running, groups_in_flight, CALLER);
}

}  // namespace flash_cute::emulator

size_t __cvta_generic_to_shared(const void* address) {
  using namespace flash_cute::emulator;
  if (!running->cta->shared.contains(address)) {
    fail(*running, __builtin_return_address(0), "takes %p for shared memory", address);
  }
  return running->cta->shared.offset_of(address);
}
