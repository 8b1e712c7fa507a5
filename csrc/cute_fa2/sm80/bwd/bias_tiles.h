// The tiles of a bias, each of which a CTA computes the gradient of: dS, summed over all that
// shares an element of the bias, in a fixed order. Computed anew: no other kernel keeps dS.
#pragma once

#include <cutlass/array.h>
#include <cutlass/fast_math.h>

#include <bit>
#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"

namespace flash_cute::sm80 {

// ShapeS: (query rows, keys) of a tile, of which the tiled MMA's threads have their elements.
template <class Element, class TiledMma, class ShapeS, int kThreads>
struct BiasTiles {
  static constexpr int kBlockM = decltype(cute::size<0>(ShapeS{}))::value;
  static constexpr int kBlockN = decltype(cute::size<1>(ShapeS{}))::value;
  static_assert(std::has_single_bit(unsigned{kBlockM}) && std::has_single_bit(unsigned{kBlockN}));

  // The blocks of rows that share a tile are numbered, over all that the bias is expanded over. A
  // CTA for each tile of the bias, (heads, row blocks, key blocks, batch) of it, and each split of
  // those numbers. Splits have their sums in the workspace.
  struct Arguments {
    BwdParams params;
    cutlass::FastDivmod batch;
    cutlass::FastDivmod key_blocks;
    cutlass::FastDivmod row_blocks;
    cutlass::FastDivmod heads;
    cutlass::FastDivmod shared_row_blocks;
    cutlass::FastDivmod shared_heads;
    cutlass::FastDivmod group_size;
    int shared;           // blocks of rows that share a tile,
    int shared_of_split;  // and those of a split
    int splits;
    bool are_alike;  // if one of the blocks of rows sees no key of the tile, none does
    int stats_rows;  // of a sequence, in the statistics, and
    int64_t stats_of_head;

    // stats_block: rows of a block of the statistics
    Arguments(const BwdParams& params, int splits, int stats_block)
        : params(params),
          batch(params.dbias.has_batch ? params.batch : 1),
          key_blocks(params.dbias.has_keys ? blocks(params.len_k, kBlockN) : 1),
          row_blocks(params.dbias.has_rows ? blocks(params.len_q, kBlockM) : 1),
          heads(params.dbias.has_heads ? params.heads_q : 1),
          shared_row_blocks(params.dbias.has_rows ? 1 : blocks(params.len_q, kBlockM)),
          shared_heads(params.dbias.has_heads ? 1 : params.heads_q),
          group_size(params.group_size),
          shared(shared_row_blocks.divisor * shared_heads.divisor *
                 (params.dbias.has_batch ? 1 : params.batch)),
          shared_of_split(blocks(shared, splits)),
          splits(splits),
          are_alike(params.dbias.has_rows && !params.sequences.seqused_q &&
                    !params.sequences.seqused_k && !params.sequences.key_start),
          stats_rows(blocks(params.len_q, stats_block) * stats_block),
          stats_of_head(int64_t{params.m_blocks} * stats_block) {}
    int64_t ctas() const {
      return int64_t{splits} * heads.divisor * row_blocks.divisor * key_blocks.divisor *
             batch.divisor;
    }
    CUTE_DEVICE const RowGradStats* stats(const TileCoord& at) const {
      return params.workspace.stats + at.head * stats_of_head + int64_t{at.batch} * stats_rows +
             at.m_block * kBlockM;
    }
  };

  // Of a dimension that the bias is expanded over, block 0.
  struct Tile {
    TileCoord at;
    int key_block;
    int end;  // one past the last number of its split
  };
  static CUTE_DEVICE Tile of_cta(const Arguments& arguments) {
    int rest, batch, head, row_block, key_block, split;
    arguments.batch(rest, batch, platform::cta_index());
    arguments.key_blocks(rest, key_block, rest);
    arguments.row_blocks(rest, row_block, rest);
    arguments.heads(split, head, rest);
    const int end = cute::min(arguments.shared, (split + 1) * arguments.shared_of_split);
    return {{row_block, head, batch, split}, key_block, end};
  }

  // A block of scores that shares the tile, and of which a row sees a key. Its keys are those of
  // the tensors, whatever the sequence's start.
  struct Block {
    TileCoord at;
    Sequence sequence;
    int kv_head;
    int key_block;
    int end_key_block;  // one past the last of its rows
    int number;         // of its rows
    int has_new_rows;   // 1 where they are others than those of the block before, else 0
    int has_new_keys;   // likewise, or the head of K and V is another

