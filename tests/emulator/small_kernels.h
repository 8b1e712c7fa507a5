// What small kernels are made of (small_kernels.cpp, small_kernels_hopper.cpp).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "machine.h"
#include "machine_hopper.h"

namespace flash_cute::emulator {

constexpr int kThreads = 64;

using Chunk = unsigned __int128;

struct Me;

struct Params {
  CUtensorMap map;      // of `in`, as 8 rows of 128 bytes
  CUtensorMap map_out;  // of `out`, likewise
  const Chunk* in;      // (kThreads)
  Chunk* out;           // (kThreads)
  void (*body)(const Me&);
};

struct Shared {
  Chunk first[kThreads];
  Chunk second[kThreads];
  uint32_t words[kThreads][32];
  uint64_t barrier;
};

// For one thread of the block.
struct Me {
  const Params& params;
  Shared& shared;
  int thread = thread_index();

  Chunk in() const { return params.in[thread]; }
  void out(Chunk chunk) const { params.out[thread] = chunk; }
  void put(Chunk chunk) const { shared.first[thread] = chunk; }
  Chunk get(int other) const { return shared.first[other]; }
  Chunk in_next_lane() const { return get(thread ^ 1); }
  Chunk in_next_warp() const { return get(thread ^ 32); }
  void init(int arrivals) const {
    if (thread == 0) {
      init_barrier(&shared.barrier, arrivals);
      fence_barrier_init();
    }
    sync_cta();
  }
  void arrive(int64_t expected_bytes = 0) const {
    arrive_at_barrier(&shared.barrier, expected_bytes);
  }
  void wait(uint32_t parity) const { wait_at_barrier(&shared.barrier, parity); }
  void begin_box() const {
    if (thread == 0) {
      arrive(sizeof shared.first);
      tma_load(&params.map, shared.first, &shared.barrier, {});
    }
  }
  // This thread's place in the box, whose chunks are permuted.
  int place_in_box() const { return thread / 8 * 8 + (thread % 8 ^ thread / 8); }
  Chunk get_of_box() const { return get(place_in_box()); }
  void put_in_box() const { put_in(shared.first); }
  void put_in(Chunk (&box)[kThreads]) const { box[place_in_box()] = in(); }
  // To the copy engine.
  void show() const {
    fence_async_proxy();
    sync_cta();
  }
  // The output's row at which the box begins is `row`.
  void store_box_at(int row, const Chunk* box) const {
    tma_store(&params.map_out, box, {0, 0, row, 0, 0});
    tma_store_commit();
  }
  void store_box_of_all() const {
    if (thread == 0) store_box_at(0, shared.first);
  }
  void wait_for_box() const {
    if (thread == 0) tma_store_wait(0);
  }
  // Half of each goes to the output; `box` is written again when the first has been read.
  void store_two_boxes_and_write(Chunk (&box)[kThreads]) const {
    put_in(shared.first);
    put_in(shared.second);
    show();
    if (thread != 0) return;
    store_box_at(4, shared.first);
    store_box_at(-4, shared.second);
    tma_store_wait(1);
    put_in(box);
    tma_store_wait(0);
  }
  // The warp's part of the input, as four matrices of 8 rows of 16 bytes; `row` is where this
  // lane's goes.
  void put_matrices(void* row) const {
    const auto* in = reinterpret_cast<const uint32_t*>(params.in + thread / 32 * 32);
    uint32_t words[4];
    for (int matrix = 0; matrix < 4; ++matrix) words[matrix] = in[matrix * 32 + thread % 32];
    store_matrix(row, words);
  }
  void begin_copy(Chunk (&target)[kThreads]) const {
    copy_async(&target[thread], &params.in[thread], true);
    commit_copies();
  }
};

struct SmallKernel {
  const char* name;
  void (*body)(const Me&);
};

// Of what Hopper adds.
std::span<const SmallKernel> small_hopper_kernels();

}  // namespace flash_cute::emulator
