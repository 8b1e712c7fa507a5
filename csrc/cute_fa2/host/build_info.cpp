#include "host/build_info.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>

#include "generated/variants.inc"
#include "host/built.h"
#include "host/describe.h"
#include "host/params.h"

#ifndef FLASH_CUTE_ARCHS
#error "FLASH_CUTE_ARCHS names the built architectures, separated by spaces"
#endif

namespace flash_cute {
namespace {

bool is_built(int head_dim) {
  const auto has = [&](const auto& built) {
    return std::find(built.begin(), built.end(), head_dim) != built.end();
  };
  return has(kBuiltHeadDims) || has(kBuiltLargeHeadDims);
}

bool is_built_in_fp32(int head_dim) {
  const auto& built = kBuiltFp32HeadDims;
  return std::find(built.begin(), built.end(), head_dim) != built.end();
}

}  // namespace

// Tiles are described for elements of 16 bits, those of the op "fwd_fp32" for elements of 32.
std::string build_info() {
  std::string archs, dtypes, head_dims, large_head_dims, fp32_head_dims, tiles;
  const std::string names = FLASH_CUTE_ARCHS;
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(' ', begin), names.size());
    append(archs, "\"" + names.substr(begin, end - begin) + "\"");
    begin = end + 1;
  }
  for (DType dtype : {DType::kHalf, DType::kBFloat16, DType::kFloat}) {
    if (is_built(dtype)) append(dtypes, "\"" + std::string(name_of(dtype)) + "\"");
  }
  for (int head_dim : kBuiltHeadDims) append(head_dims, std::to_string(head_dim));
  for (int head_dim : kBuiltLargeHeadDims) append(large_head_dims, std::to_string(head_dim));
  for (int head_dim : kBuiltFp32HeadDims) append(fp32_head_dims, std::to_string(head_dim));
  for (const TileEntrySm80& entry : kFwdTilesSm80) {
    if (is_built(entry.config.head_dim)) append(tiles, as_json(entry, DType::kHalf).str());
  }
  for (const TileEntrySm80& entry : kFwdTilesFp32) {
    if (is_built_in_fp32(entry.config.head_dim)) append(tiles, as_json(entry, DType::kFloat).str());
  }
  for (const TileEntrySm90& entry : kFwdTilesSm90) {
    if (kSm90IsBuilt && is_built(entry.config.head_dim))
      append(tiles, as_json(entry, DType::kHalf).str());
  }
  for (const BwdEntrySm80& entry : kBwdTilesSm80) {
    if (is_built(entry.config.head_dim)) append(tiles, as_json(entry, DType::kHalf).str());
  }
  for (const LargeBwdEntrySm80& entry : kLargeBwdTilesSm80) {
    if (is_built(entry.head_dim)) append(tiles, as_json(entry, DType::kHalf).str());
  }
  for (const BwdEntrySm80& entry : kBwdTilesFp32) {
    if (is_built_in_fp32(entry.config.head_dim)) append(tiles, as_json(entry, DType::kFloat).str());
  }
  for (const LargeBwdEntrySm80& entry : kFp32BwdTilesSm80) {
    if (is_built_in_fp32(entry.head_dim)) append(tiles, as_json(entry, DType::kFloat).str());
  }
  for (const BwdEntrySm90& entry : kBwdTilesSm90) {
    if (kSm90IsBuilt && is_built(entry.head_dim())) {
      append(tiles, as_json(entry.keys, DType::kHalf).str());
      append(tiles, as_json(entry.rows, DType::kHalf).str());
      if (entry.has_window(MaskKind::kBanded)) {
        append(tiles, as_json(entry.window(), DType::kHalf).str());
      }
    }
  }
  return JsonObject()
      .add("cuda_runtime", CUDART_VERSION)
      .add("max_length", kMaxLength)
      .add("max_head_dim", kMaxHeadDim)
      .add("max_head_dim_fp32", kMaxHeadDimFp32)
      .add_json("archs", in_brackets(archs))
      .add_json("dtypes", in_brackets(dtypes))
      .add_json("head_dims", in_brackets(head_dims))
      .add_json("large_head_dims", in_brackets(large_head_dims))
      .add_json("fp32_head_dims", in_brackets(fp32_head_dims))
      .add("left_out", FLASH_CUTE_LEFT_OUT)
      .add_json("tiles", in_brackets(tiles))
      .str();
}

std::string tiles_for(int64_t smem_per_cta) {
  if (smem_per_cta < 0) {
    throw std::runtime_error("flash_cute: smem_per_cta is " + std::to_string(smem_per_cta) +
                             ": it must be a number of bytes");
  }
  std::string tiles;
  const int limit = static_cast<int>(std::min<int64_t>(smem_per_cta, INT32_MAX));
  const int bytes = bytes_of(DType::kHalf);
  for (size_t i = 0; i < std::size(kFwdTilesSm80); ++i) {
    const FwdConfigSm80& config = kFwdTilesSm80[i].config;
    const int chosen =
        select_fwd_sm80(config.head_dim, config.head_dim_v, MaskKind::kFull, limit, bytes);
    if (is_built(config.head_dim) && chosen == static_cast<int>(i)) {
      append(tiles, as_json(kFwdTilesSm80[i], DType::kHalf).str());
    }
  }
  for (int head_dim : kBuiltHeadDims) {
    const int bwd = select_bwd_sm80(head_dim, limit, bytes);
    if (bwd >= 0) append(tiles, as_json(kBwdTilesSm80[bwd], DType::kHalf).str());
  }
  for (int head_dim : kBuiltLargeHeadDims) {
    const int bwd = select_bwd_sm80_large(head_dim, limit, bytes);
    if (bwd >= 0) append(tiles, as_json(kLargeBwdTilesSm80[bwd], DType::kHalf).str());
  }
  for (int head_dim : kBuiltFp32HeadDims) {
    const int fp32_bytes = bytes_of(DType::kFloat);
    const int fwd = select_fwd_sm80(head_dim, head_dim, MaskKind::kFull, limit, fp32_bytes);
    if (fwd >= 0) append(tiles, as_json(kFwdTilesFp32[fwd], DType::kFloat).str());
    const int bwd = select_bwd_sm80(head_dim, limit, fp32_bytes);
    if (bwd >= 0) append(tiles, as_json(kBwdTilesFp32[bwd], DType::kFloat).str());
  }
  for (int head_dim : kBuiltFp32HeadDims) {
    const int bwd = select_bwd_sm80_large(head_dim, limit, bytes_of(DType::kFloat));
    if (bwd >= 0) append(tiles, as_json(kFp32BwdTilesSm80[bwd], DType::kFloat).str());
  }
  return in_brackets(tiles);
}

}  // namespace flash_cute
