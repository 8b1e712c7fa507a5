// What a call is, as plain structs: tensors, sizes, mask and scale. No torch, no CuTe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "host/band.h"
#include "host/scale.h"

namespace flash_cute {

// Rows and keys are counted in 32 bits. Sums of two lengths and the rows of a tile stay below 2^31.
constexpr int64_t kMaxLength = (int64_t{1} << 30) - (1 << 12);
constexpr int kMaxHeadDim = 1024;
// Head dims above this one are large. Their gradients have kernels of sm80 alone.
constexpr int kLargeAbove = 256;
// Up to this one the forward has kernels of sm90.
constexpr int kLargeSm90 = 512;
constexpr int kMaxHeadDimFp32 = 256;

enum class Arch { kSm80 = 80, kSm90 = 90 };

enum class DType { kHalf, kBFloat16, kFloat };

constexpr int bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kHalf:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat:
      return 4;
  }
  __builtin_unreachable();
}

// A (batch, heads, rows, columns) tensor. Strides count elements. Rows are contiguous; those of
// inputs and output are 16-byte aligned. A stride may be 0 (expanded dimension).
template <class Pointer>
struct TensorView {
  Pointer data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;
};

// Dense (batch, heads, rows, columns).
template <class Pointer>
TensorView<Pointer> dense_view(Pointer data, int64_t heads, int64_t rows, int64_t columns) {
  return {data, heads * rows * columns, rows * columns, columns};
}

// Kernels read and write rows in chunks of 8 elements, so tensors have whole chunks.
constexpr int64_t whole_chunks(int64_t head_dim) { return (head_dim + 7) / 8 * 8; }

// The softmax statistics of a row over the keys seen so far (common/online_softmax.h).
struct alignas(8) RowStats {
  float limit;
  float sum;
};

// Split-KV: the keys are cut into equal splits (the last may be shorter). Each split has tiles of
// its own, and a second kernel combines their results (combine/kernel.h). By default there is one
// split and no workspace. Of sequences of their own lengths the keys that a tile sees are cut, on
// the device, into at most so many (blocks/kernel.h).
struct SplitKV {
  static constexpr int kMaxCount = 1024;
  int count = 1;
  int keys = kMaxLength;  // of a split, or of sequences of their own lengths at least; whole blocks
  // The fp32 output of each split, (count * batch, heads_q, len_q, head_dim_v), and the statistics
  // of its rows, (count * batch, heads_q, len_q, 1). Split i of batch b is at i * batch + b. Packed
  // sequences have one entry of the batch (AttentionParams::entries). A limit of +inf: a split that
  // no tile has written.
  TensorView<float*> out{};
  TensorView<RowStats*> stats{};
};

// Sequences whose lengths and places device memory has (MaskKind::kPacked). Packed ones lie one
// behind the other, and the tensors have one entry of the batch: then `cu_seqlens` are there.
// Padded ones have an entry each. Keys and queries outside of a sequence are never read. Each may
// be null.
struct SequenceTable {
  const int*
      cu_seqlens_q;  // (batch + 1): the first row of each in q and out, and where the last ends
  const int* cu_seqlens_k;  // likewise, in k and v
  const int* seqused_q;     // (batch): the rows of a sequence in use
  const int* seqused_k;
  const int* key_start;  // (batch): its first key in use
};

// The query rows of a block of a sequence.
struct alignas(16) SequenceBlock {
  int batch;  // the sequence; -1: there is no such block
  int first;  // the first one in q
  int count;
  int seen;  // how many blocks of keys they see; exact, as DqAdders counts
};

// A tile of such rows (or keys), with all that a kernel has to know of its sequence.
struct alignas(16) SequenceTile {
  int batch;
  int block;
  int first_index;  // of the sequence's blocks of statistics in the backward, by their place
  int begin;        // the blocks of the other side that it works on
  int end;
  int first_q;
  int len_q;
  int first_k;
  int len_k;
  int split;      // which one, and
  int key_begin;  // its keys: all, if there is one
  int key_end;
};

