// TMA: copies boxes of tensors, and bytes that lie one behind the other, to shared memory, and from
// there.
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

using Coordinates = std::array<int, TensorMap::kRank>;

// What the driver has under the name of cuTensorMapEncodeTiled, and whether it refuses every map.
void* encode_tensor_map();
extern bool refuses_tensor_maps;

class Tma {
 public:
  void reset();
  bool under_way() const { return !loads_.empty() || unread_ > 0; }

  // For the running thread.
  void load(Thread& thread, const void* map, void* target, const void* barrier,
            const Coordinates& coordinates, const void* code);
  void store(Thread& thread, const void* map, const void* source, const Coordinates& coordinates,
             const void* code);
  void bulk_load(Thread& thread, const void* source, void* target, int bytes, const void* barrier,
                 const void* code);
  void bulk_store(Thread& thread, float* target, const void* source, int bytes, const void* code);
  void bulk_reduce_add(Thread& thread, float* sums, const void* source, int bytes,
                       const void* code);
  void wait(Thread& thread, int groups_in_flight);
  void wait_complete(Thread& thread, const void* code);
  void check_stored(const Thread& thread) const;  // at its end

  bool adds(const Thread& thread) const;  // it has not waited for all that it adds
  void happen(Cta& cta, uint32_t dice);   // one of those under way
  void end(Cta& cta);

 private:
  struct Box {
    TensorMap map;
    Coordinates coordinates;
    uint32_t offset;  // in shared memory
    const void* code;

    int bytes() const { return map.box_rows() * map.row_bytes; }
    // Calls f(offset in the box, address or nullptr where there is none, bytes that exist) for each
    // row.
    template <class F>
    void for_each_row(F&& f) const;
    // Calls f(offset in shared memory, address or nullptr, bytes that exist) for each chunk.
    template <class F>
    void for_each_chunk(F&& f) const;
  };
  struct Load {
    Box box;
    MBarrier* barrier;
  };
  struct Store {
    Box box;
    enum class Kind { kTensor, kFlat, kAdds } kind;
    const Thread* thread;
    int64_t group;
    bool has_read;  // shared memory, and written if to a tensor
  };
  // What has been read, and will be added or stored when the thread waits for that, or as the CTA
  // ends.
  struct Addition {
    const Thread* thread;
    int64_t group;
    float* sums;
    std::vector<float> x;
    bool adds;
    void land() const;
  };
  static Box box_at(Thread& thread, const char* verb, const void* map, const void* shared,
                    const Coordinates& coordinates, const void* code);
  static Box flat_box(Thread& thread, const char* verb, const void* global, const void* shared,
                      int bytes, const void* code);
  void begin_load(Thread& thread, const Box& box, const void* barrier);
  void begin_store(Thread& thread, const Box& box, Store::Kind kind);
  static void land(Cta& cta, const Load& load);
  static void begin_read(Cta& cta, const Store& store);
  void read(Cta& cta, Store& store);

  std::vector<Load> loads_;    // under way
  std::vector<Store> stores_;  // that have not been waited for
  int unread_ = 0;             // of them
  std::vector<Addition> additions_;
};

}  // namespace flash_cute::emulator
