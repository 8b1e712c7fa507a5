// Small kernels that show what the emulated machine allows and what it refuses
// (test_emulated_machine.py): what a name promises is all that its kernel does.
#include <cstring>
#include <iterator>

#include "launch.h"
#include "machine.h"

namespace flash_cute::emulator {
namespace {

constexpr int kThreads = 64;

using Chunk = unsigned __int128;

struct Me;

struct Params {
  const Chunk* in;  // (kThreads)
  Chunk* out;       // (kThreads)
  void (*body)(const Me&);
};

struct Shared {
  Chunk first[kThreads];
  Chunk second[kThreads];
  uint32_t words[kThreads][32];
};

// For one thread of the block.
struct Me {
  const Params& params;
  Shared& shared;
  int thread = thread_index();

  Chunk in() const { return params.in[thread]; }
  void out(Chunk chunk) const { params.out[thread] = chunk; }
  void put(Chunk chunk) const { shared.first[thread] = chunk; }
  Chunk get(int other) const { return shared.first[other]; }
  Chunk in_next_lane() const { return get(thread ^ 1); }
  Chunk in_next_warp() const { return get(thread ^ 32); }
  void begin_copy(Chunk (&target)[kThreads]) const {
    copy_async(&target[thread], &params.in[thread], true);
    commit_copies();
  }
};

struct SmallKernel {
  const char* name;
  void (*body)(const Me&);
};

constexpr SmallKernel kKernels[] = {
    {"a barrier orders threads",
     [](const Me& me) {
       me.put(me.in());
       sync_block();
       me.out(me.in_next_warp());
     }},
    {"a named barrier orders threads",
     [](const Me& me) {
       me.put(me.in());
       sync_named(1, kThreads);
       me.out(me.in_next_warp());
     }},
    {"a warp's barrier orders its lanes",
     [](const Me& me) {
       me.put(me.in());
       sync_warp();
       me.out(me.in_next_lane());
     }},
    {"a warp's barrier does not order other warps",
     [](const Me& me) {
       me.put(me.in());
       sync_warp();
       me.out(me.in_next_warp());
     }},
    {"a named barrier of each warp does not order the other",
     [](const Me& me) {
       me.put(me.in());
       sync_named(1 + me.thread / 32, 32);
       me.out(me.in_next_warp());
     }},
    {"read after write without a barrier",
     [](const Me& me) {
       me.put(me.in());
       me.out(me.in_next_lane());
     }},
    {"write after read without a barrier",
     [](const Me& me) {
       me.put(me.in());
       sync_block();
       const Chunk chunk = me.in_next_warp();
       me.put(chunk);
       me.out(chunk);
     }},
    {"write after write without a barrier",
     [](const Me& me) {
       me.shared.first[me.thread / 2] = me.in();
       me.out(me.in());
     }},
    {"read of what nobody has written", [](const Me& me) { me.out(me.get(me.thread)); }},
    {"read beyond shared memory",
     [](const Me& me) { me.out(me.shared.first[sizeof(Shared) / sizeof(Chunk) + me.thread]); }},
    {"a copy that is waited for, and a barrier",
     [](const Me& me) {
       me.begin_copy(me.shared.first);
       wait_copies(0);
       sync_block();
       me.out(me.in_next_warp());
     }},
    {"a copy that is waited for is there for its thread",
     [](const Me& me) {
       me.begin_copy(me.shared.first);
       wait_copies(0);
       me.out(me.get(me.thread));
     }},
    {"a copy that is not waited for",
     [](const Me& me) {
       me.begin_copy(me.shared.first);
       sync_block();
       me.out(me.get(me.thread));
     }},
    {"a copy that is waited for without a barrier",
     [](const Me& me) {
       me.begin_copy(me.shared.first);
       wait_copies(0);
       me.out(me.in_next_lane());
     }},
    {"a wait for all groups but the newest",
     [](const Me& me) {
       me.begin_copy(me.shared.first);
       me.begin_copy(me.shared.second);
       wait_copies(1);
       me.out(me.shared.first[me.thread]);
     }},
    {"a wait for an older group",
     [](const Me& me) {
       me.begin_copy(me.shared.second);
       me.begin_copy(me.shared.first);
       wait_copies(1);
       me.out(me.shared.first[me.thread]);
     }},
    {"a copy to where others read",
     [](const Me& me) {
       me.put(me.in());
       sync_block();
       me.out(me.in_next_warp());
       me.begin_copy(me.shared.first);
     }},
    {"a copy from beyond the input",
     [](const Me& me) {
       copy_async(&me.shared.first[me.thread], &me.params.in[me.thread + 1], true);
       me.out(me.in());
     }},
    {"a copy from beyond the input, switched off",
     [](const Me& me) {
       copy_async(&me.shared.first[me.thread], &me.params.in[me.thread + 1], me.thread < 63);
       wait_copies(0);
       me.out(me.get(me.thread));
     }},
    {"read beyond the input", [](const Me& me) { me.out(me.params.in[me.thread + 1]); }},
    {"misaligned read of the input",
     [](const Me& me) {
       const auto* bytes = reinterpret_cast<const char*>(me.params.in);
       copy_async(&me.shared.first[me.thread], bytes + 8 * me.thread, true);
       me.out(me.in());
     }},
    {"read from nowhere",
     [](const Me& me) { me.out(*reinterpret_cast<const Chunk*>(16 * (me.thread + 1))); }},
    {"write beyond the output", [](const Me& me) { me.params.out[me.thread + 1] = me.in(); }},
    {"write to the input",
     [](const Me& me) { const_cast<Chunk*>(me.params.in)[me.thread] = me.in() + 1; }},
    {"read of the output",
     [](const Me& me) {
       me.out(me.in());
       me.put(me.params.out[me.thread ^ 1]);
     }},
    {"two writes of the same output", [](const Me& me) { me.params.out[me.thread / 2] = me.in(); }},
    {"an output left out",
     [](const Me& me) {
       if (me.thread != 17) me.out(me.in());
     }},
    {"lanes of a warp part ways",
     [](const Me& me) {
       if (me.thread % 2) {
         shuffle(0, 0);
       } else {
         ballot(true);
       }
       me.out(me.in());
     }},
    {"a barrier that some threads skip",
     [](const Me& me) {
       if (me.thread != 17) sync_block();
       me.out(me.in());
     }},
    {"threads expected differ at a barrier",
     [](const Me& me) {
       sync_named(1, me.thread < 32 ? 32 : 64);
       me.out(me.in());
     }},
    {"stores of neighbouring words",
     [](const Me& me) {
       me.shared.words[0][me.thread] = 1;
       me.out(me.in());
     }},
    {"stores of a column of words",
     [](const Me& me) {
       me.shared.words[me.thread][0] = 1;
       me.out(me.in());
     }},
};

}  // namespace
}  // namespace flash_cute::emulator

// Runs the kernel of that name on one block; 2 if there is none.
extern "C" __attribute__((visibility("default"))) int emulate_small(
    const char* name, const void* in, void* out, uint64_t seed,
    flash_cute::emulator::Counters* counters, char* error, size_t error_bytes) {
  using namespace flash_cute::emulator;
  for (const SmallKernel& kernel : kKernels) {
    if (std::strcmp(kernel.name, name) != 0) continue;
    Session session{.seed = seed, .workers = 1};
    const int64_t bytes = kThreads * sizeof(Chunk);
    session.global.add({"in", GlobalMemory::Use::kInput, in, {1, 1, 1}, {}, bytes});
    session.global.add({"out", GlobalMemory::Use::kOutput, out, {1, 1, 1}, {}, bytes});
    const Params params{static_cast<const Chunk*>(in), static_cast<Chunk*>(out), kernel.body};
    auto run = [](const void* params, void* shared) {
      const auto& p = *static_cast<const Params*>(params);
      p.body({p, *static_cast<Shared*>(shared)});
    };
    auto launch = [&] { run_grid(1, kThreads, sizeof(Shared), run, &params, sizeof params); };
    return run_session(session, launch, counters, error, error_bytes);
  }
  return 2;
}
