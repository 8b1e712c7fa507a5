#include "launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cta.h"

namespace flash_cute::emulator {
namespace {

Session* current = nullptr;
Runner other_machine = nullptr;

const char* keep(std::string text) {
  static std::string kept;
  kept = std::move(text);
  return kept.empty() ? nullptr : kept.c_str();
}

}  // namespace

__attribute__((visibility("default"))) void set_runner(Runner runner) { other_machine = runner; }
__attribute__((visibility("default"))) const char* check_global_read(const void* address, int bytes,
                                                                     int alignment) {
  return keep(current->global.check_read(address, bytes, alignment));
}
__attribute__((visibility("default"))) const char* check_global_write(const void* address,
                                                                      int bytes) {
  return keep(current->global.write(address, bytes));
}

void run_grid(const char* name, int64_t blocks, int threads, int shared_bytes, Kernel kernel,
              const void* params, int params_bytes) {
  Session& session = *current;
  session.global.begin_launch();
  if (other_machine) {
    if (!other_machine(name, blocks, threads, shared_bytes, params, params_bytes)) {
      throw std::runtime_error("the kernel failed");
    }
    return;
  }
  const Launch launch{kernel,       params,       params_bytes,   threads,
                      shared_bytes, session.seed, &session.global};
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::string failure;
  auto work = [&] {
    Cta cta(launch);
    for (int64_t block; (block = next.fetch_add(1)) < blocks;) {
      std::string wrong = cta.run(static_cast<int>(block));
      if (wrong.empty()) continue;
      const std::lock_guard lock(mutex);
      if (failure.empty()) failure = std::move(wrong);
      next = blocks;
    }
    const std::lock_guard lock(mutex);
    session.counters.add(cta.counters);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min<int64_t>(session.workers, blocks); ++i) {
    others.emplace_back(work);
  }
  work();
  for (std::thread& other : others) other.join();
  if (!failure.empty()) throw std::runtime_error(failure);
}

int run_session(Session& session, const std::function<void()>& body, Counters* counters,
                char* error, size_t error_bytes) {
  session.global.begin_launch();
  current = &session;
  std::string failure;
  try {
    body();
    failure = session.global.unwritten();
  } catch (const std::exception& e) {
    failure = e.what();
  }
  current = nullptr;
  counters->add(session.counters);
  std::snprintf(error, error_bytes, "%s", failure.c_str());
  return failure.empty() ? 0 : 1;
}

std::string place(const void* code) {
  Dl_info info;
  if (!dladdr(code, &info)) return "at ?";
  // `code` is where the call returns to: the next instruction.
  const auto offset =
      reinterpret_cast<uintptr_t>(code) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
  char text[32];
  std::snprintf(text, sizeof text, "at {%#zx}", offset);
  return text;
}

}  // namespace flash_cute::emulator
