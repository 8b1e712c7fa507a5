// The tiles of a bias, each of which a CTA computes the gradient of: dS, summed over all that
// shares an element of the bias, in a fixed order. Computed anew: no other kernel keeps dS.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/tile_decoder.h"
#include "host/params.h"

namespace flash_cute::sm80 {

// ShapeS: (query rows, keys) of a tile, of which the tiled MMA's threads have their elements.
// kStatsRows: of a block of the statistics.
template <class Element, class TiledMma, class ShapeS, int kThreads, int kStatsRows>
struct BiasTiles {
  static constexpr int kBlockM = decltype(cute::size<0>(ShapeS{}))::value;
  static constexpr int kBlockN = decltype(cute::size<1>(ShapeS{}))::value;
  static_assert((kBlockM & (kBlockM - 1)) == 0 && (kBlockN & (kBlockN - 1)) == 0);  // see `fold`

  // A CTA for each tile of the bias, (batch, heads, row blocks, key blocks) of it.
  struct Arguments {
    BwdParams params;
    cutlass::FastDivmod key_blocks;
    cutlass::FastDivmod row_blocks;
    cutlass::FastDivmod heads;
    int stats_blocks;  // blocks of rows of a sequence, as the statistics count them

    explicit Arguments(const BwdParams& params)
        : params(params),
          key_blocks(params.dbias.has_keys ? blocks(params.len_k, kBlockN) : 1),
          row_blocks(params.dbias.has_rows ? blocks(params.len_q, kBlockM) : 1),
          heads(params.dbias.has_heads ? params.heads_q : 1),
          stats_blocks(blocks(params.len_q, kStatsRows)) {}
    int64_t ctas() const {
      return int64_t{params.dbias.has_batch ? params.batch : 1} * heads.divisor *
             row_blocks.divisor * key_blocks.divisor;
    }
  };

  // Of a dimension that the bias is expanded over, block 0.
  struct Tile {
    TileCoord at;
    int key_block;
  };
  static CUTE_DEVICE Tile of_cta(const Arguments& arguments) {
    int rest, batch, head, row_block, key_block;
    arguments.key_blocks(rest, key_block, platform::cta_index());
    arguments.row_blocks(rest, row_block, rest);
    arguments.heads(batch, head, rest);
    return {{row_block, head, batch, 0}, key_block};
  }

  // f(place, key block, sequence) of each block of scores that shares the tile and of which a row
  // sees a key. Its keys are those of the tensors, whatever the sequence's start.
  template <class F>
  static CUTE_DEVICE void for_each(const Arguments& arguments, const Tile& tile, const F& f) {
    const BwdParams& params = arguments.params;
    const BiasGradient& bias = params.dbias;
    each(bias.has_batch, tile.at.batch, params.batch, [&](int b) {
      const Sequence sequence = Sequence::of<MaskKind::kScored>(params, b);
      const int key_end = sequence.first_k + sequence.len_k;
      each(bias.has_heads, tile.at.head, params.heads_q, [&](int h) {
        each(bias.has_rows, tile.at.m_block, blocks(params.len_q, kBlockM), [&](int m) {
          const int row0 = m * kBlockM, row_end = cute::min(row0 + kBlockM, sequence.len_q);
          if (row0 >= sequence.len_q) return;
          each(bias.has_keys, tile.key_block, blocks(params.len_k, kBlockN), [&](int n) {
            if (n * kBlockN >= key_end) return;
            const Mask<MaskKind::kScored, UnpackedRows> mask(params, sequence, UnpackedRows{});
            const int key0 = n * kBlockN - sequence.first_k;
            if (mask.end(row_end - 1) <= key0 || mask.begin(row0) >= key0 + kBlockN) return;
            f(TileCoord{m, h, b, 0}, n, sequence);
          });
        });
      });
    });
  }

  // (rows, columns) of a thread's scores -> (row, key), in the tile
  static CUTE_DEVICE auto coords(unsigned thread) {
    return as_matrix(
        TiledMma{}.get_slice(thread).partition_C(cute::make_identity_tensor(ShapeS{})));
  }

  // Where the sum of a (row, key) is in shared memory: pairs of columns lie together, and
  // neighbouring rows in other banks.
  template <class Coord>
  static CUTE_DEVICE int place(const Coord& coord) {
    constexpr int kChunks = cute::min(kBlockN, 64) / 8;
    const int row = cute::get<0>(coord), key = cute::get<1>(coord);
    return row * kBlockN + (key ^ (row % kChunks * 8));
  }

  // Adds to the first `rows` x `keys` sums those that are so many rows or keys behind them. By
  // halves: errors of a long sum one by one would show in fp32.
  static CUTE_DEVICE void fold(float* sums, int rows, int keys, int rows_behind, int keys_behind) {
    platform::sync_cta();  // what the other threads have summed is there
    for (int i = platform::thread_index(); i < rows * keys; i += kThreads) {
      const int row = i / keys, key = i % keys;
      sums[place(cute::make_coord(row, key))] +=
          sums[place(cute::make_coord(row + rows_behind, key + keys_behind))];
    }
  }

  // Over rows or keys that the bias is expanded to, it sums as well.
  static CUTE_DEVICE void store(const Arguments& arguments, const Tile& tile, float* sums) {
    const BwdParams& params = arguments.params;
    const BiasGradient& bias = params.dbias;
    if (!bias.has_keys) {
      for (int n = kBlockN / 2; n > 0; n /= 2) fold(sums, kBlockM, n, 0, n);
    }
    if (!bias.has_rows) {
      for (int n = kBlockM / 2; n > 0; n /= 2) fold(sums, n, bias.has_keys ? kBlockN : 1, n, 0);
    }
    platform::sync_cta();  // the sums are there, of all threads
    const int row0 = tile.at.m_block * kBlockM, key0 = tile.key_block * kBlockN;
    const int rows = bias.has_rows ? cute::min(+kBlockM, params.len_q - row0) : 1;
    const int keys = bias.has_keys ? cute::min(+kBlockN, params.len_k - key0) : 1;
    const int64_t first = tile.at.batch * bias.stride_batch + tile.at.head * bias.stride_head +
                          row0 * bias.stride_row + key0 * bias.stride_key;
    for (int i = platform::thread_index(); i < rows * keys; i += kThreads) {
      const int row = i / keys, key = i % keys;
      const float total = sums[place(cute::make_coord(row, key))];
      const int64_t to = first + row * bias.stride_row + key * bias.stride_key;
      if (bias.is_float) {
        static_cast<float*>(bias.data)[to] = total;
      } else {
        static_cast<Element*>(bias.data)[to] = Element(total);
      }
    }
  }

 private:
  static CUTE_HOST_DEVICE int blocks(int rows, int block) { return (rows + block - 1) / block; }

  // One of them, or where the bias is expanded all.
  template <class F>
  static CUTE_DEVICE void each(bool has, int index, int count, const F& f) {
    for (int i = has ? index : 0; i < (has ? index + 1 : count); ++i) f(i);
  }
};

}  // namespace flash_cute::sm80