// The blocks of all sequences, as the device finds them ahead of the tiles (blocks/kernel.h).
struct BlockList {
  int bound = 0;                 // at most so many, for each split
  const int* count = nullptr;    // so many there are, of all splits
  int* taken = nullptr;          // how many tiles of them CTAs have taken in turn
  const SequenceTile* sorted{};  // those with the most work first
};

// A bias of scores, (batch, heads_q, len_q, len_k), in fp32 or of the inputs' dtype. Keys are
// contiguous. The stride of a dimension over which it is expanded is 0.
struct BiasView {
  const void* data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;
  bool has_keys;  // else it is expanded over them
  bool is_float;
  bool in_pairs;  // 16 bits, and keys 2 j and 2 j + 1 are one word (set_changes)
};

// What changes scores ahead of the mask (MaskKind::kScored): common/score_mod.h has the formula.
struct ScoreChanges {
  float softcap;   // 0: none
  float exponent;  // of 2 in e^(2 x / softcap), by score
  struct {
    const float* data;  // null: none
    int64_t stride_batch;
    int64_t stride_head;
  } slopes;       // of ALiBi, (batch, heads_q)
  BiasView bias;  // its data may be null
};

// What a forward and its backward have in common.
struct AttentionParams {
  TensorView<const void*> q;  // (batch, heads_q, len_q, head_dim)
  TensorView<const void*> k;  // (batch, heads_kv(), len_k, head_dim)
  TensorView<const void*> v;  // (batch, heads_kv(), len_k, head_dim_v)

  int batch;  // sequences
  int heads_q;
  int group_size;  // query heads that share a head of K and V
  int len_q;       // of packed sequences those of all together
  int len_k;
  int head_dim;    // a multiple of 8, at most that of the tile
  int head_dim_v;  // likewise
  DType dtype;     // of q, k, v and out
  MaskKind mask;
  Band band;
  SequenceTable sequences;  // MaskKind::kPacked
  ScoreChanges changes;     // MaskKind::kScored
  const float* sink;        // (heads_q): the score of a key without a value; null if there is none
  SoftmaxScale scale;

  FLASH_CUTE_HOST_DEVICE int heads_kv() const { return heads_q / group_size; }
  bool is_full() const { return mask == MaskKind::kFull; }
  bool is_packed() const { return has_sequences(mask); }
  // See Band.
  bool is_window() const { return !is_full() && band.is_window(len_q); }
  bool is_triangle() const { return !is_full() && band.is_triangle(len_q, len_k); }
  // Of the batch, as q's rows lie in memory: packed sequences have one.
  FLASH_CUTE_HOST_DEVICE int entries() const { return sequences.cu_seqlens_q ? 1 : batch; }
  int64_t rows() const { return int64_t{entries()} * heads_q * len_q; }
};

struct FwdParams : AttentionParams {
  TensorView<void*> out;   // (batch, heads_q, len_q, head_dim_v)
  TensorView<float*> lse;  // (batch, heads_q, len_q, 1), natural logarithm
  SplitKV splits;
  BlockList tiles;  // MaskKind::kPacked: of query rows
};

// What a step of the backward needs of a query row. A row that does not exist or sees no key has
// {+inf, 0}: its weights are 0 without a test.
struct alignas(8) RowGradStats {
  float lse_log2;  // the log-sum-exp, times log2(e)
  float delta;     // rowsum(dO * O) - dlse
};

// sm90: the tiles of keys that add to a block of dQ's sums, in any order. The first stores its
// part. The last has a finished block.
struct alignas(16) DqAdders {
  int begun;    // how many have begun to add, or to store
  int stored;   // whether the first one's part is there
  int counted;  // how many have added, less those that will, plus 1: 0 is the last one's number
  int next;     // list of the blocks that a consumer makes dQ of: the next one's index, or -1
};
// sm90: the queue of those blocks to which all have added (sm90/bwd/finished_blocks.h). Places of
// numbers, 32 bytes apart, and of the blocks behind them.
struct DqFinished {
  static constexpr int kPut = 0;      // how many have been put there
  static constexpr int kWaiting = 8;  // how many wait
  static constexpr int kTaken = 16;   // how many have been taken
  static constexpr int kBlocks = 24;  // their indices, or -1: as many as dq has blocks
};

