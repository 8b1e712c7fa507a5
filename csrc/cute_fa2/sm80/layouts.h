// Layouts of shared memory and the copies between memories that the SM80 kernels share.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/copy_traits_sm80.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/tensor.hpp>

#include "common/platform.h"

namespace flash_cute::sm80 {

// `kRowWarps` x `kColumnWarps` warps share a product. 16 neighbouring columns are one warp's: one
// ldmatrix.x4 fills B operands for two n8. An MMA takes 32 bytes of a row of its operands.
template <class Element, int kRowWarps, int kColumnWarps>
using TiledMmaOf = cute::TiledMMA<
    cute::MMA_Atom<platform::Mma<Element>>,
    cute::Layout<cute::Shape<cute::Int<kRowWarps>, cute::Int<kColumnWarps>, cute::_1>>,
    cute::Tile<cute::Int<16 * kRowWarps>,
               cute::Layout<cute::Shape<cute::_8, cute::Int<kColumnWarps>, cute::_2>,
                            cute::Stride<cute::_1, cute::_16, cute::_8>>,
               cute::Int<32 / static_cast<int>(sizeof(Element))>>>;

// Shared-memory rows are cut into strips of 64 elements (128 bytes, all 32 banks) or 32. The
// swizzle permutes the 16-byte chunks of 8 neighbouring rows, so that a column of chunks lies in 8
// different bank groups. One ldmatrix phase, or the store of an accumulator, touches such a column.
constexpr int strip(int columns) { return columns % 64 == 0 ? 64 : 32; }
template <int kStrip>
using SmemAtom =
    decltype(cute::composition(cute::Swizzle<kStrip == 64 ? 3 : 2, 3, 3>{},
                               cute::Layout<cute::Shape<cute::_8, cute::Int<kStrip>>,
                                            cute::Stride<cute::Int<kStrip>, cute::_1>>{}));
template <class Shape>
using SmemLayout =
    decltype(cute::tile_to_shape(SmemAtom<strip(cute::size<1>(Shape{}))>{}, Shape{}));
// Of 4-byte elements, in strips of 32.
template <class Shape>
using SmemLayoutFp32 = decltype(cute::tile_to_shape(
    cute::composition(
        cute::Swizzle<3, 2, 3>{},
        cute::Layout<cute::Shape<cute::_8, cute::_32>, cute::Stride<cute::_32, cute::_1>>{}),
    Shape{}));
// (columns, rows) -> (row, column). Of 8 neighbouring rows the even ones come first.
template <class Shape>
using EvenRowsFirst = cute::Layout<
    cute::Shape<decltype(cute::get<1>(Shape{})),
                cute::Shape<cute::_4, cute::_2, cute::Int<cute::size<0>(Shape{}) / 8>>>,
    cute::Stride<decltype(cute::get<0>(Shape{})), cute::Stride<cute::_2, cute::_1, cute::_8>>>;
// Such rows as (columns, rows), an operand whose sums are over rows: in this order its loads by
// words touch all banks.
template <class Shape>
using SmemLayoutTransposedFp32 =
    decltype(cute::composition(SmemLayoutFp32<Shape>{}, EvenRowsFirst<Shape>{}));
// Columns in this order, the A operand of that product, seen in their own order.
template <class Shape>
using SmemLayoutEvenFirstFp32 = decltype(cute::composition(
    SmemLayoutFp32<Shape>{},
    cute::Layout<
        cute::Shape<decltype(cute::get<0>(Shape{})),
                    cute::Shape<cute::_2, cute::_4, cute::Int<cute::size<1>(Shape{}) / 8>>>,
        cute::Stride<cute::_1, cute::Stride<cute::Int<4 * cute::size<0>(Shape{})>,
                                            decltype(cute::get<0>(Shape{})),
                                            cute::Int<8 * cute::size<0>(Shape{})>>>>{}));
// The latter as (columns, rows), likewise.
template <class Shape>
using SmemLayoutEvenFirstTransposedFp32 =
    decltype(cute::composition(SmemLayoutEvenFirstFp32<Shape>{}, EvenRowsFirst<Shape>{}));
// (rows, columns) -> the same elements as (columns, rows)
template <class Shape>
using SmemLayoutTransposed = decltype(cute::composition(
    SmemLayout<Shape>{},
    cute::Layout<cute::Shape<decltype(cute::get<1>(Shape{})), decltype(cute::get<0>(Shape{}))>,
                 cute::Stride<decltype(cute::get<0>(Shape{})), cute::_1>>{}));

// 16 bytes a thread; neighbouring threads have a strip's row.
template <class T>
inline constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
template <class CopyOp, class T, int kThreads, int kStrip>
using GmemTiledCopy = decltype(cute::make_tiled_copy(
    cute::Copy_Atom<CopyOp, T>{},
    cute::Layout<
        cute::Shape<cute::Int<kThreads / (kStrip / kChunk<T>)>, cute::Int<kStrip / kChunk<T>>>,
        cute::Stride<cute::Int<kStrip / kChunk<T>>, cute::_1>>{},
    cute::Layout<cute::Shape<cute::_1, cute::Int<kChunk<T>>>>{}));

// The same for a tile of `Shape`. Where a strip has fewer rows than threads take at once, they take
// several strips.
template <class Element, int kThreads, class Shape>
struct GmemChunkCopyOf {
  static constexpr int kRows = decltype(cute::size<0>(Shape{}))::value;
  static constexpr int kColumns = decltype(cute::size<1>(Shape{}))::value;
  static constexpr int kStrip = sizeof(Element) == 4 ? 32 : strip(kColumns);
  static constexpr int kPieces = kStrip / kChunk<Element>;  // of 16 bytes, in a row of a strip
  static constexpr int kRowsAtOnce = cute::min(kRows, kThreads / kPieces);
  static constexpr int kStripsAtOnce = kThreads / (kRowsAtOnce * kPieces);
  static constexpr bool kFits = kColumns % (kStripsAtOnce * kStrip) == 0;
  using type = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<platform::CopyGlobalToShared, Element>{},
      cute::Layout<cute::Shape<cute::Int<kRowsAtOnce>,
                               cute::Shape<cute::Int<kPieces>, cute::Int<kStripsAtOnce>>>,
                   cute::Stride<cute::Int<kPieces>,
                                cute::Stride<cute::_1, cute::Int<kRowsAtOnce * kPieces>>>>{},
      cute::Layout<cute::Shape<cute::_1, cute::Int<kChunk<Element>>>>{}));
};
template <class Element, int kThreads, class Shape>
using GmemChunkCopy = typename GmemChunkCopyOf<Element, kThreads, Shape>::type;

}  // namespace flash_cute::sm80
