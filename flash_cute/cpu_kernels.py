"""Attention and its gradients for dense CPU tensors: what cpu.py calls for each sequence.

The forward is PyTorch's own flash attention for the CPU. That kernel needs some care (seen under
torch 2.13): an empty Nq or Nk kills the process; its LSE is short of precision for fp16 and bf16
inputs; causal masks with a scale <= 0 give NaN; rows without a key get the LSE 0; a last stride
other than 1 is silently wrong; v has q's head dim. So it is given contiguous rows in fp32, of one
head dim, a positive scale, and masks made here.

Changed scores, and the backward, are the formulas of `reference` for some query rows at a time:
that kernel has no softcap, and no gradient by the LSE.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_cute import reference
from flash_cute.scores import change, visible_keys

#: Query rows of one call under a mask. What a mask costs grows with ROWS x Nk, never with Nq x Nk.
ROWS = 256

#: Scores of one step of the formulas, but for rows of more: its memory grows with SCORES + N.
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


Band = tuple[int, int, int]  #: window_left, window_right, diagonal_offset


def part(x: Tensor, *parts: slice) -> Tensor:
    """x, of as many dimensions as there are slices, with these taken but where it broadcasts."""
    return x[tuple(slice(None) if n == 1 else p for n, p in zip(x.shape, parts, strict=True))]


@dataclass(frozen=True)
class Changes:
    """Of the scores of these sequences: `scores.change`, and the sink."""

    softcap: float
    alibi_slopes: Tensor | None  #: (B or 1, Hq)
    bias: Tensor | None
    sink: Tensor | None

    @property
    def keep_scores(self) -> bool:
        return not self.softcap and self.alibi_slopes is self.bias is None

    def make(self, scores: Tensor, rows: slice, keys: slice, band: Band) -> Tensor:
        """The scores (B, Hq, rows, keys) as they are changed."""
        bias = self.bias
        if bias is not None:
            bias = part(bias, slice(None), slice(None), rows, keys).to(scores.dtype)
        offset = band[2] + rows.start - keys.start
        slopes = self.alibi_slopes
        return change(scores, offset, softcap=self.softcap, alibi_slopes=slopes, bias=bias)


def _blocks(
    len_q: int, len_k: int, rows_at_once: int, band: Band
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Some query rows at a time, the keys between which are all that they see, and the mask there
    (None where they see all)."""
    masked = band[0] >= 0 or band[1] >= 0
    for first in range(0, len_q, rows_at_once):
        rows = slice(first, min(first + rows_at_once, len_q))
        begin, end = visible_keys(torch.arange(rows.start, rows.stop), len_k, *band)
        keys = slice(int(begin[0]), max(int(begin[0]), int(end[-1])))
        if not masked:
            yield rows, keys, None
            continue
        columns = torch.arange(keys.start, keys.stop)
        yield rows, keys, (begin[:, None] <= columns) & (columns < end[:, None])


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """The results (B, H, N, D) and (B, H, N) of the keys alone, with the sink's column."""
    if sink is None:
        return out, lse
    sink = sink.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - sink).masked_fill(lse == -math.inf, 0)
    return out * share[..., None], torch.logaddexp(lse, sink)


