// The sequence that a tile attends over. Kernels ask it for lengths and offsets, never the
// parameters.
#pragma once

#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "host/params.h"

namespace flash_cute {

struct Sequence {
  int len_q;
  int len_k;
  // Its first row in q and out, and in k and v. Of dense tensors each sequence is a batch entry.
  int first_q;
  int first_k;
  // The keys that the tile attends to, [key_begin, key_end): all, or those of a split.
  int key_begin;
  int key_end;

  template <MaskKind kKind>
  static CUTE_HOST_DEVICE Sequence of(const AttentionParams& params, int batch) {
    if constexpr (!has_sequences(kKind)) {
      return {params.len_q, params.len_k, 0, 0, 0, params.len_k};
    } else {
      const SequenceTable& table = params.sequences;
      const Rows q = rows(table.cu_seqlens_q, table.seqused_q, batch, params.len_q);
      Rows k = rows(table.cu_seqlens_k, table.seqused_k, batch, params.len_k);
      if (table.key_start) {
        const int start = clamp(table.key_start[batch], k.count);  // fault: key-start
        k = {k.first + start, k.count - start};
      }
      return {q.count, k.count, q.first, k.first, 0, k.count};
    }
  }
  static CUTE_HOST_DEVICE Sequence of_split(const FwdParams& params, int split) {
    const int begin = split * params.splits.keys;
    return {params.len_q,
            params.len_k,
            0,
            0,
            begin,
            cute::min(params.len_k, begin + params.splits.keys)};
  }

  // Blocks of kPacked sequences have a place in memory for each block of rows: those of a sequence
  // begin here. No two sequences share one, whatever the lengths are.
  template <class Size>
  static CUTE_DEVICE int first_block(const int* cu_seqlens, int rows, int batch, Size block) {
    return cu_seqlens ? clamp(cu_seqlens[batch], rows) / block + batch
                      : batch * ((rows + block - 1) / block);
  }

 private:
  struct Rows {
    int first;
    int count;
  };
  // Wrong values lead to wrong results, but nowhere out of a tensor.
  static CUTE_HOST_DEVICE int clamp(int value, int most) {
    return cute::max(0, cute::min(value, most));
  }
  static CUTE_HOST_DEVICE Rows rows(const int* cu_seqlens, const int* used, int batch, int rows) {
    Rows result = {0, rows};
    if (cu_seqlens) {
      result.first = clamp(cu_seqlens[batch], rows);
      result.count = clamp(cu_seqlens[batch + 1], rows) - result.first;
    }
    result.count = clamp(used ? cute::min(used[batch], result.count) : result.count, rows);
    return result;
  }
};

}  // namespace flash_cute
