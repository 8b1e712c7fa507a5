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
    fail(thread, code, "%s %d bytes at shared + %u, beyond the CTA's %d bytes", verb, bytes, offset,
         bytes_);
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
  const Epoch now = thread.clocks.epoch();
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
      fail(thread, code, "%s %d bytes at shared + %u, which %s of warp %d %s %s%s", verb, bytes,
           offset, reads.reader->name, read.thread() / 32, in_flight ? "still reads" : "has read",
           place(reads.code).c_str(), in_flight ? "" : ", with no barrier in between");
    }
  }
}

SharedMemory::AsyncRead::AsyncRead(SharedMemory& memory, const AsyncReader& reader,
                                   std::span<const Thread> threads, const void* code)
    : memory_(memory), reader_(reader), threads_(threads), code_(code) {
  if (memory.async_reads_.empty()) memory.async_reads_.resize(memory.bytes_ / kChunk + 1);
}

void SharedMemory::AsyncRead::begin(uint32_t offset) {
  const Thread& first_thread = threads_.front();
  if (offset % kChunk != 0 || offset + kChunk > static_cast<uint32_t>(memory_.bytes_)) {
    fail(first_thread, code_, "%s what lies at shared + %u, beyond the CTA's %d bytes",
         reader_.verb, offset, memory_.bytes_);
  }
  const Cell* first = &memory_.cells_[offset / kCellBytes];
  for (const Cell* cell = first; cell < first + cell_count(kChunk); ++cell) {
    if (cell->written == seen_ && seen_ && !cell->copying) continue;
    for (const Thread& thread : threads_) check(thread, offset, *cell);
    seen_ = cell->written;
  }
  ChunkReads& reads = memory_.async_reads_[offset / kChunk];
  reads.by_warp[first_thread.index / 32] = Epoch::never_ending(first_thread.index);
  reads.reader = &reader_;
  reads.code = code_;
}

void SharedMemory::AsyncRead::check(const Thread& thread, uint32_t offset, const Cell& cell) const {
  if (cell.copying) {
    fail(thread, code_,
         "%s what lies at shared + %u, where a copy is under way that thread %u began %s and has "
         "not waited for",
         reader_.verb, offset, cell.copying - 1, place(cell.written_by).c_str());
  }
  if (!cell.written) {
    fail(thread, code_, "%s what lies at shared + %u, which nobody has written", reader_.verb,
         offset);
  }
  const int writer = cell.written.thread();
  const bool by_copy = writer >= thread.cta->launch().threads;
  if (!thread.clocks.ordered(cell.written)) {
    const std::string who =
        by_copy ? "a copy brought that began" : "thread " + std::to_string(writer) + " wrote";
    fail(thread, code_, "%s what lies at shared + %u, which %s %s, with no barrier in between",
         reader_.verb, offset, who.c_str(), place(cell.written_by).c_str());
  }
  if (!by_copy && !thread.clocks.fenced(cell.written)) {
    fail(thread, code_,
         "%s what lies at shared + %u, which thread %d wrote %s, with no fence.proxy.async ahead "
         "of the barrier in between",
         reader_.verb, offset, writer, place(cell.written_by).c_str());
  }
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
  const Cell written{thread.clocks.epoch(), {}, 0, code, nullptr};
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
  const Cell written{thread.clocks.epoch(), {}, 0, code, nullptr};
  std::fill(first, first + cell_count(bytes), written);
  std::memcpy(target, from, bytes);
}

}  // namespace flash_cute::emulator
