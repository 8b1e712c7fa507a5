#include "common/grid.h"
#include "host/launch_bwd.h"
#include "sink_gradient/kernel.h"

namespace flash_cute {

void launch_sink_gradient(const BwdParams& params, const BwdPlan& plan, int device,
                          cudaStream_t stream) {
  run_grid<SinkGradientKernel>({params, plan.block_m}, params.heads_q, device, stream);
}

}  // namespace flash_cute
