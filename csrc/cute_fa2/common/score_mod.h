// What becomes of scores between Q K^T and the mask, in kernels of MaskKind::kScored. They leave in
// units of the natural logarithm, and the softmax has no scale. In all others it has the scale, and
// nothing else happens.
//
//   x = scale s     y = softcap tanh(x / softcap), or x     y + bias - slope |diagonal - key|
//
// The diagonal of a query is the key at which a causal mask would end.
#pragma once

#include <cutlass/numeric_types.h>

#include <bit>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/platform.h"
#include "common/sequence.h"
#include "host/params.h"

namespace flash_cute {

// Of a changed score by x: 0 to 1. In 16 bits where dS is rounded too: registers are short.
template <class Element>
using Derivative = std::conditional_t<std::is_same_v<Element, float>, float, cutlass::half_t>;

// Where nobody asks for derivatives.
struct NoDerivatives {
  struct Ignored {
    template <class T>
    CUTE_DEVICE void operator=(T) const {}
  };
  CUTE_DEVICE Ignored operator()(int) const { return {}; }
};

// An exponent of a weight, of which rounding may make more where a bias is huge, as -1e9 under a
// whole row is. NaN stays NaN.
CUTE_DEVICE float not_above_0(float exponent) { return exponent > 0.f ? 0.f : exponent; }

// Of one tile. Only kernels with kReadsBias have a bias, which is in fp32 or of Element. kHasRoom:
// there are registers for the series of tanh. kClampsKeys: behind the last key it reads that one's
// bias, which the mask hides. A test of each key would be a branch, and loads would wait for it.
template <class Element, bool kReadsBias, bool kHasRoom = true, bool kClampsKeys = false>
class ScoreMod {
 public:
  CUTE_DEVICE ScoreMod(const AttentionParams& params, const Sequence& sequence, int batch)
      : params_(params), sequence_(sequence), batch_(batch) {}

