// The first kernel of a call with sequences of their own lengths (MaskKind::kPacked). Some CTAs
// list their blocks, those with the most work first. Others look up which rows a place has. The
// rest clear the rows of results that no sequence has.
#pragma once

#include <bit>
#include <cute/tensor.hpp>

#include "common/block_size.h"
#include "common/mask.h"
#include "common/platform.h"
#include "common/sequence.h"
#include "common/warp_search.h"
#include "host/launch_blocks.h"
#include "host/params.h"

namespace flash_cute {

struct BlocksKernel {
  // Blocks are sorted by how many blocks of the other side they work on, two buckets an octave.
  static constexpr int kBuckets = 32;

  struct Traits {
    static constexpr int kThreads = 256;
    static constexpr int kMinCtas = 0;
    struct SharedMemory {
      // Of each thread's blocks in a bucket, at count_of; then where they go.
      int counts[(kBuckets + 1) * kThreads];
      int sums[kThreads / 32];  // of the counts of each warp
    };
  };
  static constexpr int kThreads = Traits::kThreads;

  // BlockSides, ready to divide by.
  struct Sides {
    bool of_keys;
    BlockSize rows;
    BlockSize other_rows;

    Sides(const BlockSides& sides)
        : of_keys(sides.of_keys), rows(sides.rows), other_rows(sides.other_rows) {}
  };
  // With what else a list divides by.
  struct ListSides : Sides {
    BlockSize index_rows;

    ListSides(const BlockRequest& request) : Sides(request.sides), index_rows(request.index_rows) {}
  };
  struct Arguments {
    AttentionParams params;
    BlockRequests requests;
    ListSides lists[BlockRequests::kMaxLists];
    Sides row_blocks;
    int shares;  // CTAs that clear the rows behind one sequence

    Arguments(const AttentionParams& params, const BlockRequests& requests, int shares)
        : params(params),
          requests(requests),
          lists{requests.lists[0], requests.lists[1]},
          row_blocks(requests.row_blocks.sides),
          shares(shares) {}
  };

  static CUTE_DEVICE void run(const Arguments& arguments, typename Traits::SharedMemory& smem) {
    int cta = platform::cta_index();
    const BlockRequests& requests = arguments.requests;
    platform::let_next_begin();
    if (cta < requests.list_count) {
      return list(arguments.params, requests.lists[cta], arguments.lists[cta], smem);
    }
    cta -= requests.list_count;
    const int of_rows = ctas_of_rows(requests);
    if (cta < of_rows) return find_row_blocks(arguments, cta);
    cta -= of_rows;
    if (requests.stats) return clear_stats(arguments, cta);
    const int sequence = cta / arguments.shares, share = cta % arguments.shares;
    for (int i = 0; i < requests.result_count; ++i) {
      clear(arguments, requests.results[i], sequence, share);
    }
  }

  static CUTE_HOST_DEVICE int ctas_of_rows(const BlockRequests& requests) {
    return (requests.row_blocks.count + kThreads - 1) / kThreads;
  }

 private:
  // -- the list ----------------------------------------------------------------------------------

  static CUTE_DEVICE void list(const AttentionParams& params, const BlockRequest& request,
                               const ListSides& sides, typename Traits::SharedMemory& smem) {
    const int thread = platform::thread_index();
    const int each = (request.list.bound + kThreads - 1) / kThreads;
    // Under a causal mask a sequence's last query rows have the most keys, and its first keys the
    // most query rows. Threads, and so the blocks of a bucket, go from those on. A thread's own
    // blocks stay in ascending order.
    const bool ascending = sides.of_keys || !request.sorts;
    const int share = ascending ? thread : kThreads - 1 - thread;
    const int begin = cute::min(share * each, request.list.bound);
    const int end = cute::min(begin + each, request.list.bound);
    auto* const sorted = const_cast<SequenceTile*>(request.list.sorted);

    const int first_of_warp = share / 32 * 32 * each;  // `begin` is clipped, this is not
    const int batch = batch_at(params, sides, first_of_warp, each, begin);
    // A counting sort that keeps the order within a bucket: by thread, then by place.
    for (int bucket = 0; bucket < kBuckets; ++bucket) smem.counts[count_of(bucket, thread)] = 0;
    // The code of both passes would take longer to fetch than to run.
    CUTE_NO_UNROLL
    for (int pass = 0; pass < 2; ++pass) {
      for_each_block(params, sides, begin, end, batch,
                     [&](int batch, int block, const Sequence& sequence, BlockRange seen) {
                       for_each_split(request, seen, [&](int split, BlockRange part) {
                         const int to = smem.counts[count_of(bucket_of(request, part), thread)]++;
                         if (pass == 0) return;
                         const bool is_whole = part.begin == seen.begin && part.end == seen.end;
                         const int key_end = cute::min(part.end * sides.other_rows, sequence.len_k);
                         sorted[to] = {batch,
                                       block,
                                       Sequence::first_block(params.sequences.cu_seqlens_q,
                                                             params.len_q, batch, sides.index_rows),
                                       part.begin,
                                       part.end,
                                       sequence.first_q,
                                       sequence.len_q,
                                       sequence.first_k,
                                       sequence.len_k,
                                       split,
                                       is_whole ? 0 : part.begin * sides.other_rows,
                                       is_whole ? sequence.len_k : key_end};
                       });
                     });
      if (pass == 0) sum_up(request, smem);
    }
  }

