// mma.sync: one lane, the last to come, multiplies for its whole warp.
#include <bit>
#include <cmath>
#include <cstring>

#include "cta.h"
#include "operands.h"

namespace flash_cute::emulator {
namespace {

struct Operands {
  Operand type;  // of m16n8k16
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  const float* c;
};

// Of m16n8k16 lane l holds pairs of neighbours. Theirs begin at r = l / 4 and c = 2 (l % 4).
// Of A (16 x 16): (r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8).
// Of B (16 x 8), along its columns: (c, r), (c + 8, r). Of C and D (16 x 8): (r, c), (r + 8, c).
void multiply(Cta& cta, Thread*, void* const (&lanes)[32]) {
  const Operand type = static_cast<Operands*>(lanes[0])->type;
  uint16_t a_bits[16][16], b_bits[16][8];
  float a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < 32; ++l) {
    const auto& lane = *static_cast<Operands*>(lanes[l]);
    const int row = l / 4, pair = l % 4 * 2;
    std::memcpy(&a_bits[row][pair], &lane.a[0], 4);
    std::memcpy(&a_bits[row + 8][pair], &lane.a[1], 4);
    std::memcpy(&a_bits[row][pair + 8], &lane.a[2], 4);
    std::memcpy(&a_bits[row + 8][pair + 8], &lane.a[3], 4);
    for (int half = 0; half < 2; ++half) {
      b_bits[pair + 8 * half][row] = static_cast<uint16_t>(lane.b[half]);
      b_bits[pair + 8 * half + 1][row] = static_cast<uint16_t>(lane.b[half] >> 16);
    }
    std::memcpy(&d[row][pair], &lane.c[0], 8);
    std::memcpy(&d[row + 8][pair], &lane.c[2], 8);
  }
  widen(type, &a_bits[0][0], &a[0][0], 16 * 16);
  widen(type, &b_bits[0][0], &b[0][0], 16 * 8);
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int l = 0; l < 32; ++l) {
    const auto& lane = *static_cast<Operands*>(lanes[l]);
    std::memcpy(&lane.d[0], &d[l / 4][l % 4 * 2], 8);
    std::memcpy(&lane.d[2], &d[l / 4 + 8][l % 4 * 2], 8);
  }
  ++cta.counters.mma;
}

// Tensor cores leave out what a float has no room for.
float truncated(double x) {
  const float nearest = static_cast<float>(x);
  return std::abs(double{nearest}) > std::abs(x) ? std::nextafter(nearest, 0.f) : nearest;
}

// Of m16n8k8 lane l holds single numbers. With r = l / 4 and c = l % 4, of A (16 x 8): (r, c),
// (r + 8, c), (r, c + 4), (r + 8, c + 4); of B (8 x 8), along its columns: (c, r), (c + 4, r). Of C
// and D as above.
void multiply_tf32(Cta& cta, Thread*, void* const (&lanes)[32]) {
  float a[16][8], b[8][8];
  const auto number = [](uint32_t bits) { return std::bit_cast<float>(bits & ~0x1fffu); };
  for (int l = 0; l < 32; ++l) {
    const auto& lane = *static_cast<Operands*>(lanes[l]);
    for (int i = 0; i < 4; ++i) a[l / 4 + i % 2 * 8][l % 4 + i / 2 * 4] = number(lane.a[i]);
    for (int i = 0; i < 2; ++i) b[l % 4 + i * 4][l / 4] = number(lane.b[i]);
  }
  for (int l = 0; l < 32; ++l) {
    const auto& lane = *static_cast<Operands*>(lanes[l]);
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
      double sum = lane.c[i];
      for (int k = 0; k < 8; ++k) sum += double{a[row][k]} * b[k][column];
      lane.d[i] = truncated(sum);
    }
  }
  ++cta.counters.mma;
}

}  // namespace

void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]) {
  Operands mine{{}, d, a, b, c};
  running->cta->with_warp(*running, "mma", &mine, multiply_tf32,
                          __builtin_extract_return_addr(__builtin_return_address(0)));
}

void mma_m16n8k16(Operand type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const float (&c)[4]) {
  Operands mine{type, d, a, b, c};
  running->cta->with_warp(*running, "mma", &mine, multiply,
                          __builtin_extract_return_addr(__builtin_return_address(0)));
}

}  // namespace flash_cute::emulator
