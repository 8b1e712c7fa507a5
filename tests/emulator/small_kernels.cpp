// Small kernels that show what the emulated machine allows and what it refuses
// (test_emulated_machine.py): what a name promises is all that its kernel does.
#include <cuda.h>

#include <cstring>
#include <iterator>

#include "launch.h"
#include "machine.h"
#include "machine_hopper.h"
#include "tensor_copy.h"

namespace flash_cute::emulator {
namespace {

constexpr int kThreads = 64;

using Chunk = unsigned __int128;

struct Me;

struct Params {
  CUtensorMap map;  // of `in`, as 8 rows of 128 bytes
  const Chunk* in;  // (kThreads)
  Chunk* out;       // (kThreads)
  void (*body)(const Me&);
};

struct Shared {
  Chunk first[kThreads];
  Chunk second[kThreads];
  uint32_t words[kThreads][32];
  uint64_t barrier;
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
  void init(int arrivals) const {
    if (thread == 0) {
      init_barrier(&shared.barrier, arrivals);
      publish_barriers();
    }
    sync_block();
  }
  void arrive(int64_t expected_bytes = 0) const {
    arrive_at_barrier(&shared.barrier, expected_bytes);
  }
  void wait(uint32_t parity) const { wait_at_barrier(&shared.barrier, parity); }
  void begin_box() const {
    if (thread == 0) {
      arrive(sizeof shared.first);
      load_box(&params.map, shared.first, &shared.barrier, {});
    }
  }
  // This thread's chunk of the box, whose chunks are permuted.
  Chunk get_of_box() const { return get(thread / 8 * 8 + (thread % 8 ^ thread / 8)); }
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
    {"a barrier with a vote orders threads",
     [](const Me& me) {
       me.put(me.in());
       require(sync_block_or(me.thread == 17), "hears of no vote");
       require(!sync_block_or(false), "hears of a vote");
       me.out(me.in_next_warp());
     }},
    {"a barrier at which some threads vote",
     [](const Me& me) {
       me.thread < 32 ? static_cast<void>(sync_block_or(true)) : sync_block();
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
    {"warps that arrive at one barrier and wait at another",
     [](const Me& me) {
       me.put(me.in());
       arrive_named(1 + me.thread / 32, kThreads);
       sync_named(2 - me.thread / 32, kThreads);
       me.out(me.in_next_warp());
     }},
    {"who arrives without waiting knows nothing of the others",
     [](const Me& me) {
       me.put(me.in());
       arrive_named(1, kThreads);
       me.out(me.in_next_warp());
     }},
    {"two arrivals at a named barrier",
     [](const Me& me) {
       if (me.thread < 32) arrive_named(1, kThreads);
       sync_named(1, kThreads);
       me.out(me.in());
     }},
    {"a barrier in shared memory orders threads",
     [](const Me& me) {
       me.init(kThreads);
       me.put(me.in());
       me.arrive();
       me.wait(0);
       me.out(me.in_next_warp());
     }},
    {"the phase before the first is over",
     [](const Me& me) {
       me.init(1);
       me.wait(1);
       me.out(me.in());
     }},
    {"a wait for the phase before",
     [](const Me& me) {
       me.init(kThreads);
       me.put(me.in());
       me.arrive();
       me.wait(1);
       me.out(me.in_next_warp());
     }},
    {"a barrier in shared memory that nobody initialised",
     [](const Me& me) {
       me.arrive();
       me.out(me.in());
     }},
    {"a barrier in shared memory, used before it is there",
     [](const Me& me) {
       if (me.thread == 0) init_barrier(&me.shared.barrier, kThreads);
       sync_warp();
       me.arrive();
       me.out(me.in());
     }},
    {"an arrival too many",
     [](const Me& me) {
       me.init(1);
       if (me.thread == 0) me.arrive(16);
       if (me.thread == 0) me.arrive();
       me.out(me.in());
     }},
    {"bytes that never come",
     [](const Me& me) {
       me.init(kThreads);
       me.arrive(16);
       me.wait(0);
       me.out(me.in());
     }},
    {"a box that is waited for",
     [](const Me& me) {
       me.init(1);
       me.begin_box();
       me.wait(0);
       me.out(me.get_of_box());
     }},
    {"a box that is not waited for",
     [](const Me& me) {
       me.init(1);
       me.begin_box();
       sync_block();
       me.out(me.get_of_box());
     }},
    {"a box to where others read",
     [](const Me& me) {
       me.init(1);
       me.put(me.in());
       me.out(me.get(me.thread));
       me.begin_box();
       me.wait(0);
     }},
    {"a box whose barrier the copy engine does not know",
     [](const Me& me) {
       if (me.thread == 0) init_barrier(&me.shared.barrier, 1);
       sync_block();
       me.begin_box();
       me.wait(0);
       me.out(me.get_of_box());
     }},
    {"registers that nobody gives back",
     [](const Me& me) {
       take_registers(256);
       me.out(me.in());
     }},
    {"registers that change hands",
     [](const Me& me) {
       me.thread < 32 ? give_back_registers(248) : take_registers(256);
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

CUtensorMap map_of(const void* in) {
  const cuuint64_t sizes[] = {64, 1, 8, 1, 1}, strides[] = {128, 128, 1024, 1024};
  const cuuint32_t box[] = {64, 1, 8, 1, 1}, steps[] = {1, 1, 1, 1, 1};
  CUtensorMap map = {};
  reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode_tensor_map())(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, const_cast<void*>(in), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

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
    const Params params{map_of(in), static_cast<const Chunk*>(in), static_cast<Chunk*>(out),
                        kernel.body};
    auto run = [](const void* params, void* shared) {
      const auto& p = *static_cast<const Params*>(params);
      p.body({p, *static_cast<Shared*>(shared)});
    };
    auto launch = [&] {
      run_grid("small", 1, kThreads, sizeof(Shared), run, &params, sizeof params);
    };
    return run_session(session, launch, counters, error, error_bytes);
  }
  return 2;
}
