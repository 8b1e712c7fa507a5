// Asynchronous products (wgmma) of a block's warps, and the registers that warps give and take.
#pragma once

#include <cstdint>
#include <vector>

#include "machine_hopper.h"

namespace flash_cute::emulator {

class Cta;
struct Thread;

class Warpgroups {
 public:
  void reset(int threads);

  // A product under way may read and write registers at any time.
  bool in_flight(const Thread& thread) const;
  void check_registers(const Thread& thread, const void* address, int bytes, bool is_write,
                       const void* code) const;
  void check_done(const Thread& thread) const;

  // For the running thread.
  void begin(Thread& thread, const void* code);
  void multiply(Thread& thread, const AsyncProduct& product, const void* code);
  void commit(Thread& thread, const void* code);
  void wait(Thread& thread, int groups_in_flight, const void* code);
  void register_dealloc(Thread& thread, int registers, const void* code);
  void register_alloc(Thread& thread, int registers, const void* code);

 private:
  struct Product {
    AsyncProduct shape;  // without the registers
    const uint32_t* a[32];
    float* d[32];
    int64_t group;
    const void* code;
  };
  struct Warp {
    std::vector<Product> products;  // under way
    int64_t group = 0;              // which the next ones join
    bool begun = false;             // the next may be issued
    int64_t issued = 0;
    uint64_t waits = 0;  // a digest of those so far
    int registers = 0;   // of each thread
  };
  struct Shared {  // what the warps of a warpgroup have in common where they issue a product
    uint64_t a, b;
    int64_t group;
    uint64_t waits;
    bool operator==(const Shared&) const = default;
  };
  // Runs f on each chunk of B, then of the warp's rows of A, in shared memory: at its offset.
  template <class F>
  static void for_each_chunk(const AsyncProduct& product, int warp, F&& f);
  void begin_reads(const Thread* lanes, const Product& product);
  static void run(Cta& cta, int warp, const Product& product);
  Warp& warp_of(const Thread& thread);

  std::vector<Warp> warps_;
  std::vector<std::vector<Shared>> operands_;  // of each warpgroup's products, one after the other
  int free_registers_ = 0;
  std::vector<Thread*> wanting_registers_;
};

}  // namespace flash_cute::emulator
