// The functions of machine.h, and the callbacks by which the compiler reports plain accesses.
#include "machine.h"

#include <atomic>
#include <cstring>

#include "cta.h"
#include "global_memory.h"

namespace flash_cute::emulator {
namespace {

// Where the kernel called the function that asks.
#define CALLER __builtin_extract_return_addr(__builtin_return_address(0))

void read_global(Thread& thread, const void* address, int bytes, const void* code) {
  const std::string wrong = thread.cta->launch().global->read(address, bytes);
  if (!wrong.empty()) {
    fail(thread, code, "reads %d bytes at %p, %s", bytes, address, wrong.c_str());
  }
  Counters& counters = thread.cta->counters;
  ++(bytes == 16 ? counters.global_reads_16 : counters.global_reads);
}

void write_global(Thread& thread, const void* address, int bytes, const void* code) {
  const std::string wrong = thread.cta->launch().global->write(address, bytes);
  if (!wrong.empty()) {
    fail(thread, code, "writes %d bytes at %p, %s", bytes, address, wrong.c_str());
  }
  Counters& counters = thread.cta->counters;
  ++(bytes == 16 ? counters.global_writes_16 : counters.global_writes);
}

}  // namespace

int thread_index() { return running->index; }
int cta_index() { return running->cta->index(); }

void sync_cta() { running->cta->barrier(*running, 0, running->cta->launch().threads, CALLER); }
bool sync_cta_or(bool predicate) {
  const Vote vote = predicate ? Vote::kYes : Vote::kNo;
  running->cta->barrier(*running, 0, running->cta->launch().threads, CALLER, true, vote);
  return running->any_voted;
}
void sync_named(int id, int threads) { running->cta->barrier(*running, id, threads, CALLER); }

void sync_warp() {
  auto complete = [](Cta&, Thread* lanes, void* const(&)[32]) {
    Gathering warp;
    warp.reset(lanes->cta->clock_entries());
    for (int lane = 0; lane < 32; ++lane) warp.add(lanes[lane].clocks);
    const SharedNews news = warp.news();
    for (int lane = 0; lane < 32; ++lane) {
      lanes[lane].clocks.hear(news);
      lanes[lane].clocks.advance();
    }
  };
  running->cta->with_warp(*running, "syncwarp", nullptr, complete, CALLER);
}

uint32_t shuffle(uint32_t value, int source_lane) {
  struct Operands {
    uint32_t value;
    int source;
    uint32_t result;
  } mine{value, source_lane & 31, 0};
  auto complete = [](Cta&, Thread*, void* const(&lanes)[32]) {
    for (void* lane : lanes) {
      auto* operands = static_cast<Operands*>(lane);
      operands->result = static_cast<Operands*>(lanes[operands->source])->value;
    }
  };
  running->cta->with_warp(*running, "a shuffle", &mine, complete, CALLER);
  return mine.result;
}

void require(bool holds, const char* what) {
  if (!holds) fail(*running, CALLER, "%s", what);
}

uint32_t ballot(bool predicate) {
  struct Operands {
    bool predicate;
    uint32_t result;
  } mine{predicate, 0};
  auto complete = [](Cta&, Thread*, void* const(&lanes)[32]) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) {
      votes |= static_cast<uint32_t>(static_cast<Operands*>(lanes[i])->predicate) << i;
    }
    for (void* lane : lanes) static_cast<Operands*>(lane)->result = votes;
  };
  running->cta->with_warp(*running, "a vote", &mine, complete, CALLER);
  return mine.result;
}

void load_matrix(const void* row, uint32_t (&d)[4], bool transposed) {
  struct Operands {
    const void* row;
    uint32_t* d;
    bool transposed;
    const void* code;
  } mine{row, d, transposed, CALLER};
  auto complete = [](Cta& cta, Thread* threads, void* const(&lanes)[32]) {
    std::array<uint32_t, 32> offsets;
    uint16_t rows[32][8];
    for (int i = 0; i < 32; ++i) {
      const auto& lane = *static_cast<Operands*>(lanes[i]);
      if (!cta.shared.contains(lane.row)) {
        fail(threads[i], lane.code, "gives ldmatrix the row %p, which is not in shared memory",
             lane.row);
      }
      cta.shared.read(threads[i], lane.row, 16, lane.code);
      offsets[i] = cta.shared.offset_of(lane.row);
      std::memcpy(rows[i], lane.row, 16);
    }
    BankConflicts::add(offsets, ~0u, 16, cta.counters.load_matrix);
    // Of each 8 x 8 matrix a lane gets 2 neighbouring elements of row lane / 4, or of column.
    for (int i = 0; i < 32; ++i) {
      const auto& lane = *static_cast<Operands*>(lanes[i]);
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int outer = i / 4, inner = i % 4 * 2;
        const uint16_t (*m)[8] = rows + 8 * matrix;
        const uint16_t low = lane.transposed ? m[inner][outer] : m[outer][inner];
        const uint16_t high = lane.transposed ? m[inner + 1][outer] : m[outer][inner + 1];
        lane.d[matrix] = low | static_cast<uint32_t>(high) << 16;
      }
    }
  };
  running->cta->with_warp(*running, transposed ? "ldmatrix.trans" : "ldmatrix", &mine, complete,
                          CALLER);
}

void copy_async(void* target, const void* source, bool exists) {
  Thread& thread = *running;
  const void* code = CALLER;
  PendingCopy copy{target, {}, code, thread.copy_group};
  if (exists) {
    read_global(thread, source, 16, code);
    std::memcpy(copy.bytes, source, 16);
  }
  if (!thread.cta->shared.contains(target)) {
    fail(thread, code, "copies to %p, which is not in shared memory", target);
  }
  thread.cta->shared.begin_copy(thread, target, 16, code);
  thread.cta->conflicts.access(thread.index, code, thread.cta->shared.offset_of(target), 16,
                               thread.cta->counters.copy_async);
  thread.copies.push_back(copy);
}

