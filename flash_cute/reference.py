"""Attention as a plain formula, and the same thing block by block as the kernels compute it: for
reading and for checking.

Shapes are those of `flash_cute.forward`: q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D), out (B, Hq, Nq,
D), lse (B, Hq, Nq).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def visible_keys(
    rows: Tensor, len_k: int, window_left: int, window_right: int, diagonal_offset: int
) -> tuple[Tensor, Tensor]:
    """The mask: for each query row, the first key it sees and one past the last. Without a key, end
    <= begin.

    The diagonal is at key i + diagonal_offset of row i. The row sees from `window_left` keys before
    it to `window_right` keys after it; a window of -1 has no bound on its side. Both results never
    decrease from a row to the next.
    """
    level = rows + diagonal_offset
    begin = torch.zeros_like(rows) if window_left < 0 else (level - window_left).clamp(min=0)
    end = (
        torch.full_like(rows, len_k)
        if window_right < 0
        else (level + window_right + 1).clamp(max=len_k)
    )
    return begin, end


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q @ k^T) @ v and the log-sum-exp of the scaled scores, computed and returned
    in `dtype`.

    Takes memory for all Nq x Nk scores. The windows are those of `visible_keys`; diagonal_offset
    None is Nk - Nq, the bottom right corner. `is_causal` stands for window_right = 0 there.
    """
    len_q, len_k = q.shape[2], k.shape[2]
    scale = scale_of(q, softmax_scale)
    band = band_of(q, k, is_causal, window_left, window_right, diagonal_offset)
    q, k, v = _in_dtype(q, k, v, dtype)
    keys = torch.arange(len_k, device=q.device)
    begin, end = visible_keys(torch.arange(len_q, device=q.device), len_k, *band)
    visible = (begin[:, None] <= keys) & (keys < end[:, None])  # (Nq, Nk)

    scores = (q @ k.mT) * scale  # (B, Hq, Nq, Nk)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.softmax(scores, dim=-1) @ v
    # A row without a key has lse = -inf; its weights are NaN, from -inf - -inf, and its out is 0.
    return out.masked_fill((begin >= end)[:, None], 0.0), lse


def attention_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    dtype: torch.dtype = torch.float32,
    block_m: int = 128,
    block_n: int = 64,
) -> tuple[Tensor, Tensor]:
    """`attention`, step by step as the kernels do it: a tile of `block_m` queries walks over the
    keys, `block_n` at a time, from the last visible block to the first, with online softmax in base
    2.

    A row keeps its running maximum m, its running sum of weights, and the weighted sum of V; all
    three are relative to m, so a greater maximum rescales what came before it.
    """
    len_q, len_k = q.shape[2], k.shape[2]
    scale = scale_of(q, softmax_scale)
    band = band_of(q, k, is_causal, window_left, window_right, diagonal_offset)
    q, k, v = _in_dtype(q, k, v, dtype)
    # The scale's sign goes into Q, its size into the exponent: e^(scale * s) = 2^(scale_log2 * s).
    # So the greatest score is the greatest exponent, and a mask of -inf never meets a factor of 0
    # or below; of a scale of 0, the 0 goes into Q. A normal number of `dtype` is neither 0 nor inf.
    q = q * (math.copysign(1.0, scale) if scale != 0 else 0.0)
    smallest, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    scale_log2 = min(max(abs(scale) * math.log2(math.e), smallest), largest) if scale != 0 else 1.0

    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
    for m_begin in range(0, len_q, block_m):
        rows = torch.arange(m_begin, min(m_begin + block_m, len_q), device=q.device)
        begin, end = visible_keys(rows, len_k, *band)
        first_block = int(begin[0]) // block_n
        past_last_block = -(-max(0, int(end[-1])) // block_n)

        q_tile = q[:, :, rows]
        row_max = torch.full(q_tile.shape[:3], -math.inf, dtype=dtype, device=q.device)
        row_sum = torch.zeros_like(row_max)
        weighted_v = torch.zeros_like(q_tile)
        for n_block in reversed(range(first_block, past_last_block)):
            keys = torch.arange(
                n_block * block_n, min((n_block + 1) * block_n, len_k), device=q.device
            )
            scores = q_tile @ k[:, :, keys].mT
            # Blocks that every row sees whole need no test of single elements.
            if int(begin[-1]) > int(keys[0]) or int(keys[-1]) >= int(end[0]):
                visible = (begin[:, None] <= keys) & (keys < end[:, None])
                scores = scores.masked_fill(~visible, -math.inf)

            new_max = torch.maximum(row_max, scores.amax(dim=-1))
            # A row that has seen no key yet has the maximum -inf; 0 in its place keeps -inf - -inf
            # (NaN) out.
            shift = new_max.masked_fill(new_max == -math.inf, 0.0)
            rescale = torch.exp2((row_max - shift) * scale_log2)
            weights = torch.exp2((scores - shift[..., None]) * scale_log2)
            row_sum = row_sum * rescale + weights.sum(dim=-1)
            weighted_v = weighted_v * rescale[..., None] + weights @ v[:, :, keys]
            row_max = new_max

        sees_key = row_sum != 0
        out[:, :, rows] = torch.where(sees_key[..., None], weighted_v / row_sum[..., None], 0.0)
        lse[:, :, rows] = (row_max * scale_log2 + torch.log2(row_sum)) * math.log(2.0)
    return out, lse


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The scale, which is 1/sqrt(D) by default."""
    return 1.0 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)


def band_of(
    q: Tensor,
    k: Tensor,
    is_causal: bool,
    window_left: int,
    window_right: int,
    diagonal_offset: int | None,
) -> tuple[int, int, int]:
    """The mask as `visible_keys` takes it: window_left, window_right, diagonal_offset."""
    bottom_right = k.shape[2] - q.shape[2]
    if is_causal:
        return -1, 0, bottom_right
    return window_left, window_right, bottom_right if diagonal_offset is None else diagonal_offset


def _in_dtype(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs in `dtype`, each head of k and v repeated for the query heads that share it."""
    if q.shape[1] != k.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    return q.to(dtype), k.to(dtype), v.to(dtype)
