#include "warpgroup.h"

#include <algorithm>
#include <cstring>

#include "cta.h"
#include "operands.h"

namespace flash_cute::emulator {
namespace {

constexpr int kRows = 16;  // of a warp
constexpr int kWarpgroupRows = 4 * kRows;
constexpr int kDepth = 16;
constexpr int kMaxColumns = 256;
constexpr int kElementsOfChunk = SharedMemory::kChunk / 2;

// A matrix in shared memory as a descriptor has it, by chunks of 16 bytes. Chunks are permuted by
// their address, within the 8 rows that make up a swizzle's pattern.
class Operands {
 public:
  explicit Operands(uint64_t descriptor)
      : start_(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading_(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride_(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        base_offset_(static_cast<int>(descriptor >> 49 & 7)),
        chunks_(layout_type(descriptor) == 1   ? 8
                : layout_type(descriptor) == 2 ? 4
                : layout_type(descriptor) == 3 ? 2
                                               : 0) {}

  // Of (rows, k), or transposed (k, rows). The first row of the pattern is the operand's first as
  // well. It may begin within that if it also ends there.
  bool is_emulated(bool transposed, int rows) const {
    if (chunks_ == 0 || base_offset_ != 0) return false;
    const uint32_t first = start_ % (8 * pitch()) / SharedMemory::kChunk;
    const uint32_t wanted = (transposed ? rows : kDepth) / kElementsOfChunk;
    return first == 0 || first + wanted <= chunks_;
  }

  // Runs f(offset, row, k) on each chunk of some of the rows: with its first element, from which on
  // they lie along k, or transposed along the rows.
  template <class F>
  void for_each_chunk(bool transposed, int first_row, int rows, F&& f) const {
    const int along_rows = transposed ? kElementsOfChunk : 1;
    const int along_k = transposed ? 1 : kElementsOfChunk;
    for (int row = first_row; row < first_row + rows; row += along_rows) {
      for (int k = 0; k < kDepth; k += along_k) {
        f(transposed ? of_depth(k, row / along_rows) : of_row(row, k / along_k), row, k);
      }
    }
  }

 private:
  // Of (rows, k), k contiguous: chunk 0 or 1 of 8 elements along k.
  uint32_t of_row(int row, int chunk) const {
    return permuted(start_ + row / 8 * stride_ + row % 8 * pitch() + chunk * SharedMemory::kChunk);
  }
  // Of (k, rows), rows contiguous: 8 elements along them.
  uint32_t of_depth(int k, int chunk) const {
    return permuted(start_ + k / 8 * stride_ + k % 8 * pitch() + chunk / chunks_ * leading_ +
                    chunk % chunks_ * SharedMemory::kChunk);
  }

  static int layout_type(uint64_t descriptor) { return static_cast<int>(descriptor >> 62); }
  uint32_t pitch() const { return chunks_ * SharedMemory::kChunk; }
  uint32_t permuted(uint32_t offset) const { return offset ^ (offset >> 7 & (chunks_ - 1)) << 4; }

  uint32_t start_, leading_, stride_;
  int base_offset_;
  uint32_t chunks_;  // in a row of the pattern
};

// d += a b, of fp32 operands; `b` is (k, columns).
void multiply_add(const float (&a)[kRows][kDepth], const float (&b)[kDepth][kMaxColumns],
                  float (&d)[kRows][kMaxColumns], int columns) {
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kDepth; ++k) {
      const float factor = a[i][k];
      for (int j = 0; j < columns; ++j) d[i][j] += factor * b[k][j];
    }
  }
}

int warp_index(const Thread& thread) { return thread.index / 32; }

bool overlaps(const void* address, int bytes, const void* begin, int size) {
  const auto a = reinterpret_cast<uintptr_t>(address), b = reinterpret_cast<uintptr_t>(begin);
  return a < b + size && b < a + bytes;
}

}  // namespace

void Warpgroups::reset(int threads) {
  warps_.assign(threads / 32, Warp{});
  operands_.assign((threads + 127) / 128, {});
  // As a launch with one CTA on an SM gives them out.
  for (Warp& warp : warps_) warp.registers = std::min(65536 / threads / 8 * 8, 255);
  free_registers_ = 0;
  wanting_registers_.clear();
}

Warpgroups::Warp& Warpgroups::warp_of(const Thread& thread) { return warps_[warp_index(thread)]; }

void Warpgroups::check_registers(const Thread& thread, const void* address, int bytes,
                                 bool is_write, const void* code) const {
  const int lane = thread.index % 32;
  const float* seen = nullptr;  // one after the other has the same accumulators
  for (const Issued& p : warps_[warp_index(thread)].issued) {
    if (!is_write && p.d[lane] == seen) continue;
    seen = p.d[lane];
    const bool of_d = overlaps(address, bytes, p.d[lane], p.shape.columns / 2 * 4);
    const bool of_a = is_write && p.a[lane] && overlaps(address, bytes, p.a[lane], 16);
    if (!of_d && !of_a) continue;
    fail(thread, code, "%s %s of a wgmma that it issued %s and has not waited for",
         is_write ? "writes" : "reads", of_d ? "the accumulators" : "an operand in registers",
         place(p.code).c_str());
  }
}

void Warpgroups::check_done(const Thread& thread) const {
  const auto& issued = warps_[warp_index(thread)].issued;
  if (issued.empty()) return;
  fail(thread, issued.front().code, "ends without having waited for its wgmma");
}

template <class F>
void Warpgroups::for_each_chunk(const Wgmma& product, int warp, F&& f) {
  auto at = [&](uint32_t offset, int, int) { f(offset); };
  Operands(product.b).for_each_chunk(product.b_transposed, 0, product.columns, at);
  if (product.a_registers) return;
  Operands(product.a).for_each_chunk(product.a_transposed, warp % 4 * kRows, kRows, at);
}

void Warpgroups::begin_reads(const Thread* lanes, const Issued& product) {
  SharedMemory::AsyncRead read(lanes->cta->shared, SharedMemory::kWgmma, {lanes, 32}, product.code);
  for_each_chunk(product.shape, warp_index(*lanes), [&](uint32_t offset) { read.begin(offset); });
}

void Warpgroups::fence(Thread& thread, const void* code) {
  auto complete = [](Cta& cta, Thread* lanes, void* const(&)[32]) {
    cta.warpgroups.warp_of(*lanes).fenced = true;
  };
  thread.cta->with_warp(thread, "wgmma.fence", nullptr, complete, code);
}

void Warpgroups::commit(Thread& thread, const void* code) {
  auto complete = [](Cta& cta, Thread* lanes, void* const(&)[32]) {
    Warp& warp = cta.warpgroups.warp_of(*lanes);
    ++warp.group;
    warp.fenced = false;
  };
  thread.cta->with_warp(thread, "wgmma.commit_group", nullptr, complete, code);
}

void Warpgroups::issue(Thread& thread, const Wgmma& product, const void* code) {
  struct Lane {
    const Wgmma& product;
    const void* code;
  } mine{product, code};
  auto complete = [](Cta& cta, Thread* threads, void* const(&lanes)[32]) {
    const auto& [first, code] = *static_cast<Lane*>(lanes[0]);
    Warpgroups& all = cta.warpgroups;
    Warp& warp = all.warp_of(*threads);
    if (!warp.fenced) fail(*threads, code, "issues a wgmma with no wgmma.fence before it");
    if (!Operands(first.b).is_emulated(first.b_transposed, first.columns) ||
        !(first.a_registers || Operands(first.a).is_emulated(first.a_transposed, kWarpgroupRows))) {
      fail(*threads, code, "issues a wgmma of a layout that is not emulated");
    }
    Issued p{first, {}, {}, warp.group, code};
    for (int i = 0; i < 32; ++i) {
      const Wgmma& lane = static_cast<Lane*>(lanes[i])->product;
      p.a[i] = lane.a_registers;
      p.d[i] = lane.d;
      threads[i].wgmmas_in_flight = true;
      if (lane.a != first.a || lane.b != first.b) {
        fail(threads[i], code, "issues another wgmma than the other lanes of its warp");
      }
    }
    // All warps of a warpgroup issue the same, and the same wgmma.commit_group and wait_group
    // before it, as PTX wants it.
    auto& operands = all.operands_[warp_index(*threads) / 4];
    const Shared shared{first.a, first.b, warp.group, warp.waits};
    if (warp.count == static_cast<int64_t>(operands.size())) operands.push_back(shared);
    const Shared& theirs = operands[warp.count++];
    if (theirs.group != shared.group || theirs.waits != shared.waits) {
      fail(*threads, code, "has not waited for wgmmas as its warpgroup's other warps have");
    }
    if (theirs != shared) {
      fail(*threads, code, "issues another wgmma than the other warps of its warpgroup");
    }
    all.begin_reads(threads, p);
    warp.issued.push_back(p);
  };
  thread.cta->with_warp(thread, "wgmma", &mine, complete, code);
}

void Warpgroups::wait(Thread& thread, int groups_in_flight, const void* code) {
  struct Lane {
    int groups;
    const void* code;
  } mine{groups_in_flight, code};
  auto complete = [](Cta& cta, Thread* threads, void* const(&lanes)[32]) {
    const auto& [groups, code] = *static_cast<Lane*>(lanes[0]);
    Warp& warp = cta.warpgroups.warp_of(*threads);
    warp.waits = 31 * warp.waits + groups + 1;
    const int index = warp_index(*threads);
    const Epoch now = threads->clocks.epoch();
    auto is_done = [&](const Issued& p) { return p.group < warp.group - groups; };
    bool any = false;
    for (const Issued& p : warp.issued) {
      if (!is_done(p)) continue;
      run(cta, index, p);
      for_each_chunk(p.shape, index,
                     [&](uint32_t offset) { cta.shared.end_read(offset, index, now, p.code); });
      any = true;
    }
    if (!any) return;
    std::erase_if(warp.issued, is_done);
    for (const Issued& p : warp.issued) cta.warpgroups.begin_reads(threads, p);
    Gathering done;
    done.reset(cta.clock_entries());
    done.add(now);
    const SharedNews news = done.news();
    for (int i = 0; i < 32; ++i) {
      threads[i].clocks.hear(news);
      threads[i].wgmmas_in_flight = !warp.issued.empty();
    }
    threads->clocks.advance();
  };
  thread.cta->with_warp(thread, "wgmma.wait_group", &mine, complete, code);
}

void Warpgroups::run(Cta& cta, int warp, const Issued& product) {
  const Wgmma& p = product.shape;
  float a[kRows][kDepth], b[kDepth][kMaxColumns], d[kRows][kMaxColumns];
  // To (rows, k) of fp32 from `to` on, `across` from a row to the next and `deep` from a k.
  auto load = [&](uint64_t descriptor, bool transposed, int first_row, int rows, float* to,
                  int across, int deep) {
    const int step = transposed ? across : deep;
    Operands(descriptor)
        .for_each_chunk(transposed, first_row, rows, [&](uint32_t at, int i, int k) {
          float wide[kElementsOfChunk];
          widen(p.type, reinterpret_cast<const uint16_t*>(cta.shared.data() + at), wide,
                kElementsOfChunk);
          float* first = to + (i - first_row) * across + k * deep;
          for (int e = 0; e < kElementsOfChunk; ++e) first[e * step] = wide[e];
        });
  };

  // Lane l's rows l / 4 and l / 4 + 8, and of every eight columns its two.
  if (p.a_registers) {
    for (int l = 0; l < 32; ++l) {
      uint16_t bits[4][2];
      std::memcpy(bits, product.a[l], sizeof bits);
      for (int word = 0; word < 4; ++word) {
        widen(p.type, bits[word], &a[l / 4 + word % 2 * 8][l % 4 * 2 + word / 2 * 8], 2);
      }
    }
  } else {
    load(p.a, p.a_transposed, warp % 4 * kRows, kRows, &a[0][0], kDepth, 1);
  }
  load(p.b, p.b_transposed, 0, p.columns, &b[0][0], 1, kMaxColumns);
  for (int l = 0; l < 32; ++l) {
    for (int v = 0; v < p.columns / 2; ++v) {
      d[l / 4 + v / 2 % 2 * 8][v / 4 * 8 + l % 4 * 2 + v % 2] = p.add ? product.d[l][v] : 0.f;
    }
  }
  multiply_add(a, b, d, p.columns);
  for (int l = 0; l < 32; ++l) {
    for (int v = 0; v < p.columns / 2; ++v) {
      product.d[l][v] = d[l / 4 + v / 2 % 2 * 8][v / 4 * 8 + l % 4 * 2 + v % 2];
    }
  }
  ++cta.counters.wgmma;
}

void Warpgroups::register_dealloc(Thread& thread, int registers, const void* code) {
  struct Lane {
    int registers;
    const void* code;
  } mine{registers, code};
  auto complete = [](Cta& cta, Thread* threads, void* const(&lanes)[32]) {
    const auto& [registers, code] = *static_cast<Lane*>(lanes[0]);
    Warpgroups& all = cta.warpgroups;
    Warp& warp = all.warp_of(*threads);
    if (registers > warp.registers || registers % 8 != 0 || registers < 24) {
      fail(*threads, code, "gives registers back down to %d, having %d", registers, warp.registers);
    }
    all.free_registers_ += warp.registers - registers;
    warp.registers = registers;
    for (Thread* other : all.wanting_registers_) cta.wake(*other);
    all.wanting_registers_.clear();
  };
  thread.cta->with_warp(thread, "setmaxnreg.dec", &mine, complete, code);
}

void Warpgroups::register_alloc(Thread& thread, int registers, const void* code) {
  auto complete = [](Cta&, Thread*, void* const(&)[32]) {};
  thread.cta->with_warp(thread, "setmaxnreg.inc", nullptr, complete, code);
  Warp& warp = warp_of(thread);
  if (registers < warp.registers || registers % 8 != 0 || registers > 256) {
    fail(thread, code, "takes registers up to %d, having %d", registers, warp.registers);
  }
  while (warp.registers < registers) {  // the first lane takes them for the warp
    const int more = registers - warp.registers;
    if (more <= free_registers_) {
      free_registers_ -= more;
      warp.registers = registers;
      break;
    }
    wanting_registers_.push_back(&thread);
    thread.cta->wait(thread, "registers", code);
  }
}

}  // namespace flash_cute::emulator
