// Small kernels that show what the emulated machine allows and what it refuses: programs of a few
// steps, which test_emulated_machine.py writes down.
#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

#include "launch.h"
#include "machine.h"
#include "machine_hopper.h"
#include "tma.h"

namespace flash_cute::emulator {
namespace {

constexpr int kThreads = 64, kMaxSteps = 24;

using Chunk = unsigned __int128;

struct Shared {
  Chunk first[kThreads];
  Chunk second[kThreads];
  uint32_t words[kThreads][32];
  uint64_t barrier;
};

struct Params;

// A thread of the CTA, and its one register.
struct Me {
  const Params& p;
  Shared& s;
  int thread = thread_index();
  Chunk x = 0;

  // Its place in a box of 8 rows of 128 bytes, whose chunks are permuted.
  int swizzled() const { return thread / 8 * 8 + (thread % 8 ^ thread / 8); }
  // Its warp's part of the input as four matrices of 8 rows; `row` is where this lane's goes.
  void stmatrix(void* row) const;
};

struct Step {
  void (*run)(Me&, int a, int b);
  uint64_t who;  // a bit for each thread
  int a, b;
};

// Kernels read their parameters as freely as constants. So the program is a part of them.
struct Params {
  CUtensorMap map;      // of `in`, as 8 rows of 128 bytes
  CUtensorMap map_out;  // of `out`, likewise
  const Chunk* in;      // (kThreads)
  Chunk* out;           // (kThreads)
  float* sums;          // (kThreads)
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
       require(sync_cta_or(me.thread == who) == (who < kThreads), "hears of another vote");
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
    {"expect",
     [](Me& me, int sum, int) { require(me.p.sums[me.thread] == sum, "finds another sum"); }},
    {"count", [](Me& me, int, int) { next_number(me.p.counter); }},
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
    {"load", [](Me& me, int, int) { tma_load(&me.p.map, me.s.first, &me.s.barrier, {}); }},
    {"fence_proxy", [](Me&, int, int) { fence_async_proxy(); }},
    {"store",
     [](Me& me, int row, int) { tma_store(&me.p.map_out, me.s.first, {0, 0, row, 0, 0}); }},
    {"store_second",
     [](Me& me, int row, int) { tma_store(&me.p.map_out, me.s.second, {0, 0, row, 0, 0}); }},
    {"store_to_in", [](Me& me, int, int) { tma_store(&me.p.map, me.s.first, {}); }},
    {"store_odd", [](Me& me, int, int) { tma_store(&me.p.map_out, me.s.first + 1, {}); }},
    {"commit", [](Me&, int, int) { tma_store_commit(); }},
    {"wait_stores", [](Me&, int groups, int) { tma_store_wait(groups); }},
    {"stmatrix", [](Me& me, int, int) { me.stmatrix(&me.s.first[me.thread]); }},
    {"stmatrix_column", [](Me& me, int, int) { me.stmatrix(&me.s.words[me.thread]); }},
    {"dealloc", [](Me&, int registers, int) { register_dealloc(registers); }},
    {"alloc", [](Me&, int registers, int) { register_alloc(registers); }},
};

// "17:", "not 17:", "w0:" (the first warp), "odd:"; without any, all threads.
uint64_t threads_of(const std::string& who) {
  if (who == "odd:") return 0xaaaaaaaaaaaaaaaa;
  if (who[0] == 'w') return uint64_t{0xffffffff} << 32 * std::stoi(who.substr(1));
  return uint64_t{1} << std::stoi(who);
}

// Steps are separated by semicolons: "who: name a b". Launches are separated by bars.
void parse(const std::string& program, Step (&steps)[kMaxSteps]) {
  std::istringstream lines(program);
  Step* step = steps;
  for (std::string line; std::getline(lines, line, ';');) {
    std::istringstream words(line);
    std::string name;
    if (!(words >> name)) continue;
    step->who = ~uint64_t{0};
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
    const char* program, const void* in, void* out, uint64_t seed,
    flash_cute::emulator::Counters* counters, char* error, size_t error_bytes) {
  using namespace flash_cute::emulator;
  Session session{.seed = seed, .workers = 1};
  const int64_t bytes = kThreads * sizeof(Chunk);
  session.global.add({"in", GlobalMemory::Use::kInput, in, {1, 1, 1}, {}, bytes});
  session.global.add({"out", GlobalMemory::Use::kOutput, out, {1, 1, 1}, {}, bytes});
  float sums[kThreads];
  int counter;
  const std::string text = program;
  if (text.find('|') != text.npos) {
    session.global.add({"sums", GlobalMemory::Use::kWorkspace, sums, {1, 1, 1}, {}, sizeof sums});
    session.global.add(
        {"counter", GlobalMemory::Use::kWorkspace, &counter, {1, 1, 1}, {}, sizeof counter});
  }
  auto run = [](const void* params, void* shared) {
    const auto& p = *static_cast<const Params*>(params);
    Me me{p, *static_cast<Shared*>(shared)};
    for (const Step* step = p.steps; step->run; ++step) {
      if (step->who >> me.thread & 1) step->run(me, step->a, step->b);
    }
  };
  auto launch = [&] {
    std::istringstream launches(text);
    for (std::string steps; std::getline(launches, steps, '|');) {
      Params params{
          map_of(in), map_of(out), static_cast<const Chunk*>(in), static_cast<Chunk*>(out), sums,
          &counter,   {}};
      parse(steps, params.steps);
      run_grid(1, kThreads, sizeof(Shared), run, &params, sizeof params);
    }
  };
  return run_session(session, launch, counters, error, error_bytes);
}
