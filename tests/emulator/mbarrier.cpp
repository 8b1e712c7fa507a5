#include "mbarrier.h"

#include "cta.h"

namespace flash_cute::emulator {
namespace {

constexpr int64_t kMaxBytes = (1 << 20) - 1;

// Of the phase under way.
uint32_t parity_of(const MBarrier& barrier) { return barrier.phases & 1; }

}  // namespace

void MBarriers::init(Thread& thread, const void* at, int arrivals, const void* code) {
  const SharedMemory& shared = thread.cta->shared;
  if (!shared.contains(at) || shared.offset_of(at) % 8 != 0) {
    fail(thread, code, "initialises a barrier at %p, which is no place for one", at);
  }
  const uint32_t offset = shared.offset_of(at);
  MBarrier barrier = {.offset = offset, .arrivals = arrivals, .missing = arrivals, .tma_clock = -1};
  barrier.gathering.reset(thread.cta->clock_entries());
  barrier.initialised = thread.clocks.epoch();
  if (arrivals < 1 || !barriers_.emplace(offset, std::move(barrier)).second) {
    fail(thread, code, "initialises the barrier at shared + %u for %d, or again", offset, arrivals);
  }
}

void MBarriers::publish(Thread& thread) {
  for (auto& [offset, barrier] : barriers_) {
    if (barrier.initialised.thread() == thread.index) barrier.published = true;
  }
}

MBarrier& MBarriers::find(Thread& thread, const void* at, const void* code) {
  const auto found = thread.cta->shared.contains(at)
                         ? barriers_.find(thread.cta->shared.offset_of(at))
                         : barriers_.end();
  if (found == barriers_.end()) {
    fail(thread, code, "uses a barrier at %p, which nobody has initialised", at);
  }
  if (!thread.clocks.ordered(found->second.initialised)) {
    fail(thread, code,
         "uses the barrier at shared + %u, which thread %d initialised with no barrier in between",
         found->first, found->second.initialised.thread());
  }
  return found->second;
}

MBarrier& MBarriers::find_published(Thread& thread, const void* at, const void* code) {
  MBarrier& barrier = find(thread, at, code);
  if (!barrier.published) {
    fail(thread, code,
         "names the barrier at shared + %u to TMA, with no fence after its initialisation",
         barrier.offset);
  }
  return barrier;
}

void MBarriers::arrive(Thread& thread, const void* at, int64_t bytes, const void* code) {
  MBarrier& barrier = find(thread, at, code);
  if (barrier.missing == 0) {
    fail(thread, code, "arrives at the barrier at shared + %u, whose phase has had its %d arrivals",
         barrier.offset, barrier.arrivals);
  }
  barrier.bytes += bytes;
  if (barrier.bytes > kMaxBytes) {
    fail(thread, code, "expects %ld bytes at the barrier at shared + %u", long{barrier.bytes},
         barrier.offset);
  }
  barrier.gathering.add(thread.clocks);
  thread.clocks.advance();
  --barrier.missing;
  end_phase_if_over(*thread.cta, barrier);
  thread.cta->yield(thread);
}

Epoch MBarriers::tma_epoch(Cta& cta, MBarrier& barrier) {
  if (barrier.tma_clock < 0) {
    if (tma_clocks_ == Cta::kTmaClocks) cta.fail("TMA arrives at more barriers than are emulated");
    barrier.tma_clock = cta.launch().threads + tma_clocks_++;
  }
  const Epoch epoch(barrier.tma_clock, ++barrier.landings);
  barrier.gathering.add(epoch);
  return epoch;
}

void MBarriers::complete(Cta& cta, MBarrier& barrier, int64_t bytes) {
  barrier.bytes -= bytes;
  end_phase_if_over(cta, barrier);
}

void MBarriers::end_phase_if_over(Cta& cta, MBarrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  ++barrier.phases;
  barrier.missing = barrier.arrivals;
  barrier.last = barrier.gathering.news();
  barrier.gathering.reset(cta.clock_entries());
  for (Thread* thread : barrier.waiting) cta.wake(*thread);
  barrier.waiting.clear();
}

void MBarriers::wait(Thread& thread, const void* at, uint32_t parity, const void* code) {
  while (!is_over(thread, at, parity, code)) {
    MBarrier& barrier = find(thread, at, code);
    barrier.waiting.push_back(&thread);
    thread.waits_for = &barrier;
    thread.parity = parity;
    thread.cta->wait(thread, "the barrier", code);
    thread.waits_for = nullptr;
  }
}

bool MBarriers::is_over(Thread& thread, const void* at, uint32_t parity, const void* code) {
  MBarrier& barrier = find(thread, at, code);
  if (parity > 1) fail(thread, code, "waits for the parity %u", parity);
  if (parity_of(barrier) == parity) return false;
  if (barrier.last) thread.clocks.hear(barrier.last);
  return true;
}

void MBarriers::check_is_over(Thread& thread, const void* at, uint32_t parity, const void* code) {
  const MBarrier& barrier = find(thread, at, code);
  if (parity_of(barrier) != parity) return;
  fail(thread, code, "takes the phase of the barrier at shared + %u for over, which is under way",
       barrier.offset);
}

std::string MBarriers::describe(const Thread& thread) const {
  const MBarrier& barrier = *thread.waits_for;
  return "at shared + " + std::to_string(barrier.offset) + ", parity " +
         std::to_string(thread.parity) + "; " + std::to_string(barrier.phases) +
         " phases are over, the next lacks " + std::to_string(barrier.missing) + " of " +
         std::to_string(barrier.arrivals) + " arrivals and " + std::to_string(barrier.bytes) +
         " bytes";
}

}  // namespace flash_cute::emulator
