// Which accesses are ordered before which: vector clocks of the threads of a CTA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
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

// What barriers tell of each thread: the last of its clocks, and the last one before a proxy fence
// of the thread. It never changes, so all that come from a barrier share it.
class News {
 public:
  explicit News(int threads) : clocks_(threads), fences_(threads) {}

  void join(const News& other) {
    join(clocks_, other.clocks_);
    join(fences_, other.fences_);
  }
  void add(int thread, uint32_t clock, uint32_t fence) {
    clocks_[thread] = std::max(clocks_[thread], clock);
    fences_[thread] = std::max(fences_[thread], fence);
  }
  int threads() const { return static_cast<int>(clocks_.size()); }
  uint32_t clock(int thread) const { return clocks_[thread]; }
  uint32_t fence(int thread) const { return fences_[thread]; }

 private:
  static void join(std::vector<uint32_t>& mine, const std::vector<uint32_t>& theirs) {
    for (size_t i = 0; i < mine.size(); ++i) mine[i] = std::max(mine[i], theirs[i]);
  }
  std::vector<uint32_t> clocks_, fences_;
};
using SharedNews = std::shared_ptr<const News>;

// What one thread knows: its own clock and fence, and what it has heard.
class Clocks {
 public:
  void reset(int owner, SharedNews nothing) {
    owner_ = owner;
    clock_ = 1;
    fence_ = 0;
    heard_ = std::move(nothing);
  }
  void advance() { ++clock_; }
  // A proxy fence (fence.proxy.async): TMA and wgmma see what the owner has written so far. What it
  // writes from now on belongs to another clock.
  void fence() { fence_ = clock_++; }
  // Threads with the same knowledge tend to hear the same in turn: they share the result as well.
  void hear(const SharedNews& news) {
    static thread_local struct {
      SharedNews before, news, after;
    } last;
    if (last.before != heard_ || last.news != news) {
      auto after = std::make_shared<News>(*heard_);
      after->join(*news);
      last = {heard_, news, std::move(after)};
    }
    heard_ = last.after;
  }
  Epoch epoch() const { return {owner_, clock_}; }
  // Whether what happened at `epoch` happened before all that the owner does from now on.
  bool ordered(Epoch epoch) const {
    const int thread = epoch.thread();
    return (thread == owner_ ? clock_ : heard_->clock(thread)) >= epoch.clock();
  }
  // Whether TMA and wgmma see what a thread wrote at `epoch`, if the owner asks them to.
  bool fenced(Epoch epoch) const {
    const int thread = epoch.thread();
    return (thread == owner_ ? fence_ : heard_->fence(thread)) >= epoch.clock();
  }

 private:
  friend class Gathering;
  int owner_;
  uint32_t clock_, fence_;
  SharedNews heard_;
};

// Gathers what those know who come to a barrier.
class Gathering {
 public:
  void reset(int threads) {
    all_ = std::make_shared<News>(threads);
    last_ = nullptr;
  }
  void add(const Clocks& clocks) {
    if (last_ != clocks.heard_) all_->join(*clocks.heard_);
    last_ = clocks.heard_;
    all_->add(clocks.owner_, clocks.clock_, clocks.fence_);
  }
  void add(Epoch epoch) { all_->add(epoch.thread(), epoch.clock(), 0); }
  // Ends it: the next begins with `reset`.
  SharedNews news() { return std::move(all_); }

 private:
  std::shared_ptr<News> all_;
  SharedNews last_;
};

}  // namespace flash_cute::emulator
