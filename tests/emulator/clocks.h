// Which accesses are ordered before which: vector clocks of the threads of a CTA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace flash_cute::emulator {

// A moment in the life of one thread: its clock, which advances at each barrier, and its index.
// 0 is "never".
class Epoch {
 public:
  Epoch() = default;
  Epoch(int thread, uint32_t clock) : bits_(clock << kThreadBits | static_cast<uint32_t>(thread)) {}

  // What no clock has reached: still going on.
  static Epoch never_ending(int thread) { return {thread, ~0u >> kThreadBits}; }

  explicit operator bool() const { return bits_ != 0; }
  bool operator==(const Epoch&) const = default;
  int thread() const { return static_cast<int>(bits_ & ((1u << kThreadBits) - 1)); }
  uint32_t clock() const { return bits_ >> kThreadBits; }

 private:
  static constexpr int kThreadBits = 10;
  uint32_t bits_ = 0;
};

// For each thread of the CTA: the last of its clocks that the owner has heard of through barriers,
// and, as it has heard, the last one before a proxy fence of the thread.
class Clocks {
 public:
  void reset(int threads) {
    heard_.assign(threads, 0);
    fenced_.assign(threads, 0);
  }
  void advance(int owner) { ++heard_[owner]; }
  void join(const Clocks& other) {
    for (size_t i = 0; i < heard_.size(); ++i) heard_[i] = std::max(heard_[i], other.heard_[i]);
    for (size_t i = 0; i < fenced_.size(); ++i) fenced_[i] = std::max(fenced_[i], other.fenced_[i]);
  }
  // A proxy fence (fence.proxy.async): TMA and wgmma see what the owner has written so far. What it
  // writes from now on belongs to another clock.
  void fence(int owner) {
    fenced_[owner] = heard_[owner];
    advance(owner);
  }
  void hear(Epoch epoch) {
    heard_[epoch.thread()] = std::max(heard_[epoch.thread()], epoch.clock());
  }
  Epoch epoch(int owner) const { return {owner, heard_[owner]}; }
  // Whether what happened at `epoch` happened before all that the owner does from now on.
  bool ordered(Epoch epoch) const { return heard_[epoch.thread()] >= epoch.clock(); }
  // Whether TMA and wgmma see what a thread wrote at `epoch`, if the owner asks them to.
  bool fenced(Epoch epoch) const { return fenced_[epoch.thread()] >= epoch.clock(); }

 private:
  std::vector<uint32_t> heard_, fenced_;
};

}  // namespace flash_cute::emulator
