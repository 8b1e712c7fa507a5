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
  int workers;  // OS threads, each with a CTA at a time
  Counters counters = {};
};

// Runs `body`, in which `run_grid` has the session's memory. Adds to `counters`; returns 0, or 1
// with a sentence in `error`. One session at a time.
int run_session(Session& session, const std::function<void()>& body, Counters* counters,
                char* error, size_t error_bytes);

}  // namespace flash_cute::emulator
