// Asynchronous gemms (wgmma) of a CTA's warps, and the registers that warps give and take.
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

  // An access to the stack while wgmmas are in flight.
  void check_registers(const Thread& thread, const void* address, int bytes, bool is_write,
                       const void* code) const;
  void check_done(const Thread& thread) const;

  // For the running thread.
  void fence(Thread& thread, const void* code);
  void issue(Thread& thread, const Wgmma& product, const void* code);
  void commit(Thread& thread, const void* code);
  void wait(Thread& thread, int groups_in_flight, const void* code);
  void register_dealloc(Thread& thread, int registers, const void* code);
  void register_alloc(Thread& thread, int registers, const void* code);

 private:
  struct Issued {
    Wgmma shape;  // without the registers
    const uint32_t* a[32];
    float* d[32];
    int64_t group;
    const void* code;
  };
  struct Warp {
    std::vector<Issued> issued;  // under way
    int64_t group = 0;           // which the next ones join
    bool fenced = false;         // the next may be issued
    int64_t count = 0;           // issued so far
    uint64_t waits = 0;          // a digest of those so far
    int registers = 0;           // of each thread
  };
  struct Shared {  // what the warps of a warpgroup have in common where they issue a wgmma
    uint64_t a, b;
    int64_t group;
    uint64_t waits;
    bool operator==(const Shared&) const = default;
  };
  // Runs f on each chunk of B, then of the warp's rows of A, in shared memory: at its offset.
  template <class F>
  static void for_each_chunk(const Wgmma& product, int warp, F&& f);
  void begin_reads(const Thread* lanes, const Issued& product);
  static void run(Cta& cta, int warp, const Issued& product);
  Warp& warp_of(const Thread& thread);

  std::vector<Warp> warps_;
  std::vector<std::vector<Shared>> operands_;  // of each warpgroup's wgmmas, in their order
  int free_registers_ = 0;
  std::vector<Thread*> wanting_registers_;
};

}  // namespace flash_cute::emulator
