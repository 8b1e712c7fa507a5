#include "shared_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "cta.h"

namespace flash_cute::emulator {
namespace {

constexpr int kPoison = 0xff;  // NaN in every floating-point type

}  // namespace

SharedMemory::SharedMemory() {
  void* memory = mmap(nullptr, kMaxBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<unsigned char*>(memory);
}

SharedMemory::~SharedMemory() { munmap(data_, kMaxBytes); }

void SharedMemory::reset(int bytes) {
  bytes_ = bytes;
  std::memset(data_, kPoison, bytes);
  cells_.assign(cell_count(bytes), Cell{});
  async_reads_.clear();
}

SharedMemory::Cell* SharedMemory::cells(const Thread& thread, const char* verb, const void* address,
                                        int bytes, const void* code) {
  const uint32_t offset = offset_of(address);
  if (offset + bytes > static_cast<uint32_t>(bytes_)) {
    fail(thread, code, "%s %d bytes at shared + %u, beyond the block's %d bytes", verb, bytes,
         offset, bytes_);
  }
  if (offset % bytes != 0) {
    fail(thread, code, "%s %d bytes at shared + %u, which is not aligned to them", verb, bytes,
         offset);
  }
  Cell* first = &cells_[offset / kCellBytes];
  for (Cell* cell = first; cell < first + cell_count(bytes); ++cell) {
    if (cell->copying) {
      fail(thread, code,
           "%s %d bytes at shared + %u, where a copy is under way that thread %u began %s and has "
           "not waited for",
           verb, bytes, offset, cell->copying - 1, place(cell->written_by).c_str());
    }
  }
  return first;
}

void SharedMemory::read(const Thread& thread, const void* address, int bytes, const void* code) {
  Cell* first = cells(thread, "reads", address, bytes, code);
  const Epoch now = thread.clocks.epoch(thread.index);
  for (Cell* cell = first; cell < first + cell_count(bytes); ++cell) {
    if (!cell->written) {
      fail(thread, code, "reads %d bytes at shared + %u, which nobody has written", bytes,
           offset_of(address));
    }
    if (!thread.clocks.ordered(cell->written)) {
      fail(thread, code,
           "reads %d bytes at shared + %u, which thread %d wrote %s with no barrier in between",
           bytes, offset_of(address), cell->written.thread(), place(cell->written_by).c_str());
    }
    if (cell->read[0] != now) {
      if (cell->read[0].thread() / 32 != thread.index / 32) cell->read[1] = cell->read[0];
      cell->read[0] = now;
      cell->read_by = code;
    }
  }
}

void SharedMemory::check_exclusive(const Thread& thread, const char* verb, const void* address,
                                   int bytes, const void* code) {
  Cell* first = cells(thread, verb, address, bytes, code);
  for (Cell* cell = first; cell < first + cell_count(bytes); ++cell) {
    if (!thread.clocks.ordered(cell->written)) {
      fail(thread, code,
           "%s %d bytes at shared + %u, which thread %d wrote %s with no barrier in between", verb,
           bytes, offset_of(address), cell->written.thread(), place(cell->written_by).c_str());
    }
    for (Epoch read : cell->read) {
      if (thread.clocks.ordered(read)) continue;
      fail(thread, code,
           "%s %d bytes at shared + %u, which thread %d read %s with no barrier in between", verb,
           bytes, offset_of(address), read.thread(), place(cell->read_by).c_str());
    }
  }
  if (async_reads_.empty()) return;
  const uint32_t offset = offset_of(address);
  for (uint32_t chunk = offset / kChunk; chunk <= (offset + bytes - 1) / kChunk; ++chunk) {
    const ChunkReads& reads = async_reads_[chunk];
    for (Epoch read : reads.by_warp) {
      if (!read || thread.clocks.ordered(read)) continue;
      const bool in_flight = read == Epoch::never_ending(read.thread());
      fail(thread, code, "%s %d bytes at shared + %u, which a product of warp %d %s %s%s", verb,
           bytes, offset, read.thread() / 32, in_flight ? "still reads" : "has read",
           place(reads.code).c_str(), in_flight ? "" : ", with no barrier in between");
    }
  }
}

SharedMemory::AsyncRead::AsyncRead(SharedMemory& memory, const Thread* lanes, const void* code)
    : memory_(memory), lanes_(lanes), code_(code) {
  if (memory.async_reads_.empty()) memory.async_reads_.resize(memory.bytes_ / kChunk + 1);
}

const unsigned char* SharedMemory::AsyncRead::begin(uint32_t offset) {
  if (offset % kChunk != 0 || offset + kChunk > static_cast<uint32_t>(memory_.bytes_)) {
    fail(*lanes_, code_, "multiplies what lies at shared + %u, beyond the block's %d bytes", offset,
         memory_.bytes_);
  }
  const Cell* first = &memory_.cells_[offset / kCellBytes];
  for (const Cell* cell = first; cell < first + cell_count(kChunk); ++cell) {
    if (cell->copying) {
      fail(*lanes_, code_,
           "multiplies what lies at shared + %u, where a copy is under way that thread %u began "
           "%s and has not waited for",
           offset, cell->copying - 1, place(cell->written_by).c_str());
    }
    if (cell->written == seen_ && seen_) continue;
    if (!cell->written) {
      fail(*lanes_, code_, "multiplies what lies at shared + %u, which nobody has written", offset);
    }
    for (const Thread* lane = lanes_; lane < lanes_ + 32; ++lane) {
      if (lane->clocks.ordered(cell->written)) continue;
      fail(*lane, code_,
           "multiplies what lies at shared + %u, which a copy brought that began %s, with no "
           "barrier in between",
           offset, place(cell->written_by).c_str());
    }
    if (cell->written.thread() < lanes_->cta->launch().threads) {
      fail(*lanes_, code_,
           "multiplies what lies at shared + %u, which thread %d wrote %s: products see it after "
           "a fence.proxy.async alone",
           offset, cell->written.thread(), place(cell->written_by).c_str());
    }
    seen_ = cell->written;
  }
  ChunkReads& reads = memory_.async_reads_[offset / kChunk];
  reads.by_warp[lanes_->index / 32] = Epoch::never_ending(lanes_->index);
  reads.code = code_;
  return memory_.data_ + offset;
}

void SharedMemory::end_read(uint32_t offset, int warp, Epoch read, const void* code) {
  ChunkReads& reads = async_reads_[offset / kChunk];
  reads.by_warp[warp] = read;
  reads.code = code;
}

void SharedMemory::land_chunk(uint32_t offset, const unsigned char* from, Epoch written,
                              const void* code) {
  Cell* first = &cells_[offset / kCellBytes];
  std::fill(first, first + cell_count(kChunk), Cell{written, {}, 0, code, nullptr});
  std::memcpy(data_ + offset, from, kChunk);
}

void SharedMemory::write(const Thread& thread, const void* address, int bytes, const void* code) {
  check_exclusive(thread, "writes", address, bytes, code);
  Cell* first = &cells_[offset_of(address) / kCellBytes];
  const Cell written{thread.clocks.epoch(thread.index), {}, 0, code, nullptr};
  std::fill(first, first + cell_count(bytes), written);
}

void SharedMemory::begin_copy(const Thread& thread, void* target, int bytes, const void* code) {
  check_exclusive(thread, "begins to copy", target, bytes, code);
  Cell* first = &cells_[offset_of(target) / kCellBytes];
  const Cell copying{{}, {}, static_cast<uint32_t>(thread.index) + 1, code, nullptr};
  std::fill(first, first + cell_count(bytes), copying);
  std::memset(target, kPoison, bytes);
}

void SharedMemory::land_copy(const Thread& thread, void* target, const unsigned char* from,
                             int bytes, const void* code) {
  Cell* first = &cells_[offset_of(target) / kCellBytes];
  const Cell written{thread.clocks.epoch(thread.index), {}, 0, code, nullptr};
  std::fill(first, first + cell_count(bytes), written);
  std::memcpy(target, from, bytes);
}

}  // namespace flash_cute::emulator
