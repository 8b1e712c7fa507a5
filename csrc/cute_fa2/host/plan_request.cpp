#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "host/build_info.h"
#include "host/describe.h"
#include "host/named_numbers.h"
#include "host/plan_bwd.h"
#include "host/plan_fwd.h"

namespace flash_cute {
namespace {

// What `plan` is asked. fp16 and bf16 get the same plan, fp32 another.
struct Request {
  int64_t batch = 1, heads_q = 1, heads_kv = 1, len_q = 1, len_k = 1, head_dim = 64;
  int64_t head_dim_v = 0;  // as head_dim
  int64_t window_left = -1, window_right = -1;
  int64_t scale_sign = 1;
  int64_t backward = 0, deterministic = 0, is_fp32 = 0;
  // Elements from one entry to the next; -1 of a dense tensor.
  struct {
    int64_t batch = -1, head = -1, row = -1;
  } q, k, v;
  int64_t compute_capability = 90, multiprocessors = 132, l2_bytes = 50 << 20;
  int64_t smem_per_cta = 227 << 10;

  explicit Request(const std::string& text) {
    const struct {
      const char* name;
      int64_t& value;
      int64_t least, most;
    } fields[] = {{"batch", batch, 1, INT32_MAX},
                  {"heads_q", heads_q, 1, INT32_MAX},
                  {"heads_kv", heads_kv, 1, INT32_MAX},
                  {"len_q", len_q, 1, kMaxLength},
                  {"len_k", len_k, 0, kMaxLength},
                  {"head_dim", head_dim, 1, kMaxHeadDim},
                  {"head_dim_v", head_dim_v, 0, kMaxHeadDim},
                  {"window_left", window_left, -1, INT64_MAX},
                  {"window_right", window_right, -1, INT64_MAX},
                  {"scale_sign", scale_sign, -1, 1},
                  {"backward", backward, 0, 1},
                  {"deterministic", deterministic, 0, 1},
                  {"is_fp32", is_fp32, 0, 1},
                  {"q_stride_batch", q.batch, -1, INT64_MAX},
                  {"q_stride_head", q.head, -1, INT64_MAX},
                  {"q_stride_row", q.row, -1, INT64_MAX},
                  {"k_stride_batch", k.batch, -1, INT64_MAX},
                  {"k_stride_head", k.head, -1, INT64_MAX},
                  {"k_stride_row", k.row, -1, INT64_MAX},
                  {"v_stride_batch", v.batch, -1, INT64_MAX},
                  {"v_stride_head", v.head, -1, INT64_MAX},
                  {"v_stride_row", v.row, -1, INT64_MAX},
                  {"compute_capability", compute_capability, 80, INT32_MAX},
                  {"multiprocessors", multiprocessors, 1, INT32_MAX},
                  {"l2_bytes", l2_bytes, 1, INT32_MAX},
                  {"smem_per_cta", smem_per_cta, 1, INT32_MAX}};
    std::string names;
    for (const auto& field : fields) append(names, field.name);
    read_named_numbers(text, "the request", "one of " + names,
                       [&](const std::string& name, int64_t value) {
                         for (const auto& field : fields) {
                           if (name == field.name) return field.value = value, true;
                         }
                         return false;
                       });
    for (const auto& [name, value, least, most] : fields) {
      if (value < least || value > most) {
        throw std::runtime_error(std::string("flash_cute: ") + name + " is " +
                                 std::to_string(value) + ": it must be " + std::to_string(least) +
                                 " to " + std::to_string(most));
      }
    }
    if (head_dim_v == 0) head_dim_v = head_dim;
    if (heads_q % heads_kv != 0 || batch * heads_q > INT32_MAX) {
      throw std::runtime_error(
          "flash_cute: heads_q is " + std::to_string(heads_q) +
          ": it must be a multiple of heads_kv, and batch x heads_q below 2^31");
    }
  }
};

// What forward and backward have in common.
void set_attention(AttentionParams& params, const Request& r) {
  const auto view = [](const auto& strides, int64_t heads, int64_t rows, int columns) {
    auto view = dense_view<const void*>(nullptr, heads, rows, columns);
    if (strides.batch >= 0) view.stride_batch = strides.batch;
    if (strides.head >= 0) view.stride_head = strides.head;
    if (strides.row >= 0) view.stride_row = strides.row;
    return view;
  };
  params.head_dim = static_cast<int>(whole_chunks(r.head_dim));
  params.head_dim_v = static_cast<int>(whole_chunks(r.head_dim_v));
  params.q = view(r.q, r.heads_q, r.len_q, params.head_dim);
  params.k = view(r.k, r.heads_kv, r.len_k, params.head_dim);
  params.v = view(r.v, r.heads_kv, r.len_k, params.head_dim_v);
  params.batch = static_cast<int>(r.batch);
  params.heads_q = static_cast<int>(r.heads_q);
  params.group_size = static_cast<int>(r.heads_q / r.heads_kv);
  params.len_q = static_cast<int>(r.len_q);
  params.len_k = static_cast<int>(r.len_k);
  params.dtype = r.is_fp32 != 0 ? DType::kFloat : DType::kBFloat16;
  params.mask =
      set_band(params.band, r.len_q, r.len_k, r.window_left, r.window_right, r.len_k - r.len_q);
  params.scale = make_softmax_scale(r.scale_sign / std::sqrt(static_cast<double>(r.head_dim)));
}

}  // namespace

std::string plan(const std::string& request, const std::string& tuning) {
  const Request r(request);
  const DeviceProperties device = {static_cast<int>(r.compute_capability / 10),
                                   static_cast<int>(r.multiprocessors),
                                   static_cast<int>(r.l2_bytes), static_cast<int>(r.smem_per_cta)};
  if (r.backward != 0) {
    BwdParams params{};
    set_attention(params, r);
    params.dout = dense_view<const void*>(nullptr, r.heads_q, r.len_q, params.head_dim_v);
    params.deterministic = r.deterministic != 0;
    return describe(plan_bwd(params, parse_bwd_overrides(tuning), device, nullptr), params, device);
  }
  FwdParams params{};
  set_attention(params, r);
  params.out = dense_view<void*>(nullptr, r.heads_q, r.len_q, params.head_dim_v);
  return describe(plan_fwd(params, parse_overrides(tuning), device, nullptr), params, device);
}

}  // namespace flash_cute
