// What an emulated SM90 kernel asks of its machine beyond machine.h.
#pragma once

#include <array>
#include <cstdint>

#include "machine.h"

namespace flash_cute::emulator {

// mbarriers: the barrier in shared memory at `barrier`. A phase is over when all arrivals have
// come and all bytes that were expected.
void init_barrier(const void* barrier, int arrivals);
void fence_barrier_init();  // fence.mbarrier_init, of those that the thread initialised
void arrive_at_barrier(const void* barrier, int64_t expected_bytes);
void wait_at_barrier(const void* barrier, uint32_t parity);
bool is_barrier_over(const void* barrier, uint32_t parity);
void check_barrier_is_over(const void* barrier, uint32_t parity);

// bar.arrive: at the named barrier, without waiting.
void arrive_named(int id, int threads);

// stmatrix.x4: `row` is the address of one of the 32 rows of 16 bytes.
void store_matrix(void* row, const uint32_t (&words)[4]);

// TMA, by a tensor map as `encode_tensor_map` (tma.h) left it: to shared memory, and from
// there.
void tma_load(const void* map, void* target, const void* barrier, std::array<int, 5> coordinates);
void tma_store(const void* map, const void* source, std::array<int, 5> coordinates);
void fence_async_proxy();                   // fence.proxy.async
void tma_store_commit();                    // cp.async.bulk.commit_group
void tma_store_wait(int groups_in_flight);  // cp.async.bulk.wait_group.read
void prefetch_tensor_map(const void* map);

// Copies without a map, of `bytes` that lie one behind the other: to shared memory, and as floats
// that are added to sums in global memory (`reduce_add`). The latter join the stores' groups, and
// arrive as late as they may: when the thread waits for that, or as the CTA ends.
void bulk_load(const void* source, void* target, int bytes, const void* barrier);
void bulk_store(float* target, const void* source, int bytes);
void bulk_reduce_add(float* sums, const void* source, int bytes);
void bulk_wait_complete();  // cp.async.bulk.wait_group 0

// To four neighbouring sums: red.v4.
void reduce_add(float* sums, const float (&x)[4]);

// setmaxnreg, of a warp's threads.
void register_dealloc(int registers);
void register_alloc(int registers);

// wgmma, m64nNk16, of a warp's 16 rows: D = A B^T, added to what is there or not. A is (rows, k), B
// (columns, k); transposed, they lie as (k, rows) and (k, columns). Operands in shared memory are
// descriptors as the hardware reads them.
struct Wgmma {
  Operand type;
  int columns;
  bool add;
  bool a_transposed;
  bool b_transposed;
  uint64_t a;
  uint64_t b;
  const uint32_t* a_registers;  // (4), in place of `a`
  float* d;                     // (columns / 2)
};
void wgmma(const Wgmma& product);
void wgmma_fence();                     // wgmma.fence
void wgmma_commit();                    // wgmma.commit_group
void wgmma_wait(int groups_in_flight);  // wgmma.wait_group

}  // namespace flash_cute::emulator
