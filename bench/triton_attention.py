"""A block-wise attention forward in Triton: what a short kernel in a high-level language reaches.

One program computes BLOCK_M query rows of one head. It walks over the key blocks once with an
online softmax in base 2; only blocks that the causal diagonal or the end of the keys cuts are
masked element by element.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def _visit(
    acc, row_max, row_sum, q, k_base, v_base, k_stride_n, k_stride_d, v_stride_n, v_stride_d,
    first, last, rows, diagonal, kv_len, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Key blocks first <= n < last into the running softmax. Shapes: q (M, D), acc (M, D)."""
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(first * BLOCK_N, last * BLOCK_N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k_ptrs = k_base + dims[:, None] * k_stride_d + cols[None, :].to(tl.int64) * k_stride_n
        v_ptrs = v_base + cols[:, None].to(tl.int64) * v_stride_n + dims[None, :] * v_stride_d
        # Bounds are tested only where something can lie outside.
        if MASKED:
            k = tl.load(k_ptrs, (dims[:, None] < HEAD_DIM) & (cols[None, :] < kv_len), 0.0)
        elif BLOCK_D != HEAD_DIM:
            k = tl.load(k_ptrs, dims[:, None] < HEAD_DIM, 0.0)
        else:
            k = tl.load(k_ptrs)
        scores = tl.dot(q, k) * scale_log2  # (M, N)
        if MASKED:
            visible = cols[None, :] < kv_len
            if CAUSAL:
                visible = visible & (cols[None, :] <= rows[:, None] + diagonal)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        if MASKED:
            v = tl.load(v_ptrs, (cols[:, None] < kv_len) & (dims[None, :] < HEAD_DIM), 0.0)
        elif BLOCK_D != HEAD_DIM:
            v = tl.load(v_ptrs, dims[None, :] < HEAD_DIM, 0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return acc, row_max, row_sum


# Each fits 99 KB of shared memory at some head dim; the tuner drops those that do not fit.
CONFIGS = [
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 128}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=4, num_stages=2),
]


@triton.autotune(configs=CONFIGS, key=["HEAD_DIM", "CAUSAL"])
@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_n, q_stride_d,
    k_stride_b, k_stride_h, k_stride_n, k_stride_d,
    v_stride_b, v_stride_h, v_stride_n, v_stride_d,
    o_stride_b, o_stride_h, o_stride_n, o_stride_d,
    heads, heads_per_kv, q_len, kv_len, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m_blocks = tl.cdiv(q_len, BLOCK_M)
    # The last query rows see the most keys, so they start first.
    m_block = m_blocks - 1 - tl.program_id(0) % m_blocks
    batch_head = tl.program_id(0) // m_blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    kv_head = head // heads_per_kv

    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < q_len) & (dims[None, :] < HEAD_DIM)
    wide_rows = rows[:, None].to(tl.int64)
    q_ptrs = q_ptr + batch * q_stride_b + head * q_stride_h
    q = tl.load(q_ptrs + wide_rows * q_stride_n + dims[None, :] * q_stride_d, inside, 0.0)
    k_base = k_ptr + batch * k_stride_b + kv_head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + kv_head * v_stride_h

    # Row i sees keys j <= i + diagonal: causal is aligned to the bottom right corner.
    diagonal = kv_len - q_len
    end = tl.cdiv(kv_len, BLOCK_N)
    whole = kv_len // BLOCK_N
    if CAUSAL:
        end = tl.minimum(end, tl.cdiv(tl.maximum((m_block + 1) * BLOCK_M + diagonal, 0), BLOCK_N))
        whole = tl.minimum(whole, tl.maximum(m_block * BLOCK_M + diagonal + 1, 0) // BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = _visit(
        acc, row_max, row_sum, q, k_base, v_base, k_stride_n, k_stride_d, v_stride_n, v_stride_d,
        0, whole, rows, diagonal, kv_len, scale_log2,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, False,
    )  # fmt: skip
    acc, row_max, row_sum = _visit(
        acc, row_max, row_sum, q, k_base, v_base, k_stride_n, k_stride_d, v_stride_n, v_stride_d,
        whole, end, rows, diagonal, kv_len, scale_log2,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, True,
    )  # fmt: skip

    empty = row_sum == 0.0
    safe_sum = tl.where(empty, 1.0, row_sum)
    out = acc / safe_sum[:, None]
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(safe_sum)) * LN_2)
    out_ptrs = out_ptr + batch * o_stride_b + head * o_stride_h
    out_ptrs += wide_rows * o_stride_n + dims[None, :] * o_stride_d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), inside)
    tl.store(lse_ptr + batch_head.to(tl.int64) * q_len + rows, lse, rows < q_len)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D), none of them empty. Returns (out, lse)."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), device=q.device, dtype=torch.float32)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(q_len, meta["BLOCK_M"]) * batch * heads,)

    _forward[grid](
        q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        heads, heads // kv_heads, q_len, kv_len, scale * LOG2_E,
        HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), CAUSAL=causal,
    )  # fmt: skip
    return out, lse
