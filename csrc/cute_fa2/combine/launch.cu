#include "combine/kernel.h"
#include "common/grid.h"
#include "host/launch_fwd.h"
#include "static_switch.h"

namespace flash_cute {

void launch_combine(const FwdParams& params, int device, cudaStream_t stream) {
  dtype_switch(params.dtype, [&](auto dtype) {
    using Kernel = CombineKernel<dtype()>;
    const typename Kernel::Arguments arguments(params);
    run_grid<Kernel>(arguments, arguments.ctas(), device, stream, /*overlaps=*/true);
  });
}

}  // namespace flash_cute
