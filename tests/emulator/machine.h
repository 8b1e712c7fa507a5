// What an emulated kernel asks of its machine. Every function here is called by one thread of the
// emulated CTA and acts for that thread; warp-wide ones return when all 32 lanes have called.
#pragma once

#include <cstdint>

namespace flash_cute::emulator {

int thread_index();
int cta_index();

// Barriers: all threads of the CTA, `threads` of them at the named barrier `id`, a warp.
void sync_cta();
bool sync_cta_or(bool predicate);  // whether it holds for any thread
void sync_named(int id, int threads);
void sync_warp();

// Warp shuffles and votes, of all 32 lanes.
uint32_t shuffle(uint32_t value, int source_lane);
uint32_t ballot(bool predicate);

// Ends the CTA with `what` the thread has done where `holds` is false.
void require(bool holds, const char* what);

// mma.sync.m16n8k16, fp32 accumulation: d = a b + c. Of TF32 m16n8k8, which leaves out the last 13
// bits of operands.
enum class Operand { kHalf, kBFloat16 };
void mma_m16n8k16(Operand type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const float (&c)[4]);
void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]);

// ldmatrix.x4: `row` is the address of one of the 32 rows of 16 bytes.
void load_matrix(const void* row, uint32_t (&d)[4], bool transposed);

// cp.async of 16 bytes, or of 16 zeros without reading `source`; its groups, as in PTX.
void copy_async(void* target, const void* source, bool exists);
void commit_copies();
void wait_copies(int groups_in_flight);

// Sums and counters in global memory to which all CTAs of a launch may add: cells of a workspace
// that an earlier launch has written. Of turns, see csrc/cute_fa2/common/platform.h.
void reduce_add(float* sum, float x);
int fetch_add(int* counter, int number);
int load_acquire(const int* word);
void wait_for_turn(const int* counter, int turn);
void publish();
void pass_turn(int* counter);
void raise_flag(int* flag);
void wait_for_flag(const int* flag);
void store_number(int* word, int number);
int wait_for_number(const int* word);

// Runs `kernel` for every thread of every CTA, on emulated memories. CTAs start in an order that
// the session's seed decides; seed 0 leaves them in theirs.
using Kernel = void (*)(const void* params, void* shared_memory);
void run_grid(int64_t ctas, int threads, int shared_bytes, Kernel kernel, const void* params,
              int params_bytes);

}  // namespace flash_cute::emulator
