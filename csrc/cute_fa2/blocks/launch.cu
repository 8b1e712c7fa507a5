#include <algorithm>

#include "blocks/kernel.h"
#include "common/grid.h"
#include "host/launch_blocks.h"

namespace flash_cute {

void launch_blocks(const AttentionParams& params, const BlockRequests& requests, int device,
                   cudaStream_t stream) {
  // Rows outside of the sequences may be many: as many CTAs clear them as keep a GPU busy.
  constexpr int64_t kClearingCtas = 256;
  const int64_t gaps = int64_t{params.batch} + 1;
  const int shares = static_cast<int>(std::max<int64_t>(1, kClearingCtas / gaps));
  const int64_t clearing = requests.result_count > 0 || requests.stats ? gaps * shares : 0;
  // Not in the call: of a temporary g++ 12 clears the padding in the wrong place.
  const BlocksKernel::Arguments arguments = {params, requests, shares};
  const int64_t listing = requests.list_count + BlocksKernel::ctas_of_rows(requests);
  run_grid<BlocksKernel>(arguments, listing + clearing, device, stream);
}

}  // namespace flash_cute
