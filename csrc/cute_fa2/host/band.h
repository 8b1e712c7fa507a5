// Masks as bands: which keys a query sees. This is the one definition, for host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define FLASH_CUTE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_CUTE_HOST_DEVICE inline
#endif

namespace flash_cute {

// kFull: every query sees every key. kBanded: a query sees an interval of keys. kPacked: banded, of
// sequences whose lengths and places are in device memory (SequenceTable). kScored: likewise, and
// the scores change (ScoreChanges).
enum class MaskKind { kFull, kBanded, kPacked, kScored };

FLASH_CUTE_HOST_DEVICE constexpr bool has_sequences(MaskKind mask) {
  return mask == MaskKind::kPacked || mask == MaskKind::kScored;
}

// Query i sees the keys [max(0, i + begin), min(len_k, i + end)). MaskKind::kFull ignores it. For
// MaskKind::kPacked the host does not know the lengths: its band is about the diagonal j = i, and
// `of_sequence` gives that of a sequence.
struct Band {
  int begin;
  int end;

  FLASH_CUTE_HOST_DEVICE int begin_of(int query) const { return query + begin; }
  FLASH_CUTE_HOST_DEVICE int end_of(int query) const { return query + end; }
  // The inverse: key j is seen by the queries [max(0, j + 1 - end), min(len_q, j + 1 - begin)).
  FLASH_CUTE_HOST_DEVICE int query_begin_of(int key) const { return key + 1 - end; }
  FLASH_CUTE_HOST_DEVICE int query_end_of(int key) const { return key + 1 - begin; }

  // About the diagonal j = i + len_k - len_q.
  FLASH_CUTE_HOST_DEVICE Band of_sequence(int len_q, int len_k) const {
    const int diagonal = len_k - len_q;  // fault: packed-band
    const auto bound = [&](int shift) {
      return shift < -len_q ? -len_q : shift > len_k ? len_k : shift;
    };
    return {bound(begin + diagonal), bound(end + diagonal)};
  }

  // Whether rows have a first key as well as a last: some row does not see key 0.
  bool is_window(int len_q) const { return begin > 1 - len_q; }
  // Whether the visible scores are about a triangle: causal, with about as many keys as queries.
  // The last tile then sees twice the keys of the mean.
  bool is_triangle(int len_q, int len_k) const {
    return !is_window(len_q) && len_k < 2 * int64_t{len_q};
  }
  // Whether each query sees exactly one key more than the query before.
  bool grows_evenly(int len_q, int len_k) const {
    return !is_window(len_q) && end >= 0 && len_q - 1 + end <= len_k;
  }
};

// The window (left, right) about the diagonal j = i + diagonal_offset, both ends inclusive; -1 is
// open. Sets `band`, and returns kFull where the window leaves nothing out.
inline MaskKind set_band(Band& band, int64_t len_q, int64_t len_k, int64_t window_left,
                         int64_t window_right, int64_t diagonal_offset) {
  // Beyond -len_q and len_k a bound changes nothing more. The sums may pass 64 bits.
  const auto bound = [&](__int128 shift) {
    return static_cast<int>(std::clamp<__int128>(shift, -len_q, len_k));
  };
  band.begin = window_left >= 0 ? bound(__int128{diagonal_offset} - window_left) : bound(-len_q);
  band.end = window_right >= 0 ? bound(__int128{diagonal_offset} + window_right + 1) : bound(len_k);
  const bool is_full = band.begin + len_q - 1 <= 0 && band.end >= len_k;
  return is_full ? MaskKind::kFull : MaskKind::kBanded;
}

// The same about the diagonal j = i, for sequences of any length.
inline Band band_of_packed(int64_t window_left, int64_t window_right) {
  constexpr int64_t kOpen = int64_t{1} << 30;
  const auto reach = [&](int64_t window) { return window >= 0 ? std::min(window, kOpen) : kOpen; };
  return {static_cast<int>(-reach(window_left)),
          static_cast<int>(std::min(reach(window_right) + 1, kOpen))};
}

}  // namespace flash_cute
