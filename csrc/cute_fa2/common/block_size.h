// The rows of a block, where only the host knows them: a division by them is a multiplication.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>

namespace flash_cute {

class BlockSize {
 public:
  BlockSize(int rows) : rows_(rows > 0 ? rows : 1) {}  // 0 of blocks that a call does not have

  CUTE_DEVICE operator int() const { return rows_.divisor; }
  // `count` is not below 0.
  friend CUTE_DEVICE int operator/(int count, const BlockSize& size) {
    return size.rows_.div(count);
  }

 private:
  cutlass::FastDivmod rows_;
};

}  // namespace flash_cute
