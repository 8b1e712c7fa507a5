// The second kernel of split-KV: combines the results of the splits. With few query rows each has a
// CTA. With many, a CTA has up to eight, each of one or more whole warps.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/element.h"
#include "common/fragment.h"
#include "common/platform.h"
#include "common/sink.h"
#include "common/softmax_policy.h"
#include "host/params.h"
#include "host/tile_schedule.h"

namespace flash_cute {

template <DType kDType>
struct CombineKernel {
  using Element = ElementOf<kDType>;
  static constexpr float kNotWritten = -1.f;  // in place of a weight

  struct Traits {
    static constexpr int kThreads = 256;
    static constexpr int kMinCtas = 0;
    struct SharedMemory {
      float limits[kThreads / 32];        // the greatest of the splits that a warp looks at
      float weights[SplitKV::kMaxCount];  // of the splits of each row
      // Of each thread, summed over its splits: the weights, and the weighted output.
      float sums[kThreads];
      alignas(16) float out[kThreads][4];
    };
  };

  struct Arguments {
    FwdParams params;
    cutlass::FastDivmod len_q;
    cutlass::FastDivmod heads;
    cutlass::FastDivmod chunks;  // of four columns
    int64_t rows;
    int log2_threads;  // of the threads of a row: at least a warp
    int stride;        // how many splits these sum at a time

    explicit Arguments(const FwdParams& params)
        : params(params),
          len_q(params.len_q),
          heads(params.heads_q),
          chunks(params.head_dim_v / 4),
          rows(params.rows()),
          log2_threads(choose_log2_threads(params)),
          stride((1 << log2_threads) / chunks.divisor) {}

    int64_t ctas() const { return ceil_div(rows, int64_t{Traits::kThreads} >> log2_threads); }
  };

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    using namespace cute;
    using Copy16Bytes = UniversalCopy<uint128_t>;
    const FwdParams& params = arguments.params;
    const SplitKV& splits = params.splits;
    const SoftmaxPolicy policy(params);
    const int in_cta = platform::thread_index(), log2_threads = arguments.log2_threads;
    const int threads = 1 << log2_threads;      // of a row
    const int thread = in_cta & threads - 1;    // which of these this is
    const int of_cta = in_cta >> log2_threads;  // which of the CTA's rows they have
    const int64_t index =
        (int64_t{platform::cta_index()} * Traits::kThreads >> log2_threads) + of_cta;
    const bool exists = index < arguments.rows;
    int batch_head, query, batch, head;
    arguments.len_q(batch_head, query, static_cast<int>(exists ? index : 0));
    arguments.heads(batch, head, batch_head);
    float* const weights = smem.weights + of_cta * splits.count;
    platform::wait_for_kernel_before();  // the splits are there
    // The address of the row in a (batch, heads_q, len_q, ...) tensor, of split `split`.
    const auto row_of = [&](const auto& view, int split = 0) {
      return view.data + (int64_t{split} * params.entries() + batch) * view.stride_batch +
             head * view.stride_head + query * view.stride_row;
    };
    // Of sequences of their own lengths some have fewer splits.
    const auto is_written = [](const RowStats& row) { return row.limit != INFINITY; };

    // The weights of the splits, all relative to the greatest limit.
    float limit = -INFINITY;
    for (int split = thread; split < splits.count; split += threads) {
      const RowStats row = *row_of(splits.stats, split);
      if (is_written(row)) limit = fmaxf(limit, row.limit);
    }
    CUTE_UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      limit = fmaxf(limit, platform::shuffle_xor(limit, lanes));
    }
    if (thread % 32 == 0) smem.limits[in_cta / 32] = limit;
    platform::sync_cta();  // the limits of all warps are there
    for (int i = 0; i < threads; i += 32) {
      limit = fmaxf(limit, smem.limits[(of_cta * threads + i) / 32]);
    }
    for (int split = thread; split < splits.count; split += threads) {
      const RowStats row = *row_of(splits.stats, split);
      weights[split] = row.sum * policy.rescale(row.limit, limit);  // fault: split-weight
      if (!is_written(row)) weights[split] = kNotWritten;
    }
    platform::sync_cta();  // the weights of all splits are there

