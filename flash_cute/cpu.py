"""The ops `flash_cute::fwd` and `flash_cute::bwd` for CPU tensors.

The forward is PyTorch's own flash attention for the CPU. That kernel needs some care (seen under
torch 2.13): an empty Nq or Nk kills the process; its LSE is short of precision for fp16 and bf16
inputs; causal masks with a scale <= 0 give NaN; rows without a key get the LSE 0; a last stride
other than 1 is silently wrong. So it is given contiguous rows in fp32, a positive scale, and masks
made here.

The backward is the formula of `reference.attention_backward` for some query rows at a time: that
kernel's has no gradient by the LSE.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_cute import checks, reference

#: Query rows of one call under a mask. What a mask costs grows with ROWS x Nk, never with Nq x Nk.
ROWS = 256

#: Scores of one step of the backward, but for rows of more: its memory grows with SCORES + N.
SCORES = 2**24

#: Beyond these scales, scores of everyday inputs, or the factor, could leave the range of fp32, and
#: are computed in fp64.
SMALL_SCALE, LARGE_SCALE = 1e-20, 1e20

_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _largest(x: Tensor) -> float:
    """The greatest size of an element; NaN if there is one."""
    least, greatest = (float(end) for end in torch.aminmax(x))
    return max(-least, greatest)


def _precision(q: Tensor, k: Tensor, softmax_scale: float) -> tuple[torch.dtype, bool]:
    """The dtype to compute in, and whether it holds all scores: beyond its range, and with NaN and
    Inf, it does not. Likewise where q times the scale leaves it, which is computed first."""
    is_ordinary = softmax_scale == 0 or SMALL_SCALE <= abs(softmax_scale) <= LARGE_SCALE
    in_fp64 = q.dtype == torch.float64 or not is_ordinary
    dtype = torch.float64 if in_fp64 else torch.float32
    limit = torch.finfo(dtype).max / 2
    largest_q, largest_k = _largest(q) * abs(softmax_scale), _largest(k) * q.shape[3]
    return dtype, largest_q < limit and largest_q * largest_k < limit


@torch.no_grad()  # autograd.py has the gradients
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    deterministic: bool | None = None,
    tuning: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_cute::fwd`: (out, lse) for q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D).

    The mask is that of `reference.visible_keys`. `deterministic` is for the backward, `tuning` for
    GPUs.
    """
    if (error := checks.refusal(q, k, v, False, softmax_scale)) is not None:
        raise error  # as the CUDA op: traced programs come here with whatever they are given
    out = torch.empty_like(q)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32)
    batch, heads_q, len_q, head_dim = q.shape
    heads_kv, len_k = k.shape[1:3]
    if out.numel() == 0 or len_k == 0:
        return out.zero_(), lse
    softmax_scale = reference.scale_of(q, softmax_scale)
    band = reference.band_of(q, k, False, window_left, window_right, diagonal_offset)

    dtype, holds_scores = _precision(q, k, softmax_scale)
    # Otherwise a score may be infinite. PyTorch's kernel adds its mask, so such a key would reach
    # rows that do not see it (inf + -inf is NaN). It takes a row of -inf for empty.
    if not holds_scores:
        exact_out, exact_lse = reference.attention_blockwise(
            *(q, k, v),
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            diagonal_offset=diagonal_offset,
            dtype=dtype,
        )
        return out.copy_(exact_out), lse.copy_(exact_lse)
    # The scale's sign and power of two go into q, which is exact; what is left is in [1, 2).
    mantissa, exponent = math.frexp(softmax_scale)
    q_factor = math.copysign(math.ldexp(1.0, exponent - 1), mantissa) if mantissa else 0.0
    scale = 2 * abs(mantissa) if mantissa else 1.0
    # Query heads that share a head of k and v stand in a dimension of their own, over which k and v
    # expand.
    kv_shape = (batch * heads_kv, 1, len_k, head_dim)
    group = (-1, heads_q // heads_kv, -1, -1)
    q = (q.to(dtype) * q_factor).contiguous().view(batch * heads_kv, -1, len_q, head_dim)
    k = k.to(dtype).contiguous().view(kv_shape).expand(group)
    v = v.to(dtype).contiguous().view(kv_shape).expand(group)

    masked = window_left >= 0 or window_right >= 0
    rows_at_once = ROWS if masked else len_q
    for first in range(0, len_q, rows_at_once):
        last = min(first + rows_at_once, len_q)
        begin, end = reference.visible_keys(torch.arange(first, last), len_k, *band)
        # What any of these rows sees lies between.
        first_key, last_key = int(begin[0]), int(end[-1])
        if last_key <= first_key:
            out[:, :, first:last] = 0
            continue
        mask = None
        if masked:
            keys = torch.arange(first_key, last_key)
            visible = (begin[:, None] <= keys) & (keys < end[:, None])
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf)
        tile_out, tile_lse = _attention(
            q[:, :, first:last],
            k[:, :, first_key:last_key],
            v[:, :, first_key:last_key],
            attn_mask=mask,
            scale=scale,
        )
        no_key = begin >= end
        tile_out = tile_out.masked_fill(no_key[:, None], 0)
        out[:, :, first:last] = tile_out.reshape(batch, heads_q, -1, head_dim)
        lse[:, :, first:last] = tile_lse.masked_fill(no_key, -math.inf).reshape(batch, heads_q, -1)
    return out, lse


