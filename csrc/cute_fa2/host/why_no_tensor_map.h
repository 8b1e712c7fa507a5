// Which tensors TMA can move.
#pragma once

#include <algorithm>
#include <string>

#include "host/params.h"

namespace flash_cute {

// Why no tensor map can describe the tensor called `name`, or nothing. Its strides are multiples of
// 16 bytes.
inline std::string why_no_tensor_map(const std::string& name, const TensorView<const void*>& view,
                                     int batch, int heads, int rows, int columns,
                                     int element_bytes) {
  const int64_t max_stride = (int64_t{1} << 40) / element_bytes;
  if (view.stride_row == 0 && rows > 1) return "the rows of " + name + " are expanded";
  // The driver's documentation does not say whether it takes these.
  const auto overlap = [&](int64_t stride, int size) {
    return 0 < stride && stride < columns && size > 1;
  };
  if (overlap(view.stride_row, rows) || overlap(view.stride_head, heads) ||
      overlap(view.stride_batch, batch)) {
    return "rows of " + name + " overlap";
  }
  // Heads are two dimensions of a map, those of a group and the groups.
  if (std::max({view.stride_row, view.stride_head * heads, view.stride_batch}) >= max_stride) {
    return "a stride of " + name + " is 2^40 bytes or more";
  }
  return {};
}

}  // namespace flash_cute
