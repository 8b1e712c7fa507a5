// A call from Python: the tensors that kernels may touch, and what came of the launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "counters.h"
#include "global_memory.h"

namespace flash_cute::emulator {

struct Session {
  GlobalMemory global = {};
  uint64_t seed;
  int workers;  // OS threads, each with a block at a time
  Counters counters = {};
};

extern "C" {

// Another machine, which runs the grids of the sessions to come (tests/ptx); nullptr: the emulated
// one. It returns whether it succeeded.
using Runner = bool (*)(const char* kernel, int64_t blocks, int threads, int shared_bytes,
                        const void* params, int params_bytes);
void set_runner(Runner runner);

// What it may do to global memory: nullptr, or what is wrong with the access.
const char* check_global_read(const void* address, int bytes, int alignment);
const char* check_global_write(const void* address, int bytes);
}

// Runs `body`, in which `run_grid` has the session's memory. Adds to `counters`; returns 0, or 1
// with a sentence in `error`. One session at a time.
int run_session(Session& session, const std::function<void()>& body, Counters* counters,
                char* error, size_t error_bytes);

}  // namespace flash_cute::emulator