    // A thread sums four columns over every `stride`-th split. Up to kLoads loads are in flight.
    constexpr int kLoads = 4;
    const int stride = arguments.stride;
    int first, chunk;
    arguments.chunks(first, chunk, thread);
    float sum = 0.f;
    auto out = make_tensor<float>(_4{});
    clear(out);
    if (first >= stride) first = splits.count;  // nothing is left for this thread
    for (int split0 = first; split0 < splits.count; split0 += kLoads * stride) {
      auto of_splits = make_tensor<float>(Shape<_4, Int<kLoads>>{});
      float weight[kLoads];
      CUTE_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        const int split = split0 + i * stride;
        weight[i] = split < splits.count ? weights[split] : kNotWritten;
        if (weight[i] == kNotWritten) continue;
        const float* const from = row_of(splits.out, split) + 4 * chunk;
        copy(Copy_Atom<Copy16Bytes, float>{}, make_tensor(make_gmem_ptr(from), Shape<_4>{}),
             of_splits(_, i));
      }
      CUTE_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        if (weight[i] == kNotWritten) continue;
        sum += weight[i];
        CUTE_UNROLL
        for (int c = 0; c < 4; ++c) out(c) += weight[i] * of_splits(c, i);
      }
    }
    smem.sums[in_cta] = sum;
    copy(Copy_Atom<Copy16Bytes, float>{}, out,
         make_tensor(make_smem_ptr(smem.out[in_cta]), Shape<_4>{}));
    platform::sync_cta();  // the sums of all threads are there

    // A thread writes eight columns.
    const int first_chunk = 2 * thread;
    if (!exists || first_chunk >= arguments.chunks.divisor) return;
    float total = 0.f;
    auto result = make_tensor<float>(_8{});
    clear(result);
    for (int i = 0; i < stride; ++i) {
      const int summed = of_cta * threads + i * arguments.chunks.divisor + first_chunk;
      total += smem.sums[summed];
      CUTE_UNROLL
      for (int c = 0; c < 8; ++c) result(c) += smem.out[summed + c / 4][c % 4];
    }
    float inverse = total == 0.f ? 0.f : platform::reciprocal(total);
    const RowStats stats = {limit, total};
    float lse = kDType == DType::kFloat ? policy.lse_fp32(stats) : policy.lse(stats);
    // Once, not in each split, and not of a row that no sequence has.
    if (params.sink && is_written(*row_of(splits.stats))) {
      const Sink sink = {params.sink[head]};
      inverse *= sink.share_of_keys(lse);
      lse = sink.join(lse);  // fault: sink-split
    }
    CUTE_UNROLL
    for (int c = 0; c < 8; ++c) result(c) *= inverse;
    Element* to = static_cast<Element*>(params.out.data) + batch * params.out.stride_batch +
                  head * params.out.stride_head + query * params.out.stride_row + 8 * thread;
    if constexpr (std::is_same_v<Element, float>) {
      CUTE_UNROLL
      for (int c = 0; c < 8; c += 4) {
        copy(Copy_Atom<Copy16Bytes, float>{}, make_tensor(result.data() + c, Shape<_4>{}),
             make_tensor(make_gmem_ptr(to + c), Shape<_4>{}));
      }
    } else {
      auto words = make_tensor<uint32_t>(_4{});  // two columns each
      convert_to_words<Element>(result, words);
      copy(Copy_Atom<Copy16Bytes, uint32_t>{}, words,
           make_tensor(make_gmem_ptr(reinterpret_cast<uint32_t*>(to)), Shape<_4>{}));
    }
    if (thread == 0) *row_of(params.lse) = lse;
  }

 private:
  // Up to kFewRows rows each have a CTA: about so many run at a time. Beyond, a row has as few
  // warps as cover its columns, if the weights of all of the CTA's rows fit.
  static int choose_log2_threads(const FwdParams& params) {
    constexpr int kFewRows = 1024, kLog2Most = 8;
    static_assert(1 << kLog2Most == Traits::kThreads);
    if (params.rows() <= kFewRows) return kLog2Most;
    int result = 5;
    while (result < kLog2Most &&
           (1 << result < params.head_dim_v / 4 ||
            params.splits.count > SplitKV::kMaxCount >> (kLog2Most - result))) {
      ++result;
    }
    return result;
  }
};

}  // namespace flash_cute