  // Changes the scores of the tile that begins at (row_origin, key_origin). `coords` and `offsets`
  // as of Mask::apply; `row_of` gives head and query of a row. `derivatives`, shaped like the
  // scores, become those of y by x.
  template <class Scores, class Derivatives, class Coords, class Offsets, class RowOf>
  CUTE_DEVICE void apply(Scores& scores, Derivatives&& derivatives, const Coords& coords,
                         const Offsets& offsets, int row_origin, int key_origin,
                         const RowOf& row_of) const {
    const ScoreChanges& changes = params_.changes;
    const int first_row = row_origin + at<0>(coords(0, 0));
    const int first_key = key_origin + at<1>(coords(0, 0));
    if (changes.softcap != 0.f) {
      cap(scores, derivatives);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        scores(i) *= params_.scale.scale;
        derivatives(i) = Derivative<Element>(1.f);
      }
    }
    if (changes.slopes.data) {
      for_each_row(scores, offsets, first_row, row_of, [&](int r, auto row) {
        const float slope =
            changes.slopes
                .data[batch_ * changes.slopes.stride_batch + row.head * changes.slopes.stride_head];
        const int diagonal = row.query + sequence_.len_k - sequence_.len_q;
        const float distance = static_cast<float>(diagonal - first_key);
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) {
          const float key = static_cast<float>(at<1>(offsets(r, c)));
          scores(r, c) = fmaf(-slope, fabsf(distance - key), scores(r, c));
        }
      });
    }
    if constexpr (kReadsBias) {
      if (changes.bias.data) add_bias(scores, offsets, first_row, first_key, row_of);
    }
  }

  // Asks for the bias of a tile of kRows x kKeys that `apply` will need. By all kThreads threads
  // together.
  template <int kRows, int kKeys, int kThreads, class RowOf>
  CUTE_DEVICE void prefetch_bias(unsigned thread, int row_origin, int key_origin,
                                 const RowOf& row_of) const {
    const BiasView& bias = params_.changes.bias;
    if (!bias.data || !bias.has_keys) return;
    // What a cache asks memory for has 32 bytes: 8 or 16 keys. kKeys is a power of 2.
    const int log2_keys = bias.is_float ? 3 : 4, bytes = bias.is_float ? 4 : 2;
    const int log2_sectors = bias.is_float ? kLog2<kKeys / 8> : kLog2<kKeys / 16>;  // of a row
    const int keys = sequence_.len_k - key_origin;
    CUTE_NO_UNROLL
    for (unsigned i = thread; i < unsigned{kRows} << log2_sectors; i += kThreads) {
      const int row = static_cast<int>(i >> log2_sectors);
      const int key = static_cast<int>(i & ((1u << log2_sectors) - 1)) << log2_keys;
      if (key >= keys) continue;
      const int64_t at = place_of_bias(row_of(row_origin + row)) + key_origin + key;
      platform::prefetch(static_cast<const char*>(bias.data) + at * bytes);
    }
  }

 private:
  template <int kPowerOf2>
  static constexpr int kLog2 = std::countr_zero(static_cast<unsigned>(kPowerOf2));

  // Where the bias of a row begins. Of rows that do not exist, one that does.
  template <class Row>
  CUTE_DEVICE int64_t place_of_bias(const Row& row) const {
    const BiasView& bias = params_.changes.bias;
    const int query = sequence_.first_q + cute::min(row.query, sequence_.len_q - 1);
    return batch_ * bias.stride_batch + row.head * bias.stride_head + query * bias.stride_row +
           (bias.has_keys ? sequence_.first_k : 0);
  }

  // Coordinates may be unsigned.
  template <int kMode, class Coord>
  static CUTE_DEVICE int at(const Coord& coord) {
    return static_cast<int>(cute::get<kMode>(coord));
  }

  // tanh(z) = 1 - 2 r and its derivative 4 r (1 - r), with r = 1 / (1 + e^(2 z)), which never
  // overflows. Its error is 2^-23 of softcap. Near 0 the series of tanh is more exact, to z^9 / 46.
  // A backward whose weights have 16 bits goes without: it would spill. So would tiles with more
  // than 64 scores a thread.
  template <class Scores, class Derivatives>
  CUTE_DEVICE void cap(Scores& scores, Derivatives&& derivatives) const {
    constexpr bool kIsExact = std::is_same_v<std::remove_cvref_t<Derivatives>, NoDerivatives> ||
                              std::is_same_v<Element, float>;
    constexpr bool kHasSeries = kHasRoom && decltype(cute::size(scores))::value <= 64 && kIsExact;
    const ScoreChanges& changes = params_.changes;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      const float exponent = scores(i) * changes.exponent;  // of 2 in e^(2 z)
      const float r = platform::reciprocal(1.f + platform::exp2(exponent));
      const float z = exponent * 0.34657359f, square = z * z;
      float ratio = fmaf(square, fmaf(square, -17.f / 315, 2.f / 15), -1.f / 3);  // of tanh(z) by z
      ratio = fmaf(square, ratio, 1.f) * params_.scale.scale;
      scores(i) = kHasSeries && fabsf(z) < 0.2f ? scores(i) * ratio
                                                : fmaf(-2.f * changes.softcap, r, changes.softcap);
      derivatives(i) = Derivative<Element>(4.f * fmaf(-r, r, r));  // fault: softcap-derivative
    }
  }

  template <class Scores, class Offsets, class RowOf>
  CUTE_DEVICE void add_bias(Scores& scores, const Offsets& offsets, int first_row, int first_key,
                            const RowOf& row_of) const {
    const BiasView& bias = params_.changes.bias;
    if (kClampsKeys && sequence_.len_k <= 0) return;
    if (bias.is_float) {
      add_bias_of<float, false>(scores, offsets, first_row, first_key, row_of);
    } else if (at<1>(offsets(0, 1)) == at<1>(offsets(0, 0)) + 1 && bias.in_pairs &&
               sequence_.first_k % 2 == 0) {  // (the former not where scores are transposed)
      add_bias_of<Element, true>(scores, offsets, first_row, first_key, row_of);
    } else {
      add_bias_of<Element, false>(scores, offsets, first_row, first_key, row_of);
    }
  }

  // kInPairs: two neighbouring keys are read together.
  template <class T, bool kInPairs, class Scores, class Offsets, class RowOf>
  CUTE_DEVICE void add_bias_of(Scores& scores, const Offsets& offsets, int first_row, int first_key,
                               const RowOf& row_of) const {
    using Pair = cutlass::AlignedArray<T, 2>;
    const BiasView& bias = params_.changes.bias;
    const int keys = sequence_.len_k - first_key;  // there are so many from the first one on
    for_each_row(scores, offsets, first_row, row_of, [&](int r, auto row) {
      // Transposed scores have many rows. Loads of eight of them wait together: more would spill.
      if (kClampsKeys && r % 8 == 0) asm volatile("" ::: "memory");
      const T* const of_row = platform::rematerialize(
          static_cast<const T*>(bias.data) + place_of_bias(row) + (bias.has_keys ? first_key : 0));
      if constexpr (kInPairs) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); c += 2) {
          int key = at<1>(offsets(r, c));
          if constexpr (kClampsKeys) {
            key = cute::min(key, (keys - 1) & ~1);
          } else {
            if (key >= keys) continue;
          }
          const Pair pair = *reinterpret_cast<const Pair*>(of_row + key);
          scores(r, c) += static_cast<float>(pair[0]);
          scores(r, c + 1) += static_cast<float>(pair[1]);
        }
      } else if (bias.has_keys) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) {
          const int key = at<1>(offsets(r, c));
          if constexpr (kClampsKeys) {
            scores(r, c) += static_cast<float>(of_row[cute::min(key, keys - 1)]);
          } else {
            if (key < keys) scores(r, c) += static_cast<float>(of_row[key]);
          }
        }
      } else {
        const float all = static_cast<float>(*of_row);
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) scores(r, c) += all;
      }
    });
  }

  template <class Scores, class Offsets, class RowOf, class Visit>
  static CUTE_DEVICE void for_each_row(const Scores& scores, const Offsets& offsets, int first_row,
                                       const RowOf& row_of, const Visit& visit) {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(scores); ++r) {
      visit(r, row_of(first_row + at<0>(offsets(r, 0))));
    }
  }

  const AttentionParams& params_;
  const Sequence& sequence_;
  int batch_;
};

}  // namespace flash_cute
