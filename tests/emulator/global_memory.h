// The global memory that a kernel may touch: the rows of its tensors and no byte beside them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flash_cute::emulator {

class GlobalMemory {
 public:
  enum class Use { kInput, kOutput, kWorkspace, kPartly, kCleared, kSums };

  // A tensor of up to 3 dimensions of rows; strides in bytes. Every byte of an output and of a
  // workspace must be written exactly once. An output is never read, a workspace by launches after
  // the one that has written it. Such a launch may instead add to it, in several CTAs. Then later
  // ones may read it. Of kPartly some may stay unwritten. Of kCleared a launch may write what one
  // before has written, and nobody has read. Sums need not be written. A launch may
  // store them, add to them and read them, each byte in this order.
  struct Tensor {
    const char* name;
    Use use;
    const void* data;
    int64_t sizes[3];
    int64_t strides[3];
    int64_t row_bytes;
  };

  void add(const Tensor& tensor);  // between launches
  void begin_launch();

  // Nothing if `address` may be used so, else what is wrong with it.
  std::string read(const void* address, int bytes) { return read(address, bytes, bytes); }
  std::string read(const void* address, int bytes, int alignment);
  std::string write(const void* address, int bytes) { return write(address, bytes, bytes); }
  std::string write(const void* address, int bytes, int alignment);
  std::string reduce(const void* address, int bytes);

  // What of the outputs and workspaces nobody has written; nothing if all is there.
  std::string unwritten() const;

 private:
  static constexpr int kCellBytes = 2;
  struct Row {
    uintptr_t begin, end;
    const char* tensor;
    Use use;
    int64_t at[3];
    int64_t first_cell;  // in `written_`, of what is no input
  };
  // When a cell was written. kRead, kReduced: before, and in this launch it was read or added to.
  enum State : uint8_t { kNever, kInThisLaunch, kBefore, kRead, kReduced };
  const Row* row_of(const void* address, int bytes) const;
  static std::string name(const Row& row);
  std::string nearest(const void* address) const;

  std::vector<Row> rows_;  // by address; where rows of inputs coincide, one of them
  std::vector<std::atomic<uint8_t>> written_;
  int64_t cells_ = 0;
};

}  // namespace flash_cute::emulator