    CUTE_DEVICE bool exists() const { return key_block < end_key_block; }
  };
  static CUTE_DEVICE Block first(const Arguments& arguments, const Tile& tile) {
    Block none{};
    none.number = tile.at.split * arguments.shared_of_split - 1;
    return next(arguments, tile, none);
  }
  static CUTE_DEVICE Block next(const Arguments& arguments, const Tile& tile, Block block) {
    const Block before = block;
    ++block.key_block;
    while (!block.exists() && ++block.number < tile.end) {
      find_keys(arguments, tile, block);
      if (arguments.are_alike && !block.exists()) block.number = tile.end;
    }
    const bool is_new = !before.exists() || block.at.batch != before.at.batch;
    block.has_new_rows =
        is_new || block.at.head != before.at.head || block.at.m_block != before.at.m_block;
    block.has_new_keys =
        is_new || block.kv_head != before.kv_head || block.key_block != before.key_block;
    return block;
  }

  // (rows, columns) of a thread's scores -> (row, key), in the tile
  static CUTE_DEVICE auto coords(unsigned thread) {
    return as_matrix(
        TiledMma{}.get_slice(thread).partition_C(cute::make_identity_tensor(ShapeS{})));
  }

  // Stores the sums of a tile (4, MMA_M, MMA_N). Over rows or keys that the bias is expanded to, it
  // sums as well. `memory` has kBlockM x kBlockN places in shared memory, which no thread uses.
  template <class Sums>
  static CUTE_DEVICE void store(const Arguments& arguments, const Tile& tile, Sums& sums,
                                float* memory) {
    const BiasGradient& bias = arguments.params.dbias;
    const auto matrix = as_matrix(sums);  // (rows, columns)
    const auto mine = coords(platform::rematerialize(platform::thread_index()));
    CUTE_UNROLL
    for (int i = 0; i < cute::size(matrix); ++i) memory[place(mine(i))] = matrix(i);
    if (!bias.has_keys) {
      for (int n = kLog2N - 1; n >= 0; --n) fold(memory, kBlockM, n, 0, 1 << n);
    }
    if (!bias.has_rows) {
      for (int m = kBlockM / 2; m > 0; m /= 2) fold(memory, m, bias.has_keys ? kLog2N : 0, m, 0);
    }
    platform::sync_cta();  // the sums are there, of all threads
    store_rows(arguments, tile, memory);
  }
  // Stores zeros: no block was added to the tile.
  static CUTE_DEVICE void store_zeros(const Arguments& arguments, const Tile& tile) {
    store_rows(arguments, tile, nullptr);
  }

 private:
  // The key blocks of a number: those of the tile that its rows see.
  static CUTE_DEVICE void find_keys(const Arguments& arguments, const Tile& tile, Block& block) {
    const BwdParams& params = arguments.params;
    int batch, head, row_block;
    arguments.shared_row_blocks(batch, row_block, block.number);
    arguments.shared_heads(batch, head, batch);
    block.at = {tile.at.m_block + row_block, tile.at.head + head, tile.at.batch + batch, 0};
    block.kv_head = arguments.group_size.div(block.at.head);
    block.sequence = Sequence::of<MaskKind::kScored>(params, block.at.batch);
    const Sequence& sequence = block.sequence;
    const Mask<MaskKind::kScored, UnpackedRows> mask(params, sequence, UnpackedRows{});
    const int row0 = block.at.m_block * kBlockM;
    const int row_end = cute::min(row0 + kBlockM, sequence.len_q);
    const int key_begin = mask.begin(row0), key_end = mask.end(row_end - 1);
    if (row_end <= row0 || key_end <= key_begin) return;
    block.key_block = (sequence.first_k + key_begin) / kBlockN;
    block.end_key_block = blocks(sequence.first_k + key_end, kBlockN);
    if (params.dbias.has_keys) {
      block.key_block = cute::max(block.key_block, tile.key_block);
      block.end_key_block = cute::min(block.end_key_block, tile.key_block + 1);
    }
  }

  static constexpr int kLog2N = std::countr_zero(unsigned{kBlockN});

  static CUTE_HOST_DEVICE int blocks(int rows, int block) { return (rows + block - 1) / block; }

