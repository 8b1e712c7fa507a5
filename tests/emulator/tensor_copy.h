// Copies of boxes of tensors to shared memory by the copy engine (TMA).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "machine_hopper.h"

namespace flash_cute::emulator {

class Cta;
struct MBarrier;
struct Thread;

// What the machine keeps in the 128 bytes of a CUtensorMap. Dimensions from the innermost outwards,
// elements of 2 bytes.
struct TensorMap {
  static constexpr int kRank = 5;
  static constexpr int kElementBytes = 2;
  static constexpr uint64_t kMark = 0x70616d20726f736e;

  uint64_t mark;  // tells it from other bytes
  const unsigned char* data;
  int64_t strides[kRank];  // bytes
  uint32_t sizes[kRank];
  int16_t box[kRank];
  int16_t row_bytes;  // of a box's rows, within which 16-byte chunks are permuted

  int box_rows() const { return box[1] * box[2] * box[3] * box[4]; }
};
static_assert(sizeof(TensorMap) <= 128);

// What the driver has under the name of cuTensorMapEncodeTiled, and whether it refuses every map.
void* encode_tensor_map();
extern bool refuses_tensor_maps;

class TensorCopies {
 public:
  void reset() { copies_.clear(); }
  bool under_way() const { return !copies_.empty(); }

  // For the running thread.
  void begin(Thread& thread, const void* map, void* target, const void* barrier,
             const std::array<int, TensorMap::kRank>& coordinates, const void* code);
  void land(Cta& cta, uint32_t dice);  // one of those under way
  void check_done(Cta& cta) const;

 private:
  struct Copy {
    TensorMap map;
    std::array<int, TensorMap::kRank> coordinates;
    uint32_t target;
    MBarrier* barrier;
    const void* code;

    int bytes() const { return map.box_rows() * map.row_bytes; }
    // Calls f(offset in the box, address or nullptr where there is none, bytes that exist) for each
    // row.
    template <class F>
    void for_each_row(F&& f) const;
  };
  std::vector<Copy> copies_;
};

}  // namespace flash_cute::emulator
