#include "cta.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <iterator>
#include <new>
#include <thread>

#include "global_memory.h"

namespace flash_cute::emulator {

// A failure leaves threads behind. boost::context::fiber would unwind their stacks, through
// callbacks that the compiler takes to throw nothing. The functions below it just drop them.
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

thread_local Thread* running = nullptr;

Cta::Cta(const Launch& launch) : launch_(launch), threads_(launch.threads) {
  void* memory = mmap(nullptr, launch.threads * Thread::kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  stacks_ = static_cast<char*>(memory);
}

Cta::~Cta() { munmap(stacks_, launch_.threads * Thread::kStackBytes); }

std::string Cta::run(int index) {
  index_ = index;
  failure_.clear();
  shared.reset(launch_.shared_bytes);
  barriers_.clear();
  mbarriers.reset();
  tma.reset();
  warpgroups.reset(launch_.threads);
  warps_.assign(launch_.threads / 32, Warp{});
  for (Warp& warp : warps_) warp.runnable = ~0u;
  random_ = (launch_.seed + 1) * 0x9e3779b97f4a7c15u ^ (index + 1) * 0xd1342543de82ef95u;
  alive_ = launch_.threads;
  turns_.clear();
  had_turn_ = false;
  const auto nothing = std::make_shared<News>(clock_entries());
  for (int i = 0; i < launch_.threads; ++i) {
    Thread& thread = threads_[i];
    thread.cta = this;
    thread.index = i;
    thread.done = false;
    char* stack = stacks_ + i * Thread::kStackBytes;
    char* stack_end = stack + Thread::kStackBytes;
    thread.stack = reinterpret_cast<uintptr_t>(stack);
    thread.context = make_fcontext(stack_end, Thread::kStackBytes, &Cta::enter);
    thread.clocks.reset(i, nothing);
    thread.waits_for = nullptr;
    thread.copy_group = 0;
    thread.copies.clear();
    thread.tma_store_group = 0;
    thread.added = thread.published = Epoch();
    thread.turn = nullptr;
    thread.wgmmas_in_flight = false;
  }
  resume(*next());
  conflicts.finish();
  return failure_;
}

void Cta::resume(Thread& thread) {
  running = &thread;
  jump_fcontext(thread.context, &scheduler_);
  running = nullptr;
}

// The first turn of a thread.
void Cta::enter(transfer_t from) {
  *static_cast<boost::context::detail::fcontext_t*>(from.data) = from.fctx;
  Thread& thread = *running;
  Cta& cta = *thread.cta;
  cta.launch_.kernel(cta.launch_.params, cta.shared.data());
  cta.warpgroups.check_done(thread);
  cta.tma.check_stored(thread);
  thread.done = true;
  cta.warps_[thread.index / 32].runnable &= ~(1u << thread.index % 32);
  if (--cta.alive_ == 0) cta.tma.end(cta);
  cta.switch_from(thread);
}

// xorshift64*: Marsaglia 2003, Vigna 2016.
uint32_t Cta::random() {
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  return static_cast<uint32_t>(random_ * 0x2545f4914f6cdd1dull >> 32);
}

// A random lane of the warp that runs; now and then, and when none of its lanes can run, of
// another.
Thread* Cta::pick() {
  const uint32_t dice = random();
  const auto warps = static_cast<uint32_t>(warps_.size());
  if (dice % 64 == 0 || warps_[warp_].runnable == 0) warp_ = (dice >> 8) % warps;
  for (uint32_t tried = 0; tried < warps; ++tried, warp_ = (warp_ + 1) % warps) {
    const uint32_t runnable = warps_[warp_].runnable;
    if (runnable == 0) continue;
    const int from = dice >> 27;
    const int lane = (std::countr_zero(std::rotr(runnable, from)) + from) % 32;
    return &threads_[warp_ * 32 + lane];
  }
  return nullptr;
}

// When copies arrive is for the seed to decide: soon, late, or when nobody can go on without.
Thread* Cta::next() {
  constexpr uint32_t kChances[] = {0x20000000u, 0x01000000u, 0u};  // of 2^32
  const uint32_t chance = kChances[launch_.seed % std::size(kChances)];
  while (true) {
    if (tma.under_way() && random() < chance) tma.happen(*this, random());
    if (Thread* thread = pick()) return thread;
    if (!tma.under_way()) return nullptr;
    tma.happen(*this, random());
  }
}

void Cta::switch_from(Thread& thread) {
  Thread* to = next();
  if (to == &thread) return;
  if (!to) {
    if (alive_ > 0) failure_ = deadlock();
    jump_fcontext(scheduler_, nullptr);  // for good
  }
  running = to;
  const transfer_t back = jump_fcontext(to->context, &thread.context);
  *static_cast<boost::context::detail::fcontext_t*>(back.data) = back.fctx;
}

void Cta::wait(Thread& thread, const char* at, const void* code) {
  thread.waits_at = at;
  thread.waits_in = code;
  warps_[thread.index / 32].runnable &= ~(1u << thread.index % 32);
  switch_from(thread);
}

void Cta::barrier(Thread& thread, int id, int count, const void* code, bool waits, Vote vote) {
  if (id < 0 || id > 15) emulator::fail(thread, code, "names barrier %d, of 0 to 15", id);
  Barrier& barrier = barriers_[id];
  if (barrier.arrived == 0) {
    barrier.count = count;
    barrier.votes = vote != Vote::kNone;
    barrier.any_voted = false;
    barrier.gathering.reset(clock_entries());
    barrier.has_arrived.assign(launch_.threads, false);
  } else if (barrier.count != count) {
    emulator::fail(thread, code, "waits for %d threads at barrier %d, where others wait for %d",
                   count, id, barrier.count);
  } else if (barrier.votes != (vote != Vote::kNone)) {
    emulator::fail(thread, code, "%s at barrier %d, where others %s",
                   barrier.votes ? "does not vote" : "votes", id, barrier.votes ? "do" : "do not");
  }
  if (barrier.has_arrived[thread.index]) {
    emulator::fail(thread, code, "comes to barrier %d again before the others have", id);
  }
  barrier.has_arrived[thread.index] = true;
  barrier.gathering.add(thread.clocks);
  barrier.any_voted |= vote == Vote::kYes;
  if (waits) {
    barrier.waiting.push_back(&thread);
  } else {
    thread.clocks.advance();
  }
  const bool last = ++barrier.arrived == count;
  if (last) {
    const SharedNews news = barrier.gathering.news();
    for (Thread* other : barrier.waiting) {
      other->any_voted = barrier.any_voted;
      other->clocks.hear(news);
      other->clocks.advance();
      wake(*other);
    }
    barrier.waiting.clear();
    barrier.arrived = 0;
    if (id == 0) ++counters.cta_barriers;
    switch_from(thread);
  } else if (waits) {
    wait(thread, "a barrier", code);
  } else {
    switch_from(thread);
  }
}

void Cta::with_warp(Thread& thread, const char* name, void* operands, Complete complete,
                    const void* code) {
  Warp& warp = warps_[thread.index / 32];
  if (warp.arrived && warp.complete != complete) {
    emulator::fail(thread, code, "is at %s, while other lanes of its warp are at %s", name,
                   warp.operation);
  }
  warp.operation = name;
  warp.complete = complete;
  warp.operands[thread.index % 32] = operands;
  warp.arrived |= 1u << thread.index % 32;
  if (warp.arrived != ~0u) return wait(thread, name, code);
  warp.arrived = 0;
  warp.runnable = ~0u;
  complete(*this, &threads_[thread.index / 32 * 32], warp.operands);
}

bool Cta::only_one_can_run() const {
  int runnable = 0;
  for (const Warp& warp : warps_) runnable += std::popcount(warp.runnable);
  return runnable == 1;
}

void Cta::wait_for_counter(Thread& thread, const int* counter, int value, const void* code) {
  while (!Turns::has_come(counter, value)) {
    if (!only_one_can_run()) {
      yield(thread);
      continue;
    }
    const std::string wrong = launch_.turns->wait(counter, value);
    if (!wrong.empty()) emulator::fail(thread, code, "%s", wrong.c_str());
  }
}

void Cta::interrupt(Thread& thread) {
  if (random() % 2 == 0) yield(thread);
  if (random() % 2 == 0) std::this_thread::yield();
}

void Cta::store_number(const Thread& thread, int* word, int number, const void* code) {
  check_published(thread, code);
  launch_.turns->store(word, number);
}

void Cta::check_published(const Thread& thread, const void* code) const {
  if (tma.adds(thread) || thread.added) {
    emulator::fail(thread, code, "tells others, but has not waited for and published its sums");
  }
}

void Cta::raise_flag(const Thread& thread, int* flag, const void* code) {
  check_published(thread, code);
  launch_.turns->pass(flag);
}

void Cta::begin_turn(Thread& thread, const int* counter, int turn, const void* code) {
  wait_for_counter(thread, counter, turn, code);
  for (const Thread& other : threads_) {
    if (!other.added || other.turn) continue;
    emulator::fail(thread, code, "begins a turn after thread %d has added to a sum", other.index);
  }
  turns_[counter] = thread.clocks.epoch();
  had_turn_ = true;
}

void Cta::add_in_turn(Thread& thread, const void* code) {
  thread.added = thread.clocks.epoch();
  thread.turn = nullptr;
  if (!had_turn_) return;
  for (const auto& [counter, begun] : turns_) {
    if (thread.clocks.ordered(begun)) thread.turn = counter;
  }
  if (thread.turn) return;
  emulator::fail(thread, code,
                 turns_.empty() ? "adds to a sum after its CTA's turn"
                                : "adds to a sum in its CTA's turn with no barrier in between");
}

void Cta::check_sum(const Thread& thread, const void* address, int bytes, const void* code) const {
  const std::string wrong = launch_.global->reduce(address, bytes);
  if (wrong.empty()) return;
  emulator::fail(thread, code, "adds to %d bytes at %p, %s", bytes, address, wrong.c_str());
}

void Cta::add(Thread& thread, float* sums, std::span<const float> x, const void* code) {
  const auto bytes = static_cast<int>(x.size_bytes());
  check_sum(thread, sums, bytes, code);
  add_in_turn(thread, code);
  ++(bytes == 16 ? counters.global_reductions_16 : counters.global_reductions);
  add_to(sums, x);
}

void Cta::end_turn(Thread& thread, int* counter, const void* code) {
  if (!turns_.contains(counter)) {
    emulator::fail(thread, code, "passes a turn that its CTA has not waited for");
  }
  for (Thread& other : threads_) {
    if (other.turn != counter) continue;
    if (tma.adds(other)) {
      emulator::fail(thread, code, "passes its turn, but thread %d has not waited for its sums",
                     other.index);
    }
    if (other.added) {
      emulator::fail(thread, code, "passes its turn, but thread %d has not published its sums",
                     other.index);
    }
    if (!thread.clocks.ordered(other.published)) {
      emulator::fail(thread, code,
                     "passes its turn after thread %d has published its sums, with no barrier in "
                     "between",
                     other.index);
    }
    other.turn = nullptr;
  }
  turns_.erase(counter);
  launch_.turns->pass(counter);
}

void Cta::fail(std::string what) {
  failure_ = std::move(what);
  jump_fcontext(scheduler_, nullptr);
  __builtin_unreachable();
}

std::string Cta::deadlock() const {
  constexpr size_t kListed = 8;
  std::vector<const Thread*> listed;  // one for each place and barrier
  int done = 0;
  for (const Thread& thread : threads_) {
    done += thread.done;
    if (thread.done) continue;
    auto same = [&](const Thread* other) {
      return other->waits_in == thread.waits_in && other->waits_for == thread.waits_for;
    };
    if (std::none_of(listed.begin(), listed.end(), same) && listed.size() < kListed) {
      listed.push_back(&thread);
    }
  }
  std::string text = "CTA " + std::to_string(index_) + ": every thread waits or is done (" +
                     std::to_string(done) + " are)";
  for (const Thread* thread : listed) {
    text += ", thread " + std::to_string(thread->index) + " for " + thread->waits_at + " " +
            place(thread->waits_in);
    if (thread->waits_for) text += " (" + mbarriers.describe(*thread) + ")";
  }
  return text;
}

void add_to(float* sums, std::span<const float> x) {
  for (float value : x) std::atomic_ref(*sums++).fetch_add(value, std::memory_order_relaxed);
}

void fail(const Thread& thread, const void* code, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  thread.cta->fail("CTA " + std::to_string(thread.cta->index()) + ", thread " +
                   std::to_string(thread.index) + " " + text + " (" + place(code) + ")");
}

}  // namespace flash_cute::emulator
