// An operand of products in shared memory, in the words of wgmma: a descriptor of 64 bits for each
// 16 of the products' K, whose lower word has the address, in units of 16 bytes.
#pragma once

#include <cute/tensor.hpp>

#include "common/platform.h"
#include "sm90/hopper.h"

namespace flash_cute::sm90 {

// Tiles of an operand, kTileBytes from one to the next. From a pointer CuTe makes descriptors in
// some ten instructions at each use, and for each 16 of K adds to the lower word and takes the
// upper one anew, which is three more. Here the first of the first tile is made once, and the
// others from it.
template <class Fragment, int kTileBytes>
class SharedOperand {
 public:
  // Of the first tile, (1, 1, K / 16).
  explicit CUTE_DEVICE SharedOperand(const Fragment& fragment) : first_(fragment.data()) {
    uint32_t& low = first_.desc_.reg32_[0];
    low = platform::warp_uniform(static_cast<int>(low));
  }

  // fragment(_, _, k) of a tile, (1, 1). The sum of 64 bits is one instruction (UIADD3.64), but not
  // where a product has two operands in shared memory (`kOfTwo`): there ptxas makes four of it.
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
  cute::SM90::GMMA::DescriptorIterator first_;
};

}  // namespace flash_cute::sm90
