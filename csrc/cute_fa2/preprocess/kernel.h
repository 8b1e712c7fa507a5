// A kernel ahead of a backward's tiles: what a step needs of each query row, counters, sums that
// begin as 0 (sm80), and dQ of blocks of rows that see no key (sm90). A CTA for each block of rows.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/element.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/row_grad_stats.h"
#include "common/sequence.h"
#include "host/params.h"
#include "host/plan_bwd.h"

namespace flash_cute {

template <DType kDType>
struct PreprocessKernel {
  using Element = ElementOf<kDType>;

  struct Traits {
    static constexpr int kThreads = 256;
    static constexpr int kMinCtas = 0;
    struct SharedMemory {};
  };
  static constexpr int kLanes = 8;  // of a row

  struct Arguments {
    BwdParams params;
    cutlass::FastDivmod m_blocks;
    cutlass::FastDivmod heads;
    int block_m;
    int block_n;
    int tile_head_dim;

    Arguments(const BwdParams& params, const BwdPlan& plan)
        : params(params),
          m_blocks(params.m_blocks),
          heads(params.heads_q),
          block_m(plan.block_m),
          block_n(plan.block_n),
          tile_head_dim(plan.head_dim) {}
  };

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory&) {
    const BwdParams& params = arguments.params;
    const bool is_packed = has_sequences(params.mask);
    const int thread = platform::thread_index();
    const int64_t block = platform::cta_index();
    if (thread == 0 && block == 0 && params.workspace.tickets) *params.workspace.tickets = 0;
    if (int* const finished = params.workspace.finished) {
      if (block == 0 && thread < DqFinished::kBlocks) finished[thread] = 0;
      if (thread == 0) finished[DqFinished::kBlocks + block] = -1;
    }
    int batch_head, m_block, batch, head;
    arguments.m_blocks(batch_head, m_block, platform::cta_index());
    arguments.heads(batch, head, batch_head);
    const int row0 = m_block * arguments.block_m;
    SequenceBlock rows = {batch, row0, cute::min(arguments.block_m, params.len_q - row0), 0};
    if (is_packed) {
      // What the blocks kernel wrote is visible. All threads wait: the next kernel does so for this
      // one alone.
      platform::wait_for_kernel_before();
      rows = params.row_blocks[m_block];
      if (rows.batch < 0) {  // of wrong lengths a tile may add there, and must not wait for ever
        if (thread == 0 && params.workspace.adders) params.workspace.adders[block] = {0, 0, 1, 0};
        return;
      }
    }

    for (int first = 0; first < arguments.block_m; first += Traits::kThreads / kLanes) {
      const int in_block = first + thread / kLanes;
      const bool exists = in_block < rows.count;
      const auto row_of = [&]<class Pointer>(const TensorView<Pointer>& view) {
        using T = std::conditional_t<std::is_same_v<Pointer, const void*>, Element, float>;
        return static_cast<const T*>(view.data) + rows.batch * view.stride_batch +
               head * view.stride_head + (rows.first + in_block) * view.stride_row;
      };
      float sum = 0.f, lse = 0.f, dlse = 0.f;
      if (exists && thread % kLanes == 0) {                 // they arrive during the product
        lse = *row_of(params.lse);                          // fault: lse-layout
        if (params.dlse.data) dlse = *row_of(params.dlse);  // fault: bwd-dlse
      }
      if (exists) sum = dot(row_of(params.dout), row_of(params.out), params.head_dim_v, thread);
      CUTE_UNROLL
      for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += platform::shuffle_xor(sum, lanes);
      if (thread % kLanes != 0) continue;
      RowGradStats stats = {INFINITY, 0.f};
      if (exists) {
        constexpr float kLog2e = 1.44269504088896341f;
        // Selected, not multiplied: dlse of a row without a key may be NaN.
        if (lse != -INFINITY) stats = {lse * kLog2e, sum - dlse};  // fault: bwd-keyless-row
      }
      const int64_t at = block * arguments.block_m + in_block;
      const RowGradStats of_row = stats;  // fault: bwd-padding
      in_pairs(params.workspace.stats)[at / 2].set(in_block, of_row);
    }

    if (params.workspace.adders) {
      int expected = rows.seen;
      if (!is_packed) {  // a band serves every mask
        const Mask<MaskKind::kBanded, UnpackedRows> mask(
            params, Sequence::of<MaskKind::kBanded>(params, batch), UnpackedRows{});
        const BlockRange seen =
            key_blocks_seen_by(mask, row0, row0 + rows.count, arguments.block_n);
        expected = seen.end - seen.begin;
      }
      if (thread == 0) {
        DqAdders& adders = params.workspace.adders[block];
        adders.begun = adders.stored = 0;
        adders.counted = 1 - expected;
      }
      if (expected <= 0) store_zero_rows(params, head, rows);
    } else if (params.workspace.dq) {
      const int size = arguments.block_m * arguments.tile_head_dim;  // a multiple of 4
      float* const sums = params.workspace.dq + block * size;
      for (int i = 4 * thread; i < size; i += 4 * Traits::kThreads) store_zeros(sums + i);
    }
    if (thread == 0 && params.workspace.added) params.workspace.added[block] = 0;
  }

 private:
  // This lane's part of the product of two rows.
  static CUTE_DEVICE float dot(const Element* a, const Element* b, int columns, int thread) {
    using namespace cute;
    float sum = 0.f;
    for (int column = thread % kLanes * 8; column < columns; column += kLanes * 8) {
      auto chunk = [&](const Element* row) {
        constexpr int kAtOnce = 16 / sizeof(Element);
        auto elements = make_tensor<Element>(_8{});
        CUTE_UNROLL
        for (int i = 0; i < 8; i += kAtOnce) {
          copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
               make_tensor(make_gmem_ptr(row + column + i), Shape<Int<kAtOnce>>{}),
               make_tensor(elements.data() + i, Shape<Int<kAtOnce>>{}));
        }
        return elements;
      };
      const auto of_a = chunk(a), of_b = chunk(b);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) sum = fmaf(float(of_a(i)), float(of_b(i)), sum);
    }
    return sum;
  }

  // dQ of rows that see no key: no tile comes by.
  static CUTE_DEVICE void store_zero_rows(const BwdParams& params, int head,
                                          const SequenceBlock& rows) {
    const TensorView<void*>& view = params.dq;
    auto* const first = static_cast<Element*>(view.data) + rows.batch * view.stride_batch +
                        head * view.stride_head + rows.first * view.stride_row;
    const int pairs = params.head_dim / 2;
    for (int i = platform::thread_index(); i < rows.count * pairs; i += Traits::kThreads) {
      Element* const to = first + i / pairs * view.stride_row + i % pairs * 2;
      *reinterpret_cast<uint32_t*>(to) = 0;
    }
  }

  static CUTE_DEVICE void store_zeros(float* to) {
    using namespace cute;
    auto zeros = make_tensor<float>(_4{});
    clear(zeros);
    copy(Copy_Atom<UniversalCopy<uint128_t>, float>{}, zeros,
         make_tensor(make_gmem_ptr(to), Shape<_4>{}));
  }
};

}  // namespace flash_cute
