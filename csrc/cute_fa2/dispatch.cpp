// Picks the architecture, the row of the tile table and the variant for a call, and tells Python
// what there is to pick from.
#include "dispatch.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "config.h"
#include "device.h"
#include "generated/variants.inc"
#include "sm90/tensor_map.h"
#include "splits.h"
#include "static_switch.h"

namespace flash_cute {
namespace {

void append(std::string& items, const std::string& item) {
  items += items.empty() ? item : ", " + item;
}

// The head dim that was built for heads of `head_dim`, or 0.
int built_for(int head_dim) {
  for (int built : kBuiltHeadDims) {
    if (head_dim <= built) return built;
  }
  return 0;
}

bool is_built(int head_dim) { return built_for(head_dim) == head_dim; }

// Why a tensor map cannot describe the tensor that is called `name`, (batch, heads, rows,
// head_dim), or nothing. That its strides are multiples of 16 bytes is known.
std::string why_no_tensor_map(const std::string& name, const TensorView<const void*>& view,
                              int batch, int heads, int rows, int head_dim) {
  constexpr int64_t kMaxStride = (int64_t{1} << 40) / 2;  // elements
  if (view.stride_row == 0 && rows > 1) return "the rows of " + name + " are expanded";
  // Of these the driver's documentation does not say whether it takes them.
  auto overlap = [&](int64_t stride, int size) {
    return 0 < stride && stride < head_dim && size > 1;
  };
  if (overlap(view.stride_row, rows) || overlap(view.stride_head, heads) ||
      overlap(view.stride_batch, batch)) {
    return "rows of " + name + " overlap";
  }
  // Heads are two dimensions of a map, those of a group and the groups.
  if (std::max({view.stride_row, view.stride_head * heads, view.stride_batch}) >= kMaxStride) {
    return "a stride of " + name + " is 2^40 bytes or more";
  }
  return {};
}

// Why the SM90 kernels cannot read the call, or nothing.
std::string why_sm90_cannot_read(const FwdParams& params) {
  if (params.len_k == 0) return "k has no keys";
  if (params.q_factor != 1.f) return "softmax_scale is not above 0";
  if (params.subtract_max_first) {
    return "softmax_scale is above " + std::to_string(kLargeScale);
  }
  auto why_not = [&](const char* name, const TensorView<const void*>& view, int heads, int rows) {
    return why_no_tensor_map(name, view, params.batch, heads, rows, params.head_dim);
  };
  std::string reason = why_not("q", params.q, params.heads_q, params.len_q);
  if (reason.empty()) reason = why_not("k", params.k, params.heads_kv(), params.len_k);
  if (reason.empty()) reason = why_not("v", params.v, params.heads_kv(), params.len_k);
  return reason;
}

// The SM90 tile for a call, as a row of kFwdTilesSm90, or -1.
int select_row_sm90(const FwdParams& params, MaskKind mask, int device) {
  return select_fwd_sm90(
      built_for(params.head_dim), mask, mask == MaskKind::kBanded && params.is_triangle(),
      params.len_k, multiprocessors_of(device),
      [&](int block_m) { return tiles_of(params, block_m, most_rows_of_query_sm90(params)); });
}

// Why the SM90 kernels cannot serve the call on `device`, or nothing.
std::string why_not_sm90(const FwdParams& params, MaskKind mask, const Choices& choices,
                         int device) {
  if (!kSm90IsBuilt) return "this build has no such kernels (FLASH_CUTE_ARCHS has to name 90a)";
  if (compute_capability_major_of(device) != 9) {
    return "the GPU's compute capability is not 9.x";
  }
  if (choices.smem_limit != 0) return "smem_limit chooses among the tiles of sm80";
  if (select_row_sm90(params, mask, device) < 0) {
    return "there is no tile for it";
  }
  return why_sm90_cannot_read(params);
}

// Calls `f` with the head dim that serves the call, its dtype and its mask as constants.
template <class F>
void with_constants(const FwdParams& params, DType dtype, MaskKind mask, F&& f) {
  head_dim_switch<kBuiltHeadDims>(params.head_dim, [&](auto head_dim) {
    dtype_switch(dtype, [&](auto dtype_constant) {
      mask_switch(mask, [&](auto mask_constant) { f(head_dim, dtype_constant, mask_constant); });
    });
  });
}

// The SM80 tile for a call, as a row of kFwdTilesSm80.
int select_row_sm80(const FwdParams& params, const Choices& choices, int device) {
  const int64_t lent = smem_limit_of(device);
  const int64_t limit = choices.smem_limit > 0 ? std::min(choices.smem_limit, lent) : lent;
  int row = -1;
  head_dim_switch<kBuiltHeadDims>(params.head_dim, [&](auto head_dim) {
    row = select_fwd_sm80(head_dim, static_cast<int>(limit));
  });
  if (row < 0) {
    throw std::runtime_error("flash_cute: no tile for head dim " + std::to_string(params.head_dim) +
                             " fits " + std::to_string(limit) + " bytes of shared memory");
  }
  return row;
}

// Launches the kernels for a call whose keys are split so: what `launch` does with the parameters,
// and what combines the parts.
template <class Launch>
void launch_splits(const FwdParams& whole, DType dtype, SplitKV splits, int device,
                   cudaStream_t stream, const Allocate& allocate, Launch&& launch) {
  FwdParams params = whole;
  params.splits = splits;
  if (splits.count > 1) place_splits(params, allocate(bytes_of_splits(params)));
  launch(params);
  if (splits.count > 1) launch_combine(params, dtype, device, stream);
}

void launch_sm80(const FwdParams& whole, DType dtype, MaskKind mask, const Choices& choices,
                 int device, cudaStream_t stream, const Allocate& allocate) {
  const int row = select_row_sm80(whole, choices, device);
  const int multiprocessors = multiprocessors_of(device);
  const SplitKV splits =
      choose_splits(whole, SplitCost::of_sm80(whole, kFwdTilesSm80[row], multiprocessors),
                    multiprocessors, choices.splits);
  launch_splits(whole, dtype, splits, device, stream, allocate, [&](const FwdParams& params) {
    with_constants(params, dtype, mask, [&](auto head_dim, auto dtype, auto mask) {
      launch_fwd_sm80<dtype(), head_dim(), mask()>(params, row, device, stream);
    });
  });
}

constexpr bool every_head_dim_splits_in_sm90() {
  for (int built : kBuiltHeadDims) {
    if (select_splits_sm90(built) < 0) return false;
  }
  return true;
}

void launch_sm90(const FwdParams& whole, DType dtype, MaskKind mask, const Choices& choices,
                 int device, cudaStream_t stream, const Allocate& allocate) {
  const int row = select_row_sm90(whole, mask, device);
  static_assert(every_head_dim_splits_in_sm90());
  const int splitting_row = select_splits_sm90(built_for(whole.head_dim));
  const int multiprocessors = multiprocessors_of(device);
  const SplitKV splits = choose_splits(whole,
                                       SplitCost::of_sm90(whole, mask, kFwdTilesSm90[splitting_row],
                                                          kFwdTilesSm90[row], multiprocessors),
                                       multiprocessors, choices.splits);
  launch_splits(whole, dtype, splits, device, stream, allocate, [&](const FwdParams& params) {
    with_constants(params, dtype, mask, [&](auto head_dim, auto dtype, auto mask) {
      if constexpr (kSm90IsBuilt) {
        if (splits.count > 1) {
          launch_fwd_sm90<dtype(), head_dim(), MaskKind::kBanded, true>(params, splitting_row,
                                                                        device, stream);
        } else {
          launch_fwd_sm90<dtype(), head_dim(), mask(), false>(params, row, device, stream);
        }
      }
    });
  });
}

class JsonObject {
 public:
  JsonObject& add(const char* name, const std::string& text) {
    return add_value(name, "\"" + text + "\"");
  }
  JsonObject& add(const char* name, int value) { return add_value(name, std::to_string(value)); }
  std::string str() const { return "{" + fields_ + "}"; }

