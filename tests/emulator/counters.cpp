#include "counters.h"

#include <algorithm>

namespace flash_cute::emulator {

void BankConflicts::add(const std::array<uint32_t, 32>& offsets, uint32_t lanes, int bytes,
                        BankCount& count) {
  constexpr int kBanks = 32;
  const int together = bytes == 16 ? 8 : bytes == 8 ? 16 : 32;
  for (int first = 0; first < 32; first += together) {
    std::array<std::array<uint32_t, 32>, kBanks> words;  // the different words asked of each bank
    std::array<int, kBanks> asked{};
    for (int lane = first; lane < first + together; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      for (uint32_t word = offsets[lane] / 4; word <= (offsets[lane] + bytes - 1) / 4; ++word) {
        auto& of_bank = words[word % kBanks];
        int& n = asked[word % kBanks];
        if (std::find(of_bank.begin(), of_bank.begin() + n, word) == of_bank.begin() + n) {
          of_bank[n++] = word;
        }
      }
    }
    const int cycles = *std::max_element(asked.begin(), asked.end());
    if (cycles == 0) continue;
    count.wavefronts += 1;
    count.conflicts += cycles - 1;
  }
}

void BankConflicts::access(int thread, const void* code, uint32_t offset, int bytes,
                           BankCount& count) {
  const int lane = thread % 32;
  Site& site = sites_[reinterpret_cast<uint64_t>(code) << 5 | static_cast<uint64_t>(thread / 32)];
  const int index = site.executed[lane]++ - site.first;
  if (index == static_cast<int>(site.kept.size())) site.kept.emplace_back();
  Instruction& instruction = site.kept[index];
  instruction.offsets[lane] = offset;
  instruction.lanes |= 1u << lane;
  instruction.bytes = bytes;
  instruction.count = &count;
  if (instruction.lanes == ~0u) add(instruction.offsets, instruction.lanes, bytes, count);
  for (; !site.kept.empty() && site.kept.front().lanes == ~0u; site.kept.pop_front()) ++site.first;
}

void BankConflicts::finish() {
  for (auto& [place, site] : sites_) {
    for (const Instruction& i : site.kept) {
      if (i.lanes != ~0u) add(i.offsets, i.lanes, i.bytes, *i.count);
    }
  }
  sites_.clear();
}

}  // namespace flash_cute::emulator
