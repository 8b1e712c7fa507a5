// Small kernels that show what the emulated machine allows and what it refuses: programs of a few
// steps, which test_emulated_machine.py writes down.
#include <cuda.h>

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

#include "launch.h"
#include "machine.h"
#include "machine_hopper.h"
#include "sm90/bwd/finished_blocks.h"
#include "tma.h"

namespace flash_cute::emulator {
namespace {

constexpr int kMaxThreads = 384, kMaxSteps = 24;

using Chunk = unsigned __int128;

struct Shared {
  Chunk first[kMaxThreads];
  Chunk second[kMaxThreads];
  uint32_t words[kMaxThreads][32];
  uint64_t barrier;
};

struct Params;

// A thread of the CTA, and its one register.
struct Me {
  const Params& p;
  Shared& s;
  int thread = thread_index();
  Chunk x = 0;
  bool is_over = false;  // the answer to the last question

  // Its place in a box of 8 rows of 128 bytes, whose chunks are permuted.
  int swizzled() const { return thread / 8 * 8 + (thread % 8 ^ thread / 8); }
  // Its float of `first`.
  float& number() const { return reinterpret_cast<float*>(s.first)[thread]; }
  // Its warp's part of the input as four matrices of 8 rows; `row` is where this lane's goes.
  void stmatrix(void* row) const;
};

using Threads = std::bitset<kMaxThreads>;

struct Step {
  void (*run)(Me&, int a, int b);
  Threads who;
  int a, b;
};

// Kernels read their parameters as freely as constants. So the program is a part of them.
struct Params {
  CUtensorMap map;      // of `in`, as 8 rows of 128 bytes
  CUtensorMap map_out;  // of `out`, likewise
  int threads;
  const Chunk* in;  // (threads)
  Chunk* out;       // (threads)
  float* sums;      // (threads)
  int* counter;
  Step steps[kMaxSteps];
};

void Me::stmatrix(void* row) const {
  const auto* in = reinterpret_cast<const uint32_t*>(p.in + thread / 32 * 32);
  uint32_t words[4];
  for (int matrix = 0; matrix < 4; ++matrix) words[matrix] = in[matrix * 32 + thread % 32];
  store_matrix(row, words);
}

void copy(const Me& me, Chunk* target, const void* source, bool exists = true) {
  copy_async(target, source, exists);
  commit_copies();
}

constexpr struct {
  const char* name;
  void (*run)(Me&, int a, int b);
} kSteps[] = {
    // Plain accesses.
    {"in", [](Me& me, int offset, int) { me.x = me.p.in[me.thread + offset]; }},
    {"out", [](Me& me, int offset, int) { me.p.out[me.thread + offset] = me.x; }},
    {"out_pair", [](Me& me, int, int) { me.p.out[me.thread / 2] = me.x; }},
    {"write_in", [](Me& me, int, int) { const_cast<Chunk*>(me.p.in)[me.thread] = me.x + 1; }},
    {"read_out", [](Me& me, int, int) { me.x = me.p.out[me.thread ^ 1]; }},
    {"read_nowhere",
     [](Me& me, int, int) { me.x = *reinterpret_cast<const Chunk*>(16 * (me.thread + 1)); }},
    {"put", [](Me& me, int, int) { me.s.first[me.thread] = me.x; }},
    {"put_pair", [](Me& me, int, int) { me.s.first[me.thread / 2] = me.x; }},
    {"put_swizzled", [](Me& me, int, int) { me.s.first[me.swizzled()] = me.x; }},
    {"put_second", [](Me& me, int, int) { me.s.second[me.swizzled()] = me.x; }},
    {"put_word_row", [](Me& me, int, int) { me.s.words[0][me.thread] = 1; }},
    {"put_word_column", [](Me& me, int, int) { me.s.words[me.thread][0] = 1; }},
    {"get", [](Me& me, int flipped_bits, int) { me.x = me.s.first[me.thread ^ flipped_bits]; }},
    {"get_next",
     [](Me& me, int next, int) { me.x = me.s.first[(me.thread + next) % me.p.threads]; }},
    {"get_swizzled", [](Me& me, int, int) { me.x = me.s.first[me.swizzled()]; }},
    {"get_beyond",
     [](Me& me, int, int) { me.x = me.s.first[sizeof(Shared) / sizeof(Chunk) + me.thread]; }},
    // Barriers, and what warps do together.
    {"sync", [](Me&, int, int) { sync_cta(); }},
    {"sync_warp", [](Me&, int, int) { sync_warp(); }},
    {"sync_named", [](Me&, int id, int threads) { sync_named(id, threads); }},
    {"arrive_named", [](Me&, int id, int threads) { arrive_named(id, threads); }},
    {"vote",
     [](Me& me, int who, int) {
       require(sync_cta_or(me.thread == who) == (who < me.p.threads), "hears of another vote");
     }},
    {"shuffle", [](Me&, int, int) { shuffle(0, 0); }},
    {"ballot", [](Me&, int, int) { ballot(true); }},
    // Sums and counters in global memory; of turns.
    {"zero",
     [](Me& me, int, int) {
       me.p.sums[me.thread] = 0.f;
       if (me.thread == 0) *me.p.counter = 0;
     }},
    {"add", [](Me& me, int, int) { reduce_add(&me.p.sums[me.thread / 2], 1.f); }},
    {"add_4",
     [](Me& me, int offset, int) {
       reduce_add(&me.p.sums[me.thread * 4 % me.p.threads + offset], {1.f, 2.f, 3.f, 4.f});
     }},
    {"expect",
     [](Me& me, int sum, int) { require(me.p.sums[me.thread] == sum, "finds another sum"); }},
    {"expect_4",
     [](Me& me, int, int) {
       require(me.p.sums[me.thread] == 4 * (me.thread % 4 + 1), "finds another sum");
     }},
    // A queue of blocks in the place of the sums: each thread puts one, and takes what it finds.
    {"zero_queue",
     [](Me& me, int, int) {
       int* const queue = reinterpret_cast<int*>(me.p.sums);
       queue[DqFinished::kBlocks + me.thread] = -1;
       if (me.thread < DqFinished::kBlocks) queue[me.thread] = 0;
       if (me.thread == 0) *me.p.counter = 0;
     }},
    {"share_blocks",
     [](Me& me, int, int) {
       BwdWorkspace workspace{};
       workspace.finished = reinterpret_cast<int*>(me.p.sums);
       sm90::FinishedBlocks blocks(workspace);
       blocks.put(me.thread);
       for (int i; (i = blocks.take()) != sm90::FinishedBlocks::kNone;) me.p.out[i] = me.p.in[i];
     }},
    {"count", [](Me& me, int, int) { fetch_add(me.p.counter, 1); }},
    {"wait_turn", [](Me& me, int turn, int) { wait_for_turn(me.p.counter, turn); }},
    {"publish", [](Me&, int, int) { publish(); }},
    {"pass_turn", [](Me& me, int, int) { pass_turn(me.p.counter); }},
    // cp.async.
    {"copy", [](Me& me, int, int) { copy(me, &me.s.first[me.thread], &me.p.in[me.thread]); }},
    {"copy_second",
     [](Me& me, int, int) { copy(me, &me.s.second[me.thread], &me.p.in[me.thread]); }},
    {"copy_next",
     [](Me& me, int count, int) {
       copy(me, &me.s.first[me.thread], &me.p.in[me.thread + 1], me.thread < count);
     }},
    {"copy_misaligned",
     [](Me& me, int, int) {
       copy(me, &me.s.first[me.thread], reinterpret_cast<const char*>(me.p.in) + 8 * me.thread);
     }},
    {"wait_copies", [](Me&, int groups, int) { wait_copies(groups); }},
    // mbarriers, TMA, stmatrix, setmaxnreg.
    {"init", [](Me& me, int arrivals, int) { init_barrier(&me.s.barrier, arrivals); }},
    {"fence_init", [](Me&, int, int) { fence_barrier_init(); }},
    {"arrive", [](Me& me, int bytes, int) { arrive_at_barrier(&me.s.barrier, bytes); }},
    {"wait", [](Me& me, int parity, int) { wait_at_barrier(&me.s.barrier, parity); }},
    {"ask", [](Me& me, int parity, int) { me.is_over = is_barrier_over(&me.s.barrier, parity); }},
    {"wait_if_not",
     [](Me& me, int parity, int) {
       if (!me.is_over) return wait_at_barrier(&me.s.barrier, parity);
       check_barrier_is_over(&me.s.barrier, parity);
     }},
    {"load", [](Me& me, int, int) { tma_load(&me.p.map, me.s.first, &me.s.barrier, {}); }},
    {"bulk_load", [](Me& me, int offset,
                     int bytes) { bulk_load(me.p.in + offset, me.s.first, bytes, &me.s.barrier); }},
    {"bulk_load_odd",
     [](Me& me, int offset, int) {
       const auto* source = reinterpret_cast<const char*>(me.p.in) + offset;
       bulk_load(source, reinterpret_cast<char*>(me.s.first) + 8 - offset, 16, &me.s.barrier);
     }},
    {"fence_proxy", [](Me&, int, int) { fence_async_proxy(); }},
    {"store",
     [](Me& me, int row, int) { tma_store(&me.p.map_out, me.s.first, {0, 0, row, 0, 0}); }},
    {"store_second",
     [](Me& me, int row, int) { tma_store(&me.p.map_out, me.s.second, {0, 0, row, 0, 0}); }},
    {"store_to_in", [](Me& me, int, int) { tma_store(&me.p.map, me.s.first, {}); }},
    {"store_odd", [](Me& me, int, int) { tma_store(&me.p.map_out, me.s.first + 1, {}); }},
    {"commit", [](Me&, int, int) { tma_store_commit(); }},
    {"wait_stores", [](Me&, int groups, int) { tma_store_wait(groups); }},
    {"put_number", [](Me& me, int x, int) { me.number() = static_cast<float>(x); }},
    {"bulk_add",
     [](Me& me, int offset, int bytes) {
       bulk_reduce_add(me.p.sums + offset, me.s.first, bytes ? bytes : 4 * me.p.threads);
     }},
    {"wait_complete", [](Me&, int, int) { bulk_wait_complete(); }},
    {"stmatrix", [](Me& me, int, int) { me.stmatrix(&me.s.first[me.thread]); }},
    {"stmatrix_column", [](Me& me, int, int) { me.stmatrix(&me.s.words[me.thread]); }},
    {"dealloc", [](Me&, int registers, int) { register_dealloc(registers); }},
    {"alloc", [](Me&, int registers, int) { register_alloc(registers); }},
};

// "17:", "not 17:", "w0:" (the first warp), "g0:" (the first warpgroup), "odd:"; without any, all
// threads.
Threads threads_of(const std::string& who) {
  const int together = who[0] == 'w' ? 32 : who[0] == 'g' ? 128 : 1;
  Threads threads;
  for (int i = 0; i < kMaxThreads; ++i) {
    threads[i] = who == "odd:" ? i % 2 : i / together == std::stoi(who.substr(together > 1));
  }
  return threads;
}

// Steps are separated by semicolons: "who: name a b". Launches are separated by bars.
void parse(const std::string& program, Step (&steps)[kMaxSteps]) {
  std::istringstream lines(program);
  Step* step = steps;
  for (std::string line; std::getline(lines, line, ';');) {
    std::istringstream words(line);
    std::string name;
    if (!(words >> name)) continue;
    step->who.set();
    if (name == "not") {
      words >> name;
      step->who = ~threads_of(name);
      words >> name;
    } else if (name.back() == ':') {
      step->who = threads_of(name);
      words >> name;
    }
    const auto known =
        std::ranges::find(kSteps, name, [](const auto& s) { return std::string(s.name); });
    if (known == std::end(kSteps) || step == std::end(steps) - 1) {
      throw std::runtime_error("no step " + line + ", or too many");
    }
    step->run = known->run;
    words >> step->a >> step->b;
    ++step;
  }
}

// Of 8 rows of 128 bytes.
CUtensorMap map_of(const void* data) {
  const cuuint64_t sizes[] = {64, 1, 8, 1, 1}, strides[] = {128, 128, 1024, 1024};
  const cuuint32_t box[] = {64, 1, 8, 1, 1}, steps[] = {1, 1, 1, 1, 1};
  CUtensorMap map = {};
  reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode_tensor_map())(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, const_cast<void*>(data), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

}  // namespace
}  // namespace flash_cute::emulator

// Runs the program, each launch of it on one CTA. Sums and counters are there if it has several.
extern "C" __attribute__((visibility("default"))) int emulate_small(
    const char* program, int threads, const void* in, void* out, uint64_t seed,
    flash_cute::emulator::Counters* counters, char* error, size_t error_bytes) {
  using namespace flash_cute::emulator;
  Session session{.seed = seed, .workers = 1};
  const int64_t bytes = threads * sizeof(Chunk);
  session.global.add({"in", GlobalMemory::Use::kInput, in, {1, 1, 1}, {}, bytes});
  session.global.add({"out", GlobalMemory::Use::kOutput, out, {1, 1, 1}, {}, bytes});
  alignas(16) float sums[kMaxThreads + flash_cute::DqFinished::kBlocks];
  int counter;
  const std::string text = program;
  if (text.find('|') != text.npos) {
    const bool is_queue = text.find("zero_queue") != text.npos;
    const int64_t sum_bytes =
        (threads + is_queue * flash_cute::DqFinished::kBlocks) * sizeof(float);
    session.global.add({"sums", GlobalMemory::Use::kWorkspace, sums, {1, 1, 1}, {}, sum_bytes});
    session.global.add(
        {"counter", GlobalMemory::Use::kWorkspace, &counter, {1, 1, 1}, {}, sizeof counter});
  }
  auto run = [](const void* params, void* shared) {
    const auto& p = *static_cast<const Params*>(params);
    Me me{p, *static_cast<Shared*>(shared)};
    for (const Step* step = p.steps; step->run; ++step) {
      if (step->who[me.thread]) step->run(me, step->a, step->b);
    }
  };
  auto launch = [&] {
    std::istringstream launches(text);
    for (std::string steps; std::getline(launches, steps, '|');) {
      Params params{
          map_of(in), map_of(out), threads, static_cast<const Chunk*>(in), static_cast<Chunk*>(out),
          sums,       &counter,    {}};
      parse(steps, params.steps);
      run_grid(1, threads, sizeof(Shared), run, &params, sizeof params);
    }
  };
  return run_session(session, launch, counters, error, error_bytes);
}
