// Small kernels that show what the emulated machine allows and what it refuses
// (test_emulated_machine.py): what a name promises is all that its kernel does.
#include "small_kernels.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>

#include "launch.h"
#include "tensor_copy.h"

namespace flash_cute::emulator {
namespace {

constexpr SmallKernel kKernels[] = {
    {"a barrier orders threads",
     [](const Me& me) {
       me.put(me.in());
       sync_cta();
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
       sync_cta();
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
       sync_cta();
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
       sync_cta();
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
       sync_cta();
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
       require(sync_cta_or(me.thread == 17), "hears of no vote");
       require(!sync_cta_or(false), "hears of a vote");
       me.out(me.in_next_warp());
     }},
    {"a barrier at which some threads vote",
     [](const Me& me) {
       me.thread < 32 ? static_cast<void>(sync_cta_or(true)) : sync_cta();
       me.out(me.in());
     }},
    {"a barrier that some threads skip",
     [](const Me& me) {
       if (me.thread != 17) sync_cta();
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

// Runs the kernel of that name on one block; 2 if there is none.
extern "C" __attribute__((visibility("default"))) int emulate_small(
    const char* name, const void* in, void* out, uint64_t seed,
    flash_cute::emulator::Counters* counters, char* error, size_t error_bytes) {
  using namespace flash_cute::emulator;
  for (const auto kernels : {std::span<const SmallKernel>(kKernels), small_hopper_kernels()}) {
    const auto kernel = std::ranges::find(kernels, std::string_view(name), &SmallKernel::name);
    if (kernel == kernels.end()) continue;
    Session session{.seed = seed, .workers = 1};
    const int64_t bytes = kThreads * sizeof(Chunk);
    session.global.add({"in", GlobalMemory::Use::kInput, in, {1, 1, 1}, {}, bytes});
    session.global.add({"out", GlobalMemory::Use::kOutput, out, {1, 1, 1}, {}, bytes});
    const Params params{map_of(in), map_of(out), static_cast<const Chunk*>(in),
                        static_cast<Chunk*>(out), kernel->body};
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
