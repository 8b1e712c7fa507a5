#include "launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cta.h"

namespace flash_cute::emulator {
namespace {

Session* current = nullptr;

}  // namespace

void run_grid(int64_t ctas, int threads, int shared_bytes, Kernel kernel, const void* params,
              int params_bytes) {
  Session& session = *current;
  session.global.begin_launch();
  std::vector<int> order(ctas);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(session.seed);
  if (session.seed != 0) std::shuffle(order.begin(), order.end(), random);
  const auto workers = static_cast<int>(std::clamp<int64_t>(ctas, 1, session.workers));
  Turns turns(workers);
  const Launch launch{kernel,       params,       params_bytes,    threads,
                      shared_bytes, session.seed, &session.global, &turns};
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::string failure;
  auto work = [&] {
    Cta cta(launch);
    bool has_failed = false;
    for (int64_t i; !has_failed && (i = next.fetch_add(1)) < ctas;) {
      std::string wrong = cta.run(order[i]);
      if (wrong.empty()) continue;
      has_failed = true;
      const std::lock_guard lock(mutex);
      if (failure.empty()) failure = std::move(wrong);
      next = ctas;
    }
    turns.leave(has_failed);
    const std::lock_guard lock(mutex);
    session.counters.add(cta.counters);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < workers; ++i) others.emplace_back(work);
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
