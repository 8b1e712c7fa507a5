// An operand of wgmma in shared memory: a descriptor of 64 bits for each 16 of K. The lower word
// has the address, in units of 16 bytes.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

// Tiles of an operand, kTileBytes from one to the next. CuTe makes a descriptor from a pointer in
// some ten instructions at each use, and three more for each 16 of K. Here the first descriptor of
// the first tile is made once, and the others from it by an addition.
template <class Fragment, int kTileBytes>
class SharedOperand {
 public:
  // Of the first tile, (1, 1, K / 16).
  explicit CUTE_DEVICE SharedOperand(const Fragment& fragment) : first_(fragment.data()) {
    uint32_t& low = first_.desc_.reg32_[0];
    low = platform::warp_uniform(static_cast<int>(low));
  }

  // The same, where the first tile begins at `address`, in units of 16 bytes: of the fragment's,
  // only the layout counts. So several operands can have one address in a register.
  CUTE_DEVICE SharedOperand(const Fragment& fragment, uint32_t address) : first_(fragment.data()) {
    uint32_t& low = first_.desc_.reg32_[0];
    low = (low & ~kAddress) | address;
  }

  // The address of a fragment, in units of 16 bytes.
  static CUTE_DEVICE uint32_t address_of(const Fragment& fragment) {
    return fragment.data().desc_.reg32_[0] & kAddress;
  }

  // fragment(_, _, k) of a tile, (1, 1). A 64-bit sum is one instruction (UIADD3.64), but where
  // both operands are in shared memory (`kOfTwo`) ptxas makes four of it.
  template <bool kOfTwo>
  CUTE_DEVICE auto descriptor(int tile, int k) const {
    constexpr typename Fragment::layout_type layout;
    auto at = first_;
    at.desc_.reg32_[0] += tile * (kTileBytes / 16);
    if constexpr (kOfTwo) {
      at.desc_.reg32_[0] += layout(0, 0, k);
    } else {
      at.desc_.desc_ += static_cast<uint64_t>(layout(0, 0, k));
    }
    return cute::make_tensor(at, cute::select<0, 1>(layout));
  }

 private:
  static constexpr uint32_t kAddress = 0x3fff;  // these bits of the lower word

  cute::SM90::GMMA::DescriptorIterator first_;
};

}  // namespace flash_cute::sm90
