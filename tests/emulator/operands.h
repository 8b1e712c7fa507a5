// Elements of matrix products in fp32.
#pragma once

#include <bit>
#include <cstdint>

#include "machine.h"

namespace flash_cute::emulator {

inline float from_half(uint16_t bits) {
  // The exponent's bias is 112 higher in fp32; the product is exact, denormals included.
  const uint32_t sign = (bits & 0x8000u) << 16;
  const float magnitude = std::bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | special | sign);
}

inline float from_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline void widen(Operand type, const uint16_t* from, float* to, int count) {
  if (type == Operand::kHalf) {
    for (int i = 0; i < count; ++i) to[i] = from_half(from[i]);
  } else {
    for (int i = 0; i < count; ++i) to[i] = from_bfloat16(from[i]);
  }
}

}  // namespace flash_cute::emulator
