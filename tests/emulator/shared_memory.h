// The shared memory of a CTA, stricter than the real one: it knows who wrote and who last read each
// byte, and refuses what no barrier orders.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "clocks.h"

namespace flash_cute::emulator {

struct Thread;

class SharedMemory {
  struct Cell;

 public:
  static constexpr int kMaxBytes = 256 * 1024;

  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  // Everything poisoned, nothing written.
  void reset(int bytes);

  unsigned char* data() { return data_; }
  bool contains(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(data_) < kMaxBytes;
  }
  uint32_t offset_of(const void* address) const {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(address) - data_);
  }

  // Checks an access by `thread` and remembers it; `code` is where in the code it stands.
  void read(const Thread& thread, const void* address, int bytes, const void* code);
  void write(const Thread& thread, const void* address, int bytes, const void* code);

  // An asynchronous copy in two steps. From its beginning nobody may touch the target. What it
  // brings is written when the thread that began it waits for it.
  void begin_copy(const Thread& thread, void* target, int bytes, const void* code);
  void land_copy(const Thread& thread, void* target, const unsigned char* from, int bytes,
                 const void* code);

  // What TMA loads, in chunks of 16 bytes: written at an epoch of its own.
  static constexpr int kChunk = 16;
  void land_chunk(uint32_t offset, const unsigned char* from, Epoch written, const void* code);

  // Who reads beside the threads, in their name: what is behind a proxy fence.
  struct AsyncReader {
    const char* name;
    const char* verb;
  };
  static constexpr AsyncReader kWgmma = {"a wgmma", "multiplies"};
  static constexpr AsyncReader kTmaStore = {"a TMA store", "stores"};
  static constexpr AsyncReader kTmaReduction = {"a TMA reduction", "adds"};
  // A chunk that is read asynchronously in the name of a warp's threads, in two steps. From its
  // beginning nobody may write it. The warp ends it by waiting for it, at `read`.
  class AsyncRead {
   public:
    AsyncRead(SharedMemory& memory, const AsyncReader& reader, std::span<const Thread> threads,
              const void* code);
    void begin(uint32_t offset);

   private:
    // Fails if it is not for this thread to have the chunk read, as it was last written.
    void check(const Thread& thread, uint32_t offset, const Cell& cell) const;

    SharedMemory& memory_;
    const AsyncReader& reader_;
    std::span<const Thread> threads_;
    const void* code_;
    Epoch seen_;  // the last that all threads have heard of
  };
  void end_read(uint32_t offset, int warp, Epoch read, const void* code);

 private:
  // What is known of a few neighbouring bytes. Readers are remembered one for each of two warps:
  // whoever writes with no barrier behind them is in conflict with one of the two.
  struct Cell {
    Epoch written;
    Epoch read[2];
    uint32_t copying;  // 1 + the thread whose copy to here is under way
    const void* written_by;
    const void* read_by;
  };
  static constexpr int kCellBytes = 2;  // the smallest element of a kernel
  static constexpr int cell_count(int bytes) { return (bytes + kCellBytes - 1) / kCellBytes; }

  // The cells of an access that lies within the CTA's shared memory and is aligned.
  Cell* cells(const Thread& thread, const char* verb, const void* address, int bytes,
              const void* code);
  void check_exclusive(const Thread& thread, const char* verb, const void* address, int bytes,
                       const void* code);

  static constexpr int kMaxWarps = 32;
  // For each warp of the last asynchronous read of a chunk.
  struct ChunkReads {
    Epoch by_warp[kMaxWarps];
    const AsyncReader* reader;
    const void* code;
  };

  unsigned char* data_;
  int bytes_ = 0;
  std::vector<Cell> cells_;
  std::vector<ChunkReads> async_reads_;  // none, or for each chunk
};

}  // namespace flash_cute::emulator
