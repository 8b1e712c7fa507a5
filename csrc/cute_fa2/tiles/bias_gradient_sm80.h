// The tiles of the kernel that makes the gradient of a bias, in 16 bits up to head dim 256.
#pragma once

namespace flash_cute {

struct BiasTileSm80 {
  int block_m;
  int block_n;
};

// 8 warps share a tile. Blocks of Q, dO, K and V fit 99 KB, and on Hopper two CTAs an SM.
constexpr BiasTileSm80 bias_tile_sm80(int head_dim) {
  if (head_dim <= 128) return {128, 64};
  return {64, head_dim <= 192 ? 64 : 32};
}

}  // namespace flash_cute
