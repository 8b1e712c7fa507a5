#include "global_memory.h"

#include <algorithm>
#include <tuple>

namespace flash_cute::emulator {
namespace {

constexpr const char* kMisaligned = "which is not aligned to them";

bool is_workspace(GlobalMemory::Use use) {
  using Use = GlobalMemory::Use;
  return use == Use::kWorkspace || use == Use::kPartly || use == Use::kCleared;
}

bool aligned(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace

void GlobalMemory::add(const Tensor& t) {
  const auto data = reinterpret_cast<uintptr_t>(t.data);
  for (int64_t i = 0; i < t.sizes[0]; ++i) {
    for (int64_t j = 0; j < t.sizes[1]; ++j) {
      for (int64_t k = 0; k < t.sizes[2]; ++k) {
        const uintptr_t begin = data + i * t.strides[0] + j * t.strides[1] + k * t.strides[2];
        rows_.push_back({begin, begin + t.row_bytes, t.name, t.use, {i, j, k}, cells_});
        if (t.use != Use::kInput) cells_ += t.row_bytes / kCellBytes;
      }
    }
  }
}

void GlobalMemory::begin_launch() {
  auto before = [](const Row& a, const Row& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  };
  std::stable_sort(rows_.begin(), rows_.end(), before);
  auto same = [](const Row& a, const Row& b) { return a.begin == b.begin && a.end == b.end; };
  rows_.erase(std::unique(rows_.begin(), rows_.end(), same), rows_.end());
  std::vector<std::atomic<uint8_t>> written(cells_);
  for (size_t i = 0; i < written_.size(); ++i) written[i] = written_[i] ? kBefore : kNever;
  written_ = std::move(written);
}

const GlobalMemory::Row* GlobalMemory::row_of(const void* address, int bytes) const {
  const auto first = reinterpret_cast<uintptr_t>(address);
  auto begins_after = [](uintptr_t value, const Row& row) { return value < row.begin; };
  auto next = std::upper_bound(rows_.begin(), rows_.end(), first, begins_after);
  if (next == rows_.begin()) return nullptr;
  const Row& row = *std::prev(next);
  return first + bytes <= row.end ? &row : nullptr;
}

std::string GlobalMemory::name(const Row& row) {
  return std::string(row.tensor) + "[" + std::to_string(row.at[0]) + ", " +
         std::to_string(row.at[1]) + ", " + std::to_string(row.at[2]) + "]";
}

std::string GlobalMemory::nearest(const void* address) const {
  if (rows_.empty()) return "and there are no tensors";
  const auto first = reinterpret_cast<uintptr_t>(address);
  auto begins_after = [](uintptr_t value, const Row& row) { return value < row.begin; };
  auto next = std::upper_bound(rows_.begin(), rows_.end(), first, begins_after);
  const Row& row = next == rows_.begin() ? *next : *std::prev(next);
  const auto distance = static_cast<int64_t>(first - row.begin);
  return "which is in no row of any tensor: byte " + std::to_string(distance) + " of " + name(row) +
         ", which has " + std::to_string(row.end - row.begin);
}

std::string GlobalMemory::read(const void* address, int bytes, int alignment) {
  if (!aligned(address, alignment)) return kMisaligned;
  const Row* row = row_of(address, bytes);
  if (!row) return nearest(address);
  if (row->use == Use::kOutput) return "of the output " + name(*row) + ", which is not to be read";
  if (is_workspace(row->use) || row->use == Use::kSums) {
    const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) - row->begin);
    for (int64_t i = offset / kCellBytes; i < (offset + bytes) / kCellBytes; ++i) {
      uint8_t state = kBefore;
      auto& cell = written_[row->first_cell + i];
      if (row->use == Use::kSums && cell.load(std::memory_order_relaxed) != kNever) {
        cell.store(kRead, std::memory_order_relaxed);
        continue;
      }
      if (!cell.compare_exchange_strong(state, kRead, std::memory_order_relaxed) &&
          state != kRead) {
        return "byte " + std::to_string(i * kCellBytes) + " of " + name(*row) +
               (state == kReduced ? ", to which this launch adds"
                                  : ", which no launch before has written");
      }
    }
  }
  return "";
}

std::string GlobalMemory::reduce(const void* address, int bytes) {
  if (!aligned(address, bytes)) return kMisaligned;
  const Row* row = row_of(address, bytes);
  if (!row) return nearest(address);
  if (!is_workspace(row->use) && row->use != Use::kSums)
    return "of " + name(*row) + ", which is no workspace";
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) - row->begin);
  for (int64_t i = offset / kCellBytes; i < (offset + bytes) / kCellBytes; ++i) {
    const uint8_t before =
        written_[row->first_cell + i].exchange(kReduced, std::memory_order_relaxed);
    if (before == kRead) return "of " + name(*row) + ", which this launch reads";
    const bool is_stored = row->use == Use::kSums && before == kInThisLaunch;
    if (before != kBefore && before != kReduced && !is_stored) {
      return "of " + name(*row) + ", which no launch before has written";
    }
  }
  return "";
}

std::string GlobalMemory::write(const void* address, int bytes, int alignment) {
  if (!aligned(address, alignment)) return kMisaligned;
  const Row* row = row_of(address, bytes);
  if (!row) return nearest(address);
  if (row->use == Use::kInput) return "of the input " + name(*row);
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) - row->begin);
  for (int64_t i = offset / kCellBytes; i < (offset + bytes) / kCellBytes; ++i) {
    const uint8_t before =
        written_[row->first_cell + i].exchange(kInThisLaunch, std::memory_order_relaxed);
    if (before != kNever && (row->use != Use::kCleared || before != kBefore)) {
      return "of " + name(*row) + ", which has been written already";
    }
  }
  return "";
}

std::string GlobalMemory::unwritten() const {
  for (const Row& row : rows_) {
    if (row.use == Use::kInput || row.use == Use::kSums || row.use == Use::kPartly) continue;
    for (int64_t i = 0; i < static_cast<int64_t>(row.end - row.begin) / kCellBytes; ++i) {
      if (!written_[row.first_cell + i].load(std::memory_order_relaxed)) {
        return "nobody has written byte " + std::to_string(i * kCellBytes) + " of " + name(row);
      }
    }
  }
  return "";
}

}  // namespace flash_cute::emulator
