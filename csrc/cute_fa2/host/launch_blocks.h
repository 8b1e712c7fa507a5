// What calls with sequences of their own lengths ask of the blocks kernel (blocks/kernel.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "host/params.h"

namespace flash_cute {

// Blocks of `rows` query rows, or keys. The blocks on the other side, by which their work is
// counted, have `other_rows`.
struct BlockSides {
  uint32_t of_keys;  // no bool: g++ 12 clears its padding in the wrong place, in BlockRequests
  int rows = 0;
  int other_rows = 0;
};

// A list of them that is asked for.
struct BlockRequest {
  BlockList list;
  BlockSides sides;
  bool sorts;          // else the list is in the order of memory
  int index_rows = 0;  // of the blocks that SequenceTile::first_index counts
  // The blocks that a tile works on are cut into at most so many splits of at least so many blocks;
  // not at all if they are 0 or 1.
  int splits;
  int split_blocks;
};

// What the places of blocks of query rows have (BwdParams::row_blocks).
struct RowBlocksRequest {
  SequenceBlock* blocks;
  int count;
  BlockSides sides;
};

// A result whose rows outside of all sequences become `word`, 4 bytes each. Strides count words.
struct UnusedRows {
  void* data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;
  int heads;
  int row_words;
  uint32_t of_keys;  // as above
  uint32_t word;
};

struct BlockRequests {
  static constexpr int kMaxLists = 2, kMaxResults = 3;
  int list_count = 0;
  int result_count = 0;
  BlockRequest lists[kMaxLists];
  UnusedRows results[kMaxResults];
  RowBlocksRequest row_blocks{};
  // Of split-KV, all of which get a limit of +inf first; in place of results.
  RowStats* stats = nullptr;
  int64_t stats_count = 0;

  void add(const BlockRequest& request) {
    if (request.list.bound > 0) lists[list_count++] = request;
  }
  void add_unused(const TensorView<void*>& view, DType dtype, int heads, int columns,
                  bool of_keys) {
    const int elements = 4 / bytes_of(dtype);  // of a word
    results[result_count++] = {view.data,
                               view.stride_batch / elements,
                               view.stride_head / elements,
                               view.stride_row / elements,
                               heads,
                               columns / elements,
                               of_keys,
                               0};
  }
  void add_unused_lse(const TensorView<float*>& view, int heads) {
    constexpr uint32_t kMinusInf = 0xff800000;
    results[result_count++] = {
        view.data, view.stride_batch, view.stride_head, view.stride_row, heads, 1,
        false,     kMinusInf};
  }
};

// Runs ahead of the kernels that read the lists and row blocks. The next one may begin under it.
void launch_blocks(const AttentionParams& params, const BlockRequests& requests, int device,
                   cudaStream_t stream);

}  // namespace flash_cute
