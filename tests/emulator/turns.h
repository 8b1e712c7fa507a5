// Turns of CTAs: counters in global memory that some wait for and others pass on. CTAs run on OS
// threads, the workers of a launch.
#pragma once

#include <condition_variable>
#include <list>
#include <mutex>
#include <string>

namespace flash_cute::emulator {

class Turns {
 public:
  explicit Turns(int workers) : running_(workers) {}

  static constexpr int kAny = -1;  // in place of a turn: any number from 0 on

  static int value(const int* counter);  // now
  static bool has_come(const int* counter, int turn);
  void pass(int* counter);
  void store(int* counter, int number);

  // Blocks the worker until the counter has reached `turn`. Returns nothing then, else why it never
  // will: all workers wait, or one has failed.
  std::string wait(const int* counter, int turn);

  void leave(bool has_failed);  // for a worker: it runs no more CTAs

 private:
  struct Waiting {
    const int* counter;
    int turn;
    bool is_over() const { return has_come(counter, turn); }
  };
  bool is_stuck() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Waiting> waiting_;
  size_t running_;
  bool has_failed_ = false;
};

}  // namespace flash_cute::emulator
