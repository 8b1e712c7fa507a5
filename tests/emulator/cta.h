// A CTA on the emulated machine: its threads are fibers of one OS thread. One runs at a time; they
// take turns where they wait.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "clocks.h"
#include "counters.h"
#include "machine.h"
#include "mbarrier.h"
#include "shared_memory.h"
#include "tma.h"
#include "turns.h"
#include "warpgroup.h"

namespace flash_cute::emulator {

class Cta;
class GlobalMemory;

// What is the same for all CTAs of a launch.
struct Launch {
  Kernel kernel;
  const void* params;
  int params_bytes;
  int threads;
  int shared_bytes;
  uint64_t seed;
  GlobalMemory* global;
  Turns* turns;
};

// An asynchronous copy that has not been waited for.
struct PendingCopy {
  void* target;
  unsigned char bytes[16];
  const void* code;
  int64_t group;
};

struct Thread {
  static constexpr size_t kStackBytes = 256 * 1024;

  Cta* cta;
  int index;
  bool done;
  uintptr_t stack;  // its lowest address
  boost::context::detail::fcontext_t context;
  Clocks clocks;
  const char* waits_at;       // what it waits for, while it does
  const void* waits_in;       // where in the code
  const MBarrier* waits_for;  // the barrier in shared memory, if that is what it waits for
  uint32_t parity;            // of the phase
  bool any_voted;             // for, at the last barrier at which it voted
  int64_t copy_group;         // the one that its copies join until the next commit
  std::deque<PendingCopy> copies;
  int64_t tma_store_group;  // likewise, of its TMA stores
  Epoch added, published;   // what it last added in a turn, until it has published that
  const int* turn;          // the counter of that turn
  bool wgmmas_in_flight;    // which may read and write its registers at any time
};

// Ends the CTA with a sentence that begins with the thread. Never returns; set a breakpoint here.
[[noreturn]] void fail(const Thread& thread, const void* code, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// To sums in global memory, to which other CTAs add as well.
void add_to(float* sums, std::span<const float> x);

// "at <address in the library>", for the Python side to turn into a line of the source.
std::string place(const void* code);

// What a thread has to say at a barrier.
enum class Vote { kNone, kNo, kYes };

class Cta {
 public:
  explicit Cta(const Launch& launch);
  ~Cta();
  Cta(const Cta&) = delete;

  // Runs one CTA to its end. Returns what went wrong, or nothing.
  std::string run(int index);

  int index() const { return index_; }
  const Launch& launch() const { return launch_; }

  // For the running thread. Waits until `count` threads have come to the barrier; all that any of
  // them did before is then ordered before all that those who wait do after. Some may go on without
  // waiting. All of them vote or none does.
  void barrier(Thread& thread, int id, int count, const void* code, bool waits = true,
               Vote vote = Vote::kNone);
  // For the running thread: waits until all lanes of its warp have come, each with its operands.
  // Then `complete` does the work of all.
  using Complete = void (*)(Cta& cta, Thread* lane0, void* const (&operands)[32]);
  void with_warp(Thread& thread, const char* name, void* operands, Complete complete,
                 const void* code);
  [[noreturn]] void fail(std::string what);

  // For the running thread: lets others run until `wake` is called for it, or as they come.
  void wait(Thread& thread, const char* at, const void* code);
  void wake(Thread& thread) { warps_[thread.index / 32].runnable |= 1u << thread.index % 32; }
  void yield(Thread& thread) { switch_from(thread); }

  // For the running thread: now and then lets others run, of this CTA and of other workers.
  void interrupt(Thread& thread);

  // For the running thread: turns that threads of the CTA have, and what they add in them. A thread
  // adds in the turn that began before, as barriers tell it.
  void wait_for_counter(Thread& thread, const int* counter, int value, const void* code);
  void check_published(const Thread& thread, const void* code) const;
  void store_number(const Thread& thread, int* word, int number, const void* code);
  void raise_flag(const Thread& thread, int* flag, const void* code);
  void begin_turn(Thread& thread, const int* counter, int turn, const void* code);
  void add_in_turn(Thread& thread, const void* code);
  void add(Thread& thread, float* sums, std::span<const float> x, const void* code);
  void check_sum(const Thread& thread, const void* address, int bytes, const void* code) const;
  void end_turn(Thread& thread, int* counter, const void* code);

  // Clocks have an entry for each thread, and some for TMA.
  int clock_entries() const { return launch_.threads + kTmaClocks; }
  static constexpr int kTmaClocks = 32;

  SharedMemory shared;
  MBarriers mbarriers;
  Tma tma;
  Warpgroups warpgroups;
  BankConflicts conflicts;
  Counters counters{};

 private:
  struct Barrier {
    int count = 0;
    int arrived = 0;
    bool votes = false;
    bool any_voted = false;
    std::vector<bool> has_arrived;
    std::vector<Thread*> waiting;
    Gathering gathering;
  };
  struct Warp {
    uint32_t runnable = 0;  // a bit for each lane
    uint32_t arrived = 0;   // at the warp-wide operation
    const char* operation = nullptr;
    Complete complete = nullptr;
    void* operands[32];
  };

  static void enter(boost::context::detail::transfer_t from);
  uint32_t random();
  Thread* pick();  // one that can run; none when all wait
  Thread* next();  // likewise, while copies arrive
  bool only_one_can_run() const;
  void switch_from(Thread& thread);  // to another; returns when it is this one's turn again
  void resume(Thread& thread);
  std::string deadlock() const;

  const Launch& launch_;
  int index_ = 0;
  char* stacks_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::map<int, Barrier> barriers_;
  size_t warp_ = 0;  // the one that runs
  int alive_ = 0;
  std::map<const int*, Epoch> turns_;  // by counter: when it began
  bool had_turn_ = false;
  uint64_t random_ = 0;
  boost::context::detail::fcontext_t scheduler_ = nullptr;
  std::string failure_;
};

// The thread that runs on this OS thread; none between CTAs and in the scheduler.
extern thread_local Thread* running __attribute__((tls_model("initial-exec")));

}  // namespace flash_cute::emulator