void commit_copies() { ++running->copy_group; }

// As in PTX, `wait_group 0` takes in copies of no group yet: CuTe makes `wait_all` of it.
void wait_copies(int groups_in_flight) {
  Thread& thread = *running;
  const int64_t landed =
      groups_in_flight == 0 ? thread.copy_group : thread.copy_group - groups_in_flight - 1;
  for (; !thread.copies.empty() && thread.copies.front().group <= landed;
       thread.copies.pop_front()) {
    const PendingCopy& copy = thread.copies.front();
    thread.cta->shared.land_copy(thread, copy.target, copy.bytes, 16, copy.code);
  }
}

void reduce_add(float* sum, float x) { running->cta->add(*running, sum, {&x, 1}, CALLER); }

int fetch_add(int* counter, int number) {
  running->cta->check_sum(*running, counter, 4, CALLER);
  const int before = std::atomic_ref(*counter).fetch_add(number, std::memory_order_relaxed);
  running->cta->interrupt(*running);
  return before;
}

int load_acquire(const int* word) {
  running->cta->check_sum(*running, word, 4, CALLER);
  const int now = Turns::value(word);
  running->cta->interrupt(*running);
  return now;
}

void wait_for_turn(const int* counter, int turn) {
  running->cta->check_sum(*running, counter, 4, CALLER);
  running->cta->begin_turn(*running, counter, turn, CALLER);
}

void publish() {
  running->published = running->clocks.epoch();
  running->added = Epoch();
}

void pass_turn(int* counter) {
  running->cta->check_sum(*running, counter, 4, CALLER);
  running->cta->end_turn(*running, counter, CALLER);
}

void raise_flag(int* flag) {
  running->cta->check_sum(*running, flag, 4, CALLER);
  running->cta->raise_flag(*running, flag, CALLER);
}

void wait_for_flag(const int* flag) {
  running->cta->check_sum(*running, flag, 4, CALLER);
  running->cta->wait_for_counter(*running, flag, 1, CALLER);
}

void store_number(int* word, int number) {
  running->cta->check_sum(*running, word, 4, CALLER);
  running->cta->store_number(*running, word, number, CALLER);
}

int wait_for_number(const int* word) {
  running->cta->check_sum(*running, word, 4, CALLER);
  running->cta->wait_for_counter(*running, word, Turns::kAny, CALLER);
  return Turns::value(word);
}

namespace {

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];

// What is read as freely as on a GPU: the launch's parameters, and constants.
bool is_constant(const Launch& launch, const void* address) {
  const auto* at = static_cast<const char*>(address);
  const auto* params = static_cast<const char*>(launch.params);
  return (params <= at && at < params + launch.params_bytes) || (__ehdr_start <= at && at < _end);
}

// A plain access beyond the thread's stack.
template <bool kWrite>
[[gnu::noinline]] void touch_memory(Thread& thread, const void* address, int bytes,
                                    const void* code) {
  Cta& cta = *thread.cta;
  if (cta.shared.contains(address)) {
    kWrite ? cta.shared.write(thread, address, bytes, code)
           : cta.shared.read(thread, address, bytes, code);
    cta.conflicts.access(thread.index, code, cta.shared.offset_of(address), bytes,
                         kWrite ? cta.counters.store : cta.counters.load);
  } else if (kWrite) {
    write_global(thread, address, bytes, code);
  } else if (!is_constant(cta.launch(), address)) {
    read_global(thread, address, bytes, code);
  }
}

// A plain access of the kernel's code.
template <bool kWrite>
[[gnu::always_inline]] inline void touch(const void* address, int bytes, const void* code) {
  Thread* thread = running;
  if (!thread) return;  // launch code
  if (reinterpret_cast<uintptr_t>(address) - thread->stack < Thread::kStackBytes) {
    if (thread->wgmmas_in_flight) {
      thread->cta->warpgroups.check_registers(*thread, address, bytes, kWrite, code);
    }
    return;
  }
  touch_memory<kWrite>(*thread, address, bytes, code);
}

// A range, as the accesses that it would be made of.
template <bool kWrite>
void touch_range(const char* begin, size_t bytes, const void* code) {
  for (const char* end = begin + bytes; begin < end;) {
    int piece = 16;
    while (piece > end - begin || reinterpret_cast<uintptr_t>(begin) % piece != 0) piece /= 2;
    touch<kWrite>(begin, piece, code);
    begin += piece;
  }
}

}  // namespace
}  // namespace flash_cute::emulator

// What -fsanitize=thread makes the compiler call ahead of each access. libtsan is not linked.
#define ACCESSES(bytes)                                                                      \
  void __tsan_read##bytes(void* p) { flash_cute::emulator::touch<false>(p, bytes, CALLER); } \
  void __tsan_write##bytes(void* p) { flash_cute::emulator::touch<true>(p, bytes, CALLER); } \
  void __tsan_unaligned_read##bytes(void* p) {                                               \
    flash_cute::emulator::touch<false>(p, bytes, CALLER);                                    \
  }                                                                                          \
  void __tsan_unaligned_write##bytes(void* p) {                                              \
    flash_cute::emulator::touch<true>(p, bytes, CALLER);                                     \
  }
extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) {
  flash_cute::emulator::touch_range<false>(static_cast<char*>(p), bytes, CALLER);
}
void __tsan_write_range(void* p, size_t bytes) {
  flash_cute::emulator::touch_range<true>(static_cast<char*>(p), bytes, CALLER);
}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