def _rows_at_once(q: Tensor, len_k: int) -> int:
    return max(1, min(ROWS, SCORES // max(1, q.shape[0] * q.shape[1] * len_k)))


def forward(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    band: Band,
    changes: Changes,
) -> None:
    """Writes `out` and `lse`, those of q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv)."""
    if out.numel() == 0:
        return
    # What rows without a key get.
    out.zero_()
    lse.fill_(-math.inf) if changes.sink is None else lse.copy_(changes.sink[:, None])
    if k.shape[2] == 0:
        return
    dtype, holds_scores = _precision(q, k, softmax_scale)
    if not changes.keep_scores:
        dtype = dtype if holds_scores else torch.float64
        results = _formula(q, k.to(dtype), v.to(dtype), softmax_scale, band, changes)
    elif holds_scores:
        results = _by_pytorch(q, k.to(dtype), v.to(dtype), softmax_scale, band)
    else:
        # A score may be infinite. PyTorch's kernel adds its mask, so such a key would reach rows
        # that do not see it (inf + -inf is NaN). It takes a row of -inf for empty.
        block = reference.attention_blockwise(
            *(q, k, v, False, softmax_scale),
            window_left=band[0],
            window_right=band[1],
            diagonal_offset=band[2],
            dtype=dtype,
        )
        results = iter([(slice(None), *block)])
    for rows, some_out, some_lse in results:
        out[:, :, rows], lse[:, :, rows] = _with_sink(some_out, some_lse, changes.sink)


#: Query rows, and their out and LSE.
Results = Iterator[tuple[slice, Tensor, Tensor]]


def _by_pytorch(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, band: Band) -> Results:
    """By PyTorch's kernel, in the dtype of k and v."""
    batch, heads_q, len_q = q.shape[:3]
    heads_kv, len_k, head_dim_v = v.shape[1:]
    head_dim = max(q.shape[3], head_dim_v)
    q, k, v = (
        x if x.shape[3] == head_dim else pad(x, (0, head_dim - x.shape[3])) for x in (q, k, v)
    )
    # The scale's sign and power of two go into q, which is exact; what is left is in [1, 2).
    mantissa, exponent = math.frexp(softmax_scale)
    q_factor = math.copysign(math.ldexp(1.0, exponent - 1), mantissa) if mantissa else 0.0
    scale = 2 * abs(mantissa) if mantissa else 1.0
    # Query heads that share a head of k and v stand in a dimension of their own, over which k and v
    # expand.
    kv_shape = (batch * heads_kv, 1, len_k, head_dim)
    group = (-1, heads_q // heads_kv, -1, -1)
    q = (q.to(k.dtype) * q_factor).contiguous().view(batch * heads_kv, -1, len_q, head_dim)
    k, v = (x.contiguous().view(kv_shape).expand(group) for x in (k, v))

    masked = band[0] >= 0 or band[1] >= 0
    for rows, keys, visible in _blocks(len_q, len_k, ROWS if masked else len_q, band):
        if keys.stop == keys.start:
            continue
        mask = None
        if visible is not None:
            mask = torch.zeros(visible.shape, dtype=k.dtype).masked_fill_(~visible, -math.inf)
        inputs = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        out, lse = _attention(*inputs, attn_mask=mask, scale=scale)
        if visible is not None:
            no_key = ~visible.any(-1)
            out, lse = out.masked_fill(no_key[:, None], 0), lse.masked_fill(no_key, -math.inf)
        out = out[..., :head_dim_v].reshape(batch, heads_q, -1, head_dim_v)
        yield rows, out, lse.reshape(batch, heads_q, -1)


def _formula(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, band: Band, changes: Changes
) -> Results:
    """By the plain formula, in the dtype of k and v."""
    heads = k.shape[1], q.shape[1] // k.shape[1]
    for rows, keys, visible in _blocks(q.shape[2], k.shape[2], _rows_at_once(q, k.shape[2]), band):
        if keys.stop == keys.start:
            continue
        q_rows = (q[:, :, rows].to(k.dtype) * softmax_scale).unflatten(1, heads).flatten(2, 3)
        scores = (q_rows @ k[:, :, keys].mT).unflatten(2, (heads[1], -1)).flatten(1, 2)
        scores = changes.make(scores, rows, keys, band)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        lse = torch.logsumexp(scores, -1)
        # Not by the LSE: beside great scores it has lost the logarithm of the number of keys.
        weights = torch.softmax(scores, -1).masked_fill((lse == -math.inf)[..., None], 0)
        out = weights.unflatten(1, heads).flatten(2, 3) @ v[:, :, keys]
        yield rows, out.unflatten(2, (heads[1], -1)).flatten(1, 2), lse


def _norms(x: Tensor) -> Tensor:
    """Of rows, (...), in fp64, where they do not overflow."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return norms


def _sizes(x: Tensor) -> Tensor:
    """Sums of absolute values, of rows: (...)."""
    sizes: Tensor = torch.linalg.vector_norm(x, 1, dim=-1)
    return sizes


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsink: Tensor | None,
    dbias: Tensor | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor,
    softmax_scale: float,
    band: Band,
    changes: Changes,
) -> None:
    """Writes `dq`, `dk` and `dv`, and adds to `dsink` and `dbias`. The others are as `forward`
    takes them, and their gradients."""
    batch, heads_q, len_q = q.shape[:3]
    heads_kv, len_k = k.shape[1:3]
    if q.numel() == 0:
        return
    dtype = torch.promote_types(q.dtype, torch.float32)
    if len_k > 0:
        dtype, holds_scores = _precision(q, k, softmax_scale)
        dtype = dtype if holds_scores else torch.float64
    group = heads_q // heads_kv
    k, v = k.to(dtype), v.to(dtype)
    dk_sum, dv_sum = torch.zeros_like(k), torch.zeros_like(v)
    norm_k = _norms(k).nan_to_num(0.0, 0.0).amax(-1, keepdim=True) if len_k > 0 else 0.0
    sink = None if changes.sink is None else changes.sink.to(dtype).view(1, heads_kv, group, 1)

    def take(x: Tensor, rows: slice) -> Tensor:
        """Rows of all query heads, (B, Hkv, group x rows, ...): one matrix to each k and v."""
        x = x[:, :, rows].to(dtype)
        return x.reshape(batch, heads_kv, group * x.shape[2], *x.shape[3:])

    def by_heads(x: Tensor) -> Tensor:
        """Its inverse, (B, Hq, rows, ...)."""
        y: Tensor = x.unflatten(2, (group, -1)).flatten(1, 2)
        return y

    for rows, keys, visible in _blocks(len_q, len_k, _rows_at_once(q, len_k), band):
        q_rows, dout_rows = take(q, rows) * softmax_scale, take(dout, rows)
        k_seen, v_seen = k[:, :, keys], v[:, :, keys]
        scores = uncapped = q_rows @ k_seen.mT
        if not changes.keep_scores:
            scores = take(changes.make(by_heads(uncapped), rows, keys, band), slice(None))
        if visible is not None:
            scores = scores.masked_fill(~visible.repeat(group, 1), -math.inf)

        # P = e^(scores - LSE), delta = rowsum(dO * O) - dLSE. But the LSE and O come rounded. They
        # may be those of more keys than are here, as in ring attention; if not, the sums over these
        # keys are more exact: that of the weights, and rowsum(P * dP) for rowsum(dO * O). Both LSEs
        # may differ by the rounding of the scores, which grows with the norms of q and k. Both
        # deltas differ by as much, and by the rounding of O.
        lse = take(softmax_lse, rows)
        row_max = scores.amax(-1) if keys.stop > keys.start else torch.full_like(lse, -math.inf)
        no_key = row_max == -math.inf
        if sink is not None:
            sink_rows = sink.expand(-1, -1, -1, rows.stop - rows.start).flatten(2)
            row_max = torch.maximum(row_max, sink_rows)
        row_max = row_max.masked_fill(row_max == -math.inf, 0)
        weights = (scores - row_max[..., None]).exp_()
        row_sum = weights.sum(-1)
        if sink is not None:
            row_sum += (sink_rows - row_max).exp_()
        rounding = 1e-6 + 2.5e-7 * lse.abs() + 4 * torch.finfo(dtype).eps * _norms(q_rows) * norm_k
        dweights = dout_rows @ v_seen.mT
        terms, own_terms = dout_rows * take(out, rows), weights * dweights
        delta, own_delta = terms.sum(-1), own_terms.sum(-1) / row_sum
        of_out = torch.finfo(out.dtype).eps * _sizes(terms)
        of_scores = 4 * rounding * _sizes(own_terms) / row_sum
        is_own = (row_max + row_sum.log() - lse).abs() <= rounding
        is_own &= ~((own_delta - delta).abs() > of_out + of_scores)
        factor = torch.where(is_own, 1 / row_sum, (row_max - lse).exp()).masked_fill_(no_key, 0)
        weights.mul_(factor[..., None])
        delta = torch.where(is_own, own_delta, delta) - take(dlse, rows)
        if sink is not None and dsink is not None:
            weight = torch.where(
                is_own, (sink_rows - row_max).exp() / row_sum, (sink_rows - lse).exp()
            )
            # Without a key and with a sink of -inf, dlse may be NaN.
            ddsink = torch.where(sink_rows == -math.inf, 0, weight * delta)
            dsink -= by_heads(ddsink).sum((0, 2))
        delta.masked_fill_(no_key, 0)  # dlse may be NaN there
        dscores = dweights.sub_(delta[..., None]).mul_(weights)
        if dbias is not None:
            some = part(dbias, slice(None), slice(None), rows, keys)
            some += by_heads(dscores).sum_to_size(some.shape)
        if changes.softcap:
            dscores *= 1 - (uncapped / changes.softcap).tanh_().square_()

        dq_rows = (dscores @ k_seen).mul_(softmax_scale)
        dq[:, :, rows] = by_heads(dq_rows)
        dk_sum[:, :, keys] += dscores.mT @ q_rows
        dv_sum[:, :, keys] += weights.mT @ dout_rows
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)