@torch.no_grad()
def attention_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    deterministic: bool = False,
    tuning: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_cute::bwd`: (dq, dk, dv). Always deterministic here; `tuning` is for GPUs."""
    error = checks.refusal(q, k, v, False, softmax_scale)
    error = error or checks.refusal_of_results(q, out, softmax_lse, dout, dlse)
    if error is not None:
        raise error
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    batch, heads_q, len_q = q.shape[:3]
    heads_kv, len_k = k.shape[1:3]
    if q.numel() == 0 or k.numel() == 0 or (dout is None and dlse is None):
        return dq.zero_(), dk.zero_(), dv.zero_()
    softmax_scale = reference.scale_of(q, softmax_scale)
    band = reference.band_of(q, k, False, window_left, window_right, diagonal_offset)
    dtype, holds_scores = _precision(q, k, softmax_scale)
    dtype = dtype if holds_scores else torch.float64
    group = heads_q // heads_kv
    k, v = k.to(dtype), v.to(dtype)
    dk_sum, dv_sum = torch.zeros(2, *k.shape, dtype=dtype)
    dout = torch.zeros_like(q) if dout is None else dout
    dlse = torch.zeros_like(softmax_lse) if dlse is None else dlse

    def take(x: Tensor, rows: slice) -> Tensor:
        """Rows of all query heads, (B, Hkv, group x rows, ...): one matrix to each k and v."""
        x = x[:, :, rows].to(dtype)
        return x.reshape(batch, heads_kv, group * x.shape[2], *x.shape[3:])

    rows_at_once = max(1, min(ROWS, SCORES // (batch * heads_q * len_k)))
    for first in range(0, len_q, rows_at_once):
        rows = slice(first, min(first + rows_at_once, len_q))
        begin, end = reference.visible_keys(torch.arange(rows.start, rows.stop), len_k, *band)
        keys = slice(int(begin[0]), int(end[-1]))
        if keys.stop <= keys.start:
            dq[:, :, rows] = 0
            continue
        q_rows, dout_rows = take(q, rows) * softmax_scale, take(dout, rows)
        k_seen, v_seen = k[:, :, keys], v[:, :, keys]
        scores = q_rows @ k_seen.mT
        if window_left >= 0 or window_right >= 0:
            columns = torch.arange(keys.start, keys.stop)
            visible = (begin[:, None] <= columns) & (columns < end[:, None])
            scores.masked_fill_(~visible.repeat(group, 1), -math.inf)

        # P = e^(scores - LSE), delta = rowsum(dO * O) - dLSE. But the LSE and O come rounded. They
        # may be those of more keys than are here, as in ring attention; if not, the sums over these
        # keys are more exact: that of the weights, and rowsum(P * dP) for rowsum(dO * O).
        row_max = scores.amax(-1)
        no_key = row_max == -math.inf
        row_max.masked_fill_(no_key, 0)
        weights = scores.sub_(row_max[..., None]).exp_()
        row_sum, lse = weights.sum(-1), take(softmax_lse, rows)
        is_own = torch.isclose(row_max + row_sum.log(), lse, rtol=1e-6, atol=1e-6)
        factor = torch.where(is_own, 1 / row_sum, (row_max - lse).exp()).masked_fill_(no_key, 0)
        weights.mul_(factor[..., None])
        dweights = dout_rows @ v_seen.mT
        own_delta, delta = (weights * dweights).sum(-1), (dout_rows * take(out, rows)).sum(-1)
        delta = torch.where(is_own, own_delta, delta) - take(dlse, rows)
        delta.masked_fill_(no_key, 0)  # dlse may be NaN there
        dscores = dweights.sub_(delta[..., None]).mul_(weights)

        dq_rows = (dscores @ k_seen).mul_(softmax_scale)
        dq[:, :, rows] = dq_rows.unflatten(2, (group, -1)).flatten(1, 2)
        dk_sum[:, :, keys] += dscores.mT @ q_rows
        dv_sum[:, :, keys] += weights.mT @ dout_rows
    return dq, dk.copy_(dk_sum), dv.copy_(dv_sum)