  // Buckets one behind the other, in each the threads. Every 32 numbers leave one out: so no two
  // threads of a warp meet in a bank, neither here nor in sum_up.
  static CUTE_DEVICE int count_of(int bucket, unsigned thread) {
    return bucket * (kThreads + kThreads / 32) + thread + thread / 32;
  }

  // Makes of how many blocks each thread has in each bucket where the first of them goes.
  static CUTE_DEVICE void sum_up(const BlockRequest& request, typename Traits::SharedMemory& smem) {
    static_assert(kBuckets == 32);
    const int thread = platform::thread_index();
    platform::sync_cta();                                     // all threads have counted
    int* const mine = &smem.counts[thread * (kBuckets + 1)];  // so many counts, to sum
    // Of the lanes that differ in the last bits alone; and of those of them ahead of this one.
    int sum = 0, before = 0;
    for (int i = 0; i < kBuckets; ++i) sum += mine[i];
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int other = platform::shuffle_xor(sum, lanes);
      if (thread & lanes) before += other;
      sum += other;
    }
    if (thread % 32 == 0) smem.sums[thread / 32] = sum;
    platform::sync_cta();  // the sums of all warps are there
    int all = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      if (warp == thread / 32) before += all;
      all += smem.sums[warp];
    }
    for (int i = 0; i < kBuckets; ++i) {
      const int count = mine[i];
      mine[i] = before;
      before += count;
    }
    if (thread == 0) {
      *const_cast<int*>(request.list.count) = all;
      *request.list.taken = 0;
    }
    platform::sync_cta();  // all know where their blocks go
  }

  // visit(split, its blocks): at least once, whether or not there are blocks.
  template <class Visit>
  static CUTE_DEVICE void for_each_split(const BlockRequest& request, BlockRange seen,
                                         const Visit& visit) {
    const int blocks = seen.end - seen.begin;
    int each = blocks;
    if (request.splits > 1 && blocks > request.split_blocks) {
      const int most = cute::min(request.splits, blocks / request.split_blocks);
      each = (blocks + most - 1) / most;
    }
    BlockRange part = {seen.begin, seen.begin + each};
    for (int i = 0; i == 0 || part.begin < seen.end; ++i) {
      visit(i, BlockRange{part.begin, cute::min(part.end, seen.end)});
      part = {part.end, part.end + each};
    }
  }

  // -- blocks and their places -------------------------------------------------------------------

  static CUTE_DEVICE void find_row_blocks(const Arguments& arguments, int cta) {
    const AttentionParams& params = arguments.params;
    const RowBlocksRequest& request = arguments.requests.row_blocks;
    const Sides& sides = arguments.row_blocks;
    const int thread = platform::thread_index();
    const int place = cta * kThreads + thread;
    const int batch = batch_at(params, sides, place - thread % 32, 1, place);
    if (place >= request.count) return;
    SequenceBlock rows = {-1, 0, 0, 0};
    for_each_block(params, sides, place, place + 1, batch,
                   [&](int batch, int block, const Sequence& sequence, BlockRange seen) {
                     const int row0 = block * sides.rows;
                     rows = {batch, sequence.first_q + row0,
                             cute::min(int{sides.rows}, sequence.len_q - row0),
                             cute::max(0, seen.end - seen.begin)};
                   });
    request.blocks[place] = rows;
  }

  // The place at which the blocks of sequence `batch` begin.
  static CUTE_DEVICE int first_block(const AttentionParams& params, const Sides& sides, int batch) {
    const int rows = sides.of_keys ? params.len_k : params.len_q;
    const int* const cu_seqlens =
        sides.of_keys ? params.sequences.cu_seqlens_k : params.sequences.cu_seqlens_q;
    return Sequence::first_block(cu_seqlens, rows, batch, sides.rows);
  }

  // The last sequence whose blocks do not begin behind the place. All lanes of a warp call it, for
  // places in [first_place, first_place + 32 * each). At most 32 * each sequences begin there, as
  // each has a place of its own.
  static CUTE_DEVICE int batch_at(const AttentionParams& params, const Sides& sides,
                                  int first_place, int each, int place) {
    int batch = last_in_warp(
        params.batch, [&](int batch) { return first_block(params, sides, batch) <= first_place; });
    int behind = cute::min(params.batch, batch + 32 * each + 1);
    while (batch + 1 < behind) {
      const int middle = (batch + behind) / 2;
      (first_block(params, sides, middle) <= place ? batch : behind) = middle;
    }
    return batch;
  }

  // Calls visit(number of the sequence, number of the block, the sequence, the blocks that it sees)
  // for the blocks in the places [begin, end). `batch` is the sequence of the first place.
  template <class Visit>
  static CUTE_DEVICE void for_each_block(const AttentionParams& params, const Sides& sides,
                                         int begin, int end, int batch, const Visit& visit) {
    for (int place = begin; place < end; ++place) {
      while (batch + 1 < params.batch && first_block(params, sides, batch + 1) <= place) ++batch;
      const Sequence sequence = Sequence::of<MaskKind::kPacked>(params, batch);
      const int block = place - first_block(params, sides, batch), row0 = block * sides.rows;
      if (block < 0 || row0 >= (sides.of_keys ? sequence.len_k : sequence.len_q)) continue;
      visit(batch, block, sequence, seen_of(params, sides, sequence, row0));
    }
  }

  static CUTE_DEVICE BlockRange seen_of(const AttentionParams& params, const Sides& sides,
                                        const Sequence& sequence, int row0) {
    const Mask<MaskKind::kPacked, UnpackedRows> mask(params, sequence, UnpackedRows{});
    const int length = sides.of_keys ? sequence.len_k : sequence.len_q;
    const int row_end = cute::min(row0 + sides.rows, length);
    if (sides.of_keys) {
      return row_blocks_that_see(mask, row0, row_end, sequence.len_q, sides.other_rows);
    }
    return key_blocks_seen_by(mask, row0, row_end, sides.other_rows);
  }

  static CUTE_DEVICE int bucket_of(const BlockRequest& request, BlockRange seen) {
    if (!request.sorts) return 0;
    const int work = cute::max(0, seen.end - seen.begin);
    const int octave = static_cast<int>(std::bit_width(static_cast<unsigned>(work))) - 1;
    const int half = octave > 0 ? work >> (octave - 1) & 1 : 0;
    const int size = work == 0 ? 0 : cute::min(1 + 2 * octave + half, kBuckets - 1);
    return kBuckets - 1 - size;
  }

  // -- results without a tile --------------------------------------------------------------------

  static CUTE_DEVICE void clear_stats(const Arguments& arguments, int cta) {
    const BlockRequests& requests = arguments.requests;
    const int64_t ctas = (int64_t{arguments.params.batch} + 1) * arguments.shares;
    for (int64_t i = int64_t{cta} * kThreads + platform::thread_index(); i < requests.stats_count;
         i += ctas * kThreads) {
      requests.stats[i] = {INFINITY, 0.f};
    }
  }

  // The rows ahead of what sequence `batch` uses and behind it, up to the next one; ahead of the
  // first sequence and past the last what is left of the tensor.
  static CUTE_DEVICE void clear(const Arguments& arguments, const UnusedRows& result, int batch,
                                int share) {
    const AttentionParams& params = arguments.params;
    const int rows = result.of_keys ? params.len_k : params.len_q;
    const int* const cu_seqlens =
        result.of_keys ? params.sequences.cu_seqlens_k : params.sequences.cu_seqlens_q;
    const auto begin_of = [&](int batch) {
      return cu_seqlens ? cute::max(0, cute::min(cu_seqlens[batch], rows)) : 0;
    };
    const int begin = batch > 0 ? begin_of(batch) : 0;
    int first = rows, end = rows, next = rows;  // past the last sequence
    if (batch < params.batch) {
      const Sequence sequence = Sequence::of<MaskKind::kPacked>(params, batch);
      first = result.of_keys ? sequence.first_k : sequence.first_q;
      end = first + (result.of_keys ? sequence.len_k : sequence.len_q);
      if (cu_seqlens) next = begin_of(batch + 1);
    } else if (!cu_seqlens) {
      return;
    }
    const int entry = cu_seqlens ? 0 : batch;
    CUTE_NO_UNROLL
    for (int behind = 0; behind < 2; ++behind) {
      clear_rows(arguments, result, entry, behind ? end : begin, behind ? next : first, share);
    }
  }

  static CUTE_DEVICE void clear_rows(const Arguments& arguments, const UnusedRows& result,
                                     int entry, int begin, int end, int share) {
    if (begin >= end) return;
    const int thread = platform::thread_index();
    const int across = result.row_words < kThreads ? result.row_words : kThreads;  // of a row
    const int down = kThreads / across;
    if (thread >= down * across) return;
    uint32_t* const data = static_cast<uint32_t*>(result.data) + entry * result.stride_batch;
    for (int64_t row = begin + int64_t{share} * down + thread / across; row < end;
         row += int64_t{arguments.shares} * down) {
      for (int head = 0; head < result.heads; ++head) {
        uint32_t* const words = data + head * result.stride_head + row * result.stride_row;
        for (int i = thread % across; i < result.row_words; i += across) words[i] = result.word;
      }
    }
  }
};

}  // namespace flash_cute
