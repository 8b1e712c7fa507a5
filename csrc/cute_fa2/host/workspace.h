// Hands out parts of a workspace, each 16-byte aligned; without memory it counts alone.
#pragma once

#include <cstdint>

#include "host/params.h"

namespace flash_cute {

class Allocator {
 public:
  explicit Allocator(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    const int64_t here = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return count == 0 || !memory_ ? nullptr : reinterpret_cast<T*>(memory_ + here);
  }
  BlockList take_list(int64_t bound, int splits = 1) {
    BlockList list;
    list.bound = static_cast<int>(bound);
    int* const counts = take<int>(bound > 0 ? 2 : 0);
    list.count = counts;
    list.taken = counts ? counts + 1 : nullptr;
    list.sorted = take<SequenceTile>(bound * splits);
    return list;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace flash_cute
