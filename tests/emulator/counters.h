// What a profiler would count. The Python side (emulator.py) reads the same struct.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <unordered_map>

namespace flash_cute::emulator {

// Shared memory is read or written in wavefronts of at most 128 bytes: 8 lanes of 16 bytes, 16 of
// 8, 32 of 4 or fewer. A wavefront takes one more cycle for each further word in its busiest bank.
struct BankCount {
  int64_t wavefronts;  // without conflicts
  int64_t conflicts;   // the cycles beyond
};

struct Counters {
  BankCount load_matrix;     // ldmatrix
  BankCount copy_async;      // cp.async's writes
  BankCount load;            // other reads of shared memory
  BankCount store;           // other writes
  BankCount store_matrix;    // stmatrix
  int64_t global_reads_16;   // of 16 bytes, by one thread
  int64_t global_reads;      // of fewer
  int64_t global_writes_16;  // likewise
  int64_t global_writes;
  int64_t global_reductions_16;  // likewise, of sums
  int64_t global_reductions;
  int64_t cta_barriers;      // once for all threads
  int64_t mma;               // m16n8k16, once a warp
  int64_t tma_load_bytes;    // from global memory
  int64_t tma_store_bytes;   // to it, likewise
  int64_t tma_reduce_bytes;  // added to sums there
  int64_t wgmma;             // once a warp

  void add(const Counters& other) {
    auto* mine = reinterpret_cast<int64_t*>(this);
    const auto* theirs = reinterpret_cast<const int64_t*>(&other);
    for (std::size_t i = 0; i < sizeof(Counters) / sizeof(int64_t); ++i) mine[i] += theirs[i];
  }
};

// Finds the accesses of a warp's lanes that are one instruction: of each lane the n-th access from
// the same place in the code. Lanes that skip an access by a predicate are missing from it. In a
// loop they take part in a later one.
class BankConflicts {
 public:
  void access(int thread, const void* code, uint32_t offset, int bytes, BankCount& count);
  void finish();  // counts the instructions that not all lanes took part in

  // The addresses of one instruction (a bit of `lanes` for each that takes part).
  static void add(const std::array<uint32_t, 32>& offsets, uint32_t lanes, int bytes,
                  BankCount& count);

 private:
  struct Instruction {
    std::array<uint32_t, 32> offsets;
    uint32_t lanes = 0;
    int bytes = 0;
    BankCount* count = nullptr;
  };
  struct Site {
    std::array<int, 32> executed{};  // by each lane
    int first = 0;                   // of the instructions that are kept: those before are complete
    std::deque<Instruction> kept;
  };
  std::unordered_map<uint64_t, Site> sites_;  // by code address and warp
};

}  // namespace flash_cute::emulator
