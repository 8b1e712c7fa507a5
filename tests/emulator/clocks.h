// Which accesses are ordered before which: vector clocks of the threads of a block.
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

// For each thread of the block, the last of its clocks that the owner has heard of through
// barriers, and the last up to which, as it has heard, what the thread wrote is shown to the copy
// engine.
class Clocks {
 public:
  void reset(int threads) {
    heard_.assign(threads, 0);
    shown_.assign(threads, 0);
  }
  void advance(int owner) { ++heard_[owner]; }
  void join(const Clocks& other) {
    for (size_t i = 0; i < heard_.size(); ++i) heard_[i] = std::max(heard_[i], other.heard_[i]);
    for (size_t i = 0; i < shown_.size(); ++i) shown_[i] = std::max(shown_[i], other.shown_[i]);
  }
  // All that the owner has written so far; what it writes from now on belongs to another clock.
  void show(int owner) {
    shown_[owner] = heard_[owner];
    advance(owner);
  }
  void hear(Epoch epoch) {
    heard_[epoch.thread()] = std::max(heard_[epoch.thread()], epoch.clock());
  }
  Epoch epoch(int owner) const { return {owner, heard_[owner]}; }
  // Whether what happened at `epoch` happened before all that the owner does from now on.
  bool ordered(Epoch epoch) const { return heard_[epoch.thread()] >= epoch.clock(); }
  // Whether the copy engine sees what a thread wrote at `epoch`, if the owner asks it to.
  bool shown(Epoch epoch) const { return shown_[epoch.thread()] >= epoch.clock(); }

 private:
  std::vector<uint32_t> heard_, shown_;
};

}  // namespace flash_cute::emulator
