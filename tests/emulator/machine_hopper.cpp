// The functions of machine_hopper.h.
#include "machine_hopper.h"

#include "cta.h"

namespace flash_cute::emulator {

// Where the kernel called the function that asks.
#define CALLER __builtin_extract_return_addr(__builtin_return_address(0))

void init_barrier(const void* barrier, int arrivals) {
  running->cta->mbarriers.init(*running, barrier, arrivals, CALLER);
}
void publish_barriers() { running->cta->mbarriers.publish(*running); }
void arrive_at_barrier(const void* barrier, int64_t expected_bytes) {
  running->cta->mbarriers.arrive(*running, barrier, expected_bytes, CALLER);
}
void wait_at_barrier(const void* barrier, uint32_t parity) {
  running->cta->mbarriers.wait(*running, barrier, parity, CALLER);
}

void arrive_named(int id, int threads) {
  running->cta->barrier(*running, id, threads, CALLER, false);
}

void load_box(const void* map, void* target, const void* barrier, std::array<int, 5> coordinates) {
  running->cta->tensor_copies.begin(*running, map, target, barrier, coordinates, CALLER);
}
void prefetch_map(const void*) {}

void give_back_registers(int registers) {
  running->cta->warpgroups.give_back_registers(*running, registers, CALLER);
}
void take_registers(int registers) {
  running->cta->warpgroups.take_registers(*running, registers, CALLER);
}

void multiply_async(const AsyncProduct& product) {
  running->cta->warpgroups.multiply(*running, product, CALLER);
}
void begin_products() { running->cta->warpgroups.begin(*running, CALLER); }
void commit_products() { running->cta->warpgroups.commit(*running, CALLER); }
void wait_products(int groups_in_flight) {
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