// What the kernels of a backward hand on. Tiles are as the plan's: rows are padded to whole blocks,
// columns to the tile's head dim. dQ, dK and dV are sums in fp32, without the scale, in the order
// of a tile's accumulators (smXX/bwd/: accumulator.h, sums.h).
struct BwdWorkspace {
  RowGradStats* stats;  // (batch, heads_q, m_blocks, block_m); packed sequences: without the batch.
                        // Two rows lie side by side (common/row_grad_stats.h)
  float* dq;            // (batch, heads_q, m_blocks, a tile); null where dQ is not a sum in memory
  float* dk;         // (head_splits, batch, heads_kv, n_blocks, a tile); null without head splits
  float* dv;         // likewise
  float* dbias;      // (bias_splits, elements of dbias) sums; null without splits
  DqAdders* adders;  // sm90: of each block of dq; (batch, heads_q, m_blocks)
  int* finished;     // sm90: DqFinished, of those to which all have added; else null
  int* tickets;      // how many tiles have been taken, where CTAs take them in turn; on sm90 beyond
                     // the first of each CTA; else null
  int* added;  // sm80: where dQ's sums are in order, how many key blocks have been added to each
               // block of dq, (batch, heads_q, m_blocks); else null
};

// The gradient of a bias, in its own shape. Of a dimension over which the bias is expanded it has
// one element, and the stride is 0.
struct BiasGradient {
  void* data;  // null if none is asked for
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;
  int64_t stride_key;
  bool has_batch;
  bool has_heads;
  bool has_rows;
  bool has_keys;
  bool is_float;     // else of the inputs' dtype
  int64_t elements;  // of the whole gradient, which is dense
};

struct BwdParams : AttentionParams {
  TensorView<const void*> dout;   // (batch, heads_q, len_q, head_dim_v)
  TensorView<const void*> out;    // likewise
  TensorView<const float*> lse;   // (batch, heads_q, len_q, 1), the forward's
  TensorView<const float*> dlse;  // likewise; null counts as zeros
  TensorView<void*> dq;           // as q
  TensorView<void*> dk;           // as k
  TensorView<void*> dv;           // as v
  float* dsink;                   // as sink; null if there is none
  BiasGradient dbias;
  bool deterministic;  // dQ has the same bits each time

  int m_blocks;  // of block_m rows, and
  int n_blocks;  // of block_n keys, as the plan's tile has them; of packed sequences the places of
                 // all together (Sequence::first_block)
  BlockList key_tiles;  // MaskKind::kPacked
  BlockList dq_tiles;   // likewise, of query rows where dQ has a kernel of its own
  // (m_blocks): the rows in the place of each block of block_m of them (Sequence::first_block).
  // MaskKind::kPacked; else null.
  SequenceBlock* row_blocks = nullptr;
  // Few tiles share the query heads of a group among so many CTAs; their dK and dV are summed
  // later.
  int head_splits;
  BwdWorkspace workspace;
};

// Makes a call, whose scale is set, one whose scores change. Its softmax has no scale.
inline void set_changes(AttentionParams& params, const ScoreChanges& changes) {
  constexpr double kMost = std::numeric_limits<float>::max();
  const double scale = params.scale.scale;
  params.mask = MaskKind::kScored;
  params.changes = changes;
  BiasView& bias = params.changes.bias;
  bias.in_pairs = bias.has_keys && !bias.is_float &&
                  reinterpret_cast<uintptr_t>(bias.data) % 4 == 0 &&
                  (bias.stride_batch | bias.stride_head | bias.stride_row | params.len_k) % 2 == 0;
  params.scale = make_softmax_scale(1);
  params.scale.scale = static_cast<float>(scale);
  if (changes.softcap == 0.f) return;
  params.changes.exponent =
      static_cast<float>(std::clamp(2 * kLog2e * scale / changes.softcap, -kMost, kMost));
}

}  // namespace flash_cute