  // Stores what lies in shared memory, or zeros.
  static CUTE_DEVICE void store_rows(const Arguments& arguments, const Tile& tile,
                                     const float* memory) {
    const BwdParams& params = arguments.params;
    BiasGradient bias = params.dbias;
    const int row0 = tile.at.m_block * kBlockM, key0 = tile.key_block * kBlockN;
    const int rows = bias.has_rows ? cute::min(+kBlockM, params.len_q - row0) : 1;
    const int keys = bias.has_keys ? cute::min(+kBlockN, params.len_k - key0) : 1;
    int64_t first = tile.at.batch * bias.stride_batch + tile.at.head * bias.stride_head +
                    row0 * bias.stride_row + key0 * bias.stride_key;
    if (arguments.splits > 1) {
      bias.data = params.workspace.dbias;
      bias.is_float = true;
      first += tile.at.split * bias.elements;
    }
    if (bias.is_float) {
      store_rows(static_cast<float*>(bias.data) + first, bias, rows, keys, memory);
    } else {
      store_rows(static_cast<Element*>(bias.data) + first, bias, rows, keys, memory);
    }
  }

  // Where the sum of a (row, key) is in shared memory: 8 neighbouring keys lie together, and
  // neighbouring rows in other banks.
  template <class Coord>
  static CUTE_DEVICE int place(const Coord& coord) {
    constexpr int kChunks = cute::min(kBlockN, 64) / 8;
    const int row = cute::get<0>(coord), key = cute::get<1>(coord);
    return row * kBlockN + (key ^ (row % kChunks * 8));
  }

  // Adds to the first `rows` x 2^log2_keys sums those that are so many rows or keys behind them. By
  // halves: errors of a long sum one by one would show in fp32.
  static CUTE_DEVICE void fold(float* sums, int rows, int log2_keys, int rows_behind,
                               int keys_behind) {
    platform::sync_cta();  // what the other threads have summed is there
    for (int i = platform::thread_index(); i < rows << log2_keys; i += kThreads) {
      const int row = i >> log2_keys, key = i & ((1 << log2_keys) - 1);
      sums[place(cute::make_coord(row, key))] +=
          sums[place(cute::make_coord(row + rows_behind, key + keys_behind))];
    }
  }

  // The first `rows` x `keys` sums; zeros, if there are none. A thread takes 8 keys at a time, and
  // stores them as one if they lie so.
  template <class T>
  static CUTE_DEVICE void store_rows(T* to, const BiasGradient& bias, int rows, int keys,
                                     const float* sums) {
    using Chunk = cutlass::AlignedArray<T, 8, 16>;
    const bool in_chunks = bias.stride_key == 1 && bias.stride_row % 8 == 0 &&
                           reinterpret_cast<uintptr_t>(to) % 16 == 0;
    for (int i = platform::thread_index(); i < kBlockM * kBlockN / 8; i += kThreads) {
      const int row = i / (kBlockN / 8), key0 = i % (kBlockN / 8) * 8;
      if (row >= rows || key0 >= keys) continue;
      float values[8] = {};
      if (sums) {
        CUTE_UNROLL
        for (int k = 0; k < 8; ++k) values[k] = sums[place(cute::make_coord(row, key0)) + k];
      }
      T* const of_row = to + row * bias.stride_row + key0 * bias.stride_key;
      if (in_chunks && key0 + 8 <= keys) {
        Chunk chunk;
        CUTE_UNROLL
        for (int k = 0; k < 8; ++k) chunk[k] = T(values[k]);
        *reinterpret_cast<Chunk*>(of_row) = chunk;
      } else {
        CUTE_UNROLL
        for (int k = 0; k < 8; ++k) {
          if (key0 + k < keys) of_row[k * bias.stride_key] = T(values[k]);
        }
      }
    }
  }
};

// The gradient of a bias from the sums of its splits.
template <class Element>
struct BiasSumKernel {
  struct Traits {
    static constexpr int kThreads = 256;
    static constexpr int kMinCtas = 1;
    struct SharedMemory {};
  };
  struct Arguments {
    BiasGradient bias;
    const float* sums;  // (splits, elements)
    int splits;

    int64_t ctas() const { return (bias.elements + Traits::kThreads - 1) / Traits::kThreads; }
  };

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory&) {
    const BiasGradient& bias = arguments.bias;
    const int64_t at = int64_t{platform::cta_index()} * Traits::kThreads + platform::thread_index();
    if (at >= bias.elements) return;
    float sum = 0.f;
    for (int split = 0; split < arguments.splits; ++split) {
      sum += arguments.sums[split * bias.elements + at];
    }
    if (bias.is_float) {
      static_cast<float*>(bias.data)[at] = sum;
    } else {
      static_cast<Element*>(bias.data)[at] = Element(sum);
    }
  }
};

}  // namespace flash_cute::sm80
