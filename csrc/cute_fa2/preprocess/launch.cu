#include "common/grid.h"
#include "host/launch_bwd.h"
#include "preprocess/kernel.h"
#include "static_switch.h"

namespace flash_cute {

void launch_preprocess(const BwdParams& params, const BwdPlan& plan, int device,
                       cudaStream_t stream) {
  dtype_switch(params.dtype, [&](auto dtype) {
    using Kernel = PreprocessKernel<dtype()>;
    run_grid<Kernel>(
        typename Kernel::Arguments(params, plan),
        int64_t{params.is_packed() ? 1 : params.batch} * params.heads_q * params.m_blocks, device,
        stream, /*overlaps=*/params.is_packed());
  });
}

}  // namespace flash_cute