 private:
  JsonObject& add_value(const char* name, const std::string& value) {
    append(fields_, "\"" + std::string(name) + "\": " + value);
    return *this;
  }
  std::string fields_;
};

std::string row_as_json(const TileEntrySm80& row) {
  const FwdConfigSm80& config = row.config;
  return JsonObject()
      .add("arch", "sm80")
      .add("op", "fwd")
      .add("mask", "any")
      .add("head_dim", config.head_dim)
      .add("block_m", config.block_m)
      .add("block_n", config.block_n)
      .add("warps", config.threads() / 32)
      .add("column_warps", config.column_warps)
      .add("smem_bytes", config.smem_bytes())
      .add("stages", config.stages())
      .add("ctas_per_sm", row.ctas_per_sm)
      .add("max_registers", row.max_registers())
      .str();
}

std::string row_as_json(const TileEntrySm90& row) {
  const FwdConfigSm90& config = row.config;
  return JsonObject()
      .add("arch", "sm90")
      .add("op", "fwd")
      .add("mask", row.full && row.banded ? "any"
                   : row.full             ? "full"
                   : row.banded           ? "banded"
                                          : "none")
      .add("head_dim", config.head_dim)
      .add("block_m", config.block_m())
      .add("block_n", config.block_n)
      .add("warps", config.threads() / 32)
      .add("smem_bytes", config.smem_bytes())
      .add("stages", config.stages)
      .add("ctas_per_sm", 1)
      .add("max_registers", config.launch_registers())
      .add("splits", row.splits)
      .add("q_stages", config.q_stages)
      .add("producer_registers", config.producer_registers())
      .add("consumer_registers", config.consumer_registers())
      .str();
}

std::string in_brackets(const std::string& items) { return "[" + items + "]"; }

}  // namespace

void launch_fwd(const FwdParams& params, DType dtype, MaskKind mask, const Choices& choices,
                int device, cudaStream_t stream, const Allocate& allocate) {
  const int64_t arch = choices.arch;
  if (arch != 0 && arch != 80 && arch != 90) {
    throw std::runtime_error("flash_cute: arch is " + std::to_string(arch) +
                             ": it must be 80, 90, or 0 for the default");
  }
  if (choices.splits < 0) {
    throw std::runtime_error("flash_cute: splits is " + std::to_string(choices.splits) +
                             ": it must be a number of parts, or 0 for the default");
  }
  if (arch != 80) {
    std::string why_not = why_not_sm90(params, mask, choices, device);
    try {
      if (why_not.empty()) {
        return launch_sm90(params, dtype, mask, choices, device, stream, allocate);
      }
    } catch (const sm90::TensorMapRefused& refused) {
      why_not = refused.what();
    }
    if (arch == 90) {
      throw std::runtime_error(
          "flash_cute: arch is 'sm90', but its kernels cannot serve this call: " + why_not);
    }
  }
  launch_sm80(params, dtype, mask, choices, device, stream, allocate);
}

std::string build_info() {
  std::string archs, head_dims, tiles;
  const std::string names = FLASH_CUTE_ARCHS;
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(' ', begin), names.size());
    append(archs, "\"" + names.substr(begin, end - begin) + "\"");
    begin = end + 1;
  }
  for (int head_dim : kBuiltHeadDims) append(head_dims, std::to_string(head_dim));
  for (const TileEntrySm80& row : kFwdTilesSm80) {
    if (is_built(row.config.head_dim)) append(tiles, row_as_json(row));
  }
  for (const TileEntrySm90& row : kFwdTilesSm90) {
    if (kSm90IsBuilt && is_built(row.config.head_dim)) append(tiles, row_as_json(row));
  }
  return "{\"cuda_runtime\": " + std::to_string(CUDART_VERSION) +
         ", \"archs\": " + in_brackets(archs) + ", \"head_dims\": " + in_brackets(head_dims) +
         ", \"tiles\": " + in_brackets(tiles) + "}";
}

std::string tiles_for(int64_t smem_limit) {
  if (smem_limit < 0) {
    throw std::runtime_error("flash_cute: smem_limit is " + std::to_string(smem_limit) +
                             ": it must be a number of bytes");
  }
  std::string tiles;
  for (int head_dim : kBuiltHeadDims) {
    const int index =
        select_fwd_sm80(head_dim, static_cast<int>(std::min<int64_t>(smem_limit, INT32_MAX)));
    if (index >= 0) append(tiles, row_as_json(kFwdTilesSm80[index]));
  }
  return in_brackets(tiles);
}

}  // namespace flash_cute
