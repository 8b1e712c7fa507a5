// The gradient of a learnable sink, of what the preprocess kernel has found of each row: the sink
// of a head gets -sum(P_sink * delta) over its rows, with P_sink = e^(sink - lse). A CTA for each
// head.
#pragma once

#include <cute/config.hpp>

#include "common/platform.h"
#include "common/row_grad_stats.h"
#include "common/sequence.h"
#include "common/sink.h"
#include "host/params.h"

namespace flash_cute {

struct SinkGradientKernel {
  struct Traits {
    static constexpr int kThreads = 256;
    static constexpr int kMinCtas = 0;
    struct SharedMemory {
      float sums[kThreads];
    };
  };

  struct Arguments {
    BwdParams params;
    int block_m;
  };

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    const BwdParams& params = arguments.params;
    const bool is_packed = has_sequences(params.mask);
    const int head = platform::cta_index();
    const int thread = platform::thread_index();
    const float sink_log2 = params.sink[head] * Sink::kLog2e;
    float sum = 0.f;  // in a fixed order
    for (int entry = 0; entry < (is_packed ? 1 : params.batch); ++entry) {
      for (int block = 0; block < params.m_blocks; ++block) {
        if (is_packed && params.row_blocks[block].batch < 0) continue;
        const int64_t index = (int64_t{entry} * params.heads_q + head) * params.m_blocks + block;
        for (int row = thread; row < arguments.block_m; row += Traits::kThreads) {
          const RowGradStats stats =
              stats_of_row(in_pairs(params.workspace.stats + index * arguments.block_m), row);
          sum -= platform::exp2(sink_log2 - stats.lse_log2) * stats.delta;  // fault: sink-gradient
        }
      }
    }
    smem.sums[thread] = sum;
    for (int half = Traits::kThreads / 2; half > 0; half /= 2) {
      platform::sync_cta();  // the sums of all threads are there
      if (thread < half) smem.sums[thread] += smem.sums[thread + half];
    }
    if (thread == 0) params.dsink[head] = smem.sums[0];
  }
};

}  // namespace flash_cute
