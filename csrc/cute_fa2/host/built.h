// What a plan asks of this build, and its refusals.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "generated/variants.inc"
#include "host/params.h"

namespace flash_cute {

[[noreturn]] inline void refuse(const std::string& sentence) {
  throw std::runtime_error("flash_cute: " + sentence);
}

constexpr const char* name_of(DType dtype) {
  return dtype == DType::kFloat ? "fp32" : dtype == DType::kHalf ? "fp16" : "bf16";
}

inline bool is_built(DType dtype) {
  if (dtype == DType::kFloat) return !kBuiltFp32HeadDims.empty();
  const auto& built = kBuiltHalfDtypes;
  return std::find(built.begin(), built.end(), dtype) != built.end();
}

// The smallest head dim that was built and serves the call, whose dtype was built.
inline int built_head_dim(const AttentionParams& params) {
  const bool is_fp32 = params.dtype == DType::kFloat;
  if (!is_built(params.dtype)) {
    refuse("this build has no kernel of " + std::string(name_of(params.dtype)) +
           "; build with FLASH_CUTE_DTYPES naming it, or without it");
  }
  const int head_dim = std::max(params.head_dim, params.head_dim_v);
  int found = 0, greatest = 0;
  const auto look = [&](const auto& head_dims) {
    for (int built : head_dims) {
      if (found == 0 && head_dim <= built) found = built;
      greatest = std::max(greatest, built);
    }
  };
  if (is_fp32) {
    if (head_dim > kMaxHeadDimFp32) {
      refuse("fp32 is served up to head dim " + std::to_string(kMaxHeadDimFp32));
    }
    look(kBuiltFp32HeadDims);
  } else {
    look(kBuiltHeadDims);
    look(kBuiltLargeHeadDims);
  }
  if (found != 0) return found;
  refuse("this build has no kernel " + std::string(is_fp32 ? "of fp32 " : "") + "for head dim " +
         std::to_string(head_dim) + ", only for those up to " + std::to_string(greatest) +
         "; build with FLASH_CUTE_HEAD_DIMS naming more, or without it");
}

[[noreturn]] inline void refuse_tile(const AttentionParams& params, int smem_limit) {
  const int head_dim = std::max(params.head_dim, params.head_dim_v);
  refuse("no tile for head dim " + std::to_string(head_dim) + " fits " +
         std::to_string(smem_limit) + " bytes of shared memory");
}

// Whether one launch can have so many CTAs; `blocks` says of what they are.
inline void check_grid(int64_t ctas, const char* blocks = "query") {
  if (ctas > INT32_MAX) {
    refuse("batch x heads x " + std::string(blocks) + " blocks is " + std::to_string(ctas) +
           ", more than the 2^31 - 1 CTAs that one launch can have; split the batch");
  }
}

}  // namespace flash_cute
