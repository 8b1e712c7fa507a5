#include "turns.h"

#include <algorithm>
#include <atomic>

namespace flash_cute::emulator {

int Turns::value(const int* counter) {
  return std::atomic_ref(*const_cast<int*>(counter)).load(std::memory_order_acquire);
}

bool Turns::has_come(const int* counter, int turn) {
  return turn == kAny ? value(counter) >= 0 : value(counter) == turn;
}

void Turns::store(int* counter, int number) {
  const std::lock_guard lock(mutex_);
  std::atomic_ref(*counter).store(number, std::memory_order_release);
  changed_.notify_all();
}

void Turns::pass(int* counter) {
  const std::lock_guard lock(mutex_);
  std::atomic_ref(*counter).fetch_add(1, std::memory_order_release);
  changed_.notify_all();
}

bool Turns::is_stuck() const {
  return waiting_.size() == running_ && std::none_of(waiting_.begin(), waiting_.end(),
                                                     [](const Waiting& w) { return w.is_over(); });
}

std::string Turns::wait(const int* counter, int turn) {
  std::unique_lock lock(mutex_);
  const auto mine = waiting_.insert(waiting_.end(), {counter, turn});
  while (!mine->is_over() && !has_failed_ && !is_stuck()) changed_.wait(lock);
  const bool is_over = mine->is_over();
  const bool others_failed = has_failed_;
  waiting_.erase(mine);
  if (is_over) return "";
  const std::string text = "waits for turn " + (turn == kAny ? "0 or more" : std::to_string(turn)) +
                           " of a counter at " + std::to_string(value(counter)) +
                           ": a turn that never comes, as ";
  return text + (others_failed ? "another CTA has failed" : "every CTA that runs waits");
}

void Turns::leave(bool has_failed) {
  const std::lock_guard lock(mutex_);
  --running_;
  has_failed_ |= has_failed;
  changed_.notify_all();
}

}  // namespace flash_cute::emulator
