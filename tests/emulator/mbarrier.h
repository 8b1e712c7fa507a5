// mbarriers: barriers in shared memory, whose phases end when threads have arrived and bytes have
// been copied.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "clocks.h"

namespace flash_cute::emulator {

class Cta;
struct Thread;

struct MBarrier {
  uint32_t offset;      // in shared memory
  int arrivals;         // that a phase takes
  int missing;          // of them, in the phase under way
  int64_t bytes;        // expected less those that have come
  uint32_t phases;      // that are over
  Gathering gathering;  // of those who have arrived in the phase under way
  SharedNews last;      // of the one before; none of the first
  Epoch initialised;
  bool published;
  int tma_clock;      // the clocks' entry of the TMA loads that arrive here; -1 before the first
  uint32_t landings;  // of copies, so far
  std::vector<Thread*> waiting;
};

class MBarriers {
 public:
  void reset() { barriers_.clear(), tma_clocks_ = 0; }

  // For the running thread; `at` is the barrier's address.
  void init(Thread& thread, const void* at, int arrivals, const void* code);
  void publish(Thread& thread);
  void arrive(Thread& thread, const void* at, int64_t bytes, const void* code);
  void wait(Thread& thread, const void* at, uint32_t parity, const void* code);
  // Whether a wait would return at once. If so, the thread has heard what it hears from one.
  bool is_over(Thread& thread, const void* at, uint32_t parity, const void* code);
  // Fails if it would not: the thread counts on an answer from before. It hears nothing.
  void check_is_over(Thread& thread, const void* at, uint32_t parity, const void* code);

  // For a TMA load that arrives at `at`.
  MBarrier& find_published(Thread& thread, const void* at, const void* code);
  // The epoch at which TMA writes what then arrives.
  Epoch tma_epoch(Cta& cta, MBarrier& barrier);
  void complete(Cta& cta, MBarrier& barrier, int64_t bytes);

  std::string describe(const Thread& thread) const;  // what it waits for

 private:
  MBarrier& find(Thread& thread, const void* at, const void* code);
  void end_phase_if_over(Cta& cta, MBarrier& barrier);

  std::map<uint32_t, MBarrier> barriers_;
  int tma_clocks_ = 0;
};

}  // namespace flash_cute::emulator
