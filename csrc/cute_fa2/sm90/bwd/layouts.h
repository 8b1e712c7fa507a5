// Tiles in shared memory, as TMA writes and wgmma reads them. Rows are cut into strips, as those of
// the forward.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "sm90/hopper.h"

namespace flash_cute::sm90 {

template <int kRows, int kColumns>
using Tile = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>;

namespace detail {
template <class Element, cute::SM90::GMMA::Major kMajor, int kStrip>
using SmemAtom =
    std::conditional_t<kStrip == 64, cute::SM90::GMMA::Layout_SW128_Atom<Element, kMajor>,
                       cute::SM90::GMMA::Layout_SW64_Atom<Element, kMajor>>;
}  // namespace detail

// A tile of `Shape` by rows. And the same elements as (columns, rows): a strip's rows first, then
// the next strip.
template <class Element, class Shape, int kStrip>
using ByRows = decltype(cute::tile_to_shape(
    detail::SmemAtom<Element, cute::SM90::GMMA::Major::K, kStrip>{}, Shape{}));
template <class Element, class Shape, int kStrip>
using Transposed =
    decltype(cute::tile_to_shape(detail::SmemAtom<Element, cute::SM90::GMMA::Major::MN, kStrip>{},
                                 cute::select<1, 0>(Shape{}), cute::Step<cute::_2, cute::_1>{}));

template <class Layout, class Element>
CUTE_DEVICE auto smem_tensor(Element* tile) {
  return cute::make_tensor(cute::make_smem_ptr(tile), Layout{});
}

}  // namespace flash_cute::sm90
