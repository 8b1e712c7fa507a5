"""The ops `flash_cute::fwd` and `flash_cute::bwd` for CPU tensors: one call of cpu_kernels.py for a
dense batch, or one for each sequence where lengths are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute import checks, cpu_kernels, options
from flash_cute.cpu_kernels import Changes, part
from flash_cute.scores import scale_of


class _Sequence(NamedTuple):
    """The query rows and the keys of a sequence, as slices of the tensors. Without lengths these
    are all sequences of a batch at once."""

    batch: slice
    rows: slice
    keys: slice
    diagonal_offset: int  #: of the first of these rows, among these keys

    def rows_of(self, x: Tensor) -> Tensor:
        """Of q or its like, (B, H, N, D) or packed (T, H, D): (B, H, rows, D)."""
        return x[self.batch, :, self.rows] if x.dim() == 4 else x[self.rows].transpose(0, 1)[None]

    def keys_of(self, x: Tensor) -> Tensor:
        """Of k or its like."""
        return x[self.batch, :, self.keys] if x.dim() == 4 else x[self.keys].transpose(0, 1)[None]

    def lse_of(self, x: Tensor) -> Tensor:
        """Of the LSE or its like, (B, H, N) or packed (H, T): (B, H, rows)."""
        return x[self.batch, :, self.rows] if x.dim() == 3 else x[None, :, self.rows]

    def bias_of(self, x: Tensor) -> Tensor:
        return part(x, self.batch, slice(None), self.rows, self.keys)

    def changes(
        self,
        softcap: float,
        sink: Tensor | None,
        alibi_slopes: Tensor | None,
        bias: Tensor | None,
    ) -> Changes:
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
            alibi_slopes = part(slopes, self.batch, slice(None))
        return Changes(softcap, alibi_slopes, None if bias is None else self.bias_of(bias), sink)


def _sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    key_start: Tensor | None,
    diagonal_offset: int | None,
) -> Iterator[_Sequence]:
    """The sequences of a call. Lengths beyond those of the tensors count as these."""
    if cu_seqlens_q is seqused_q is seqused_k is key_start is None:
        offset = k.shape[2] - q.shape[2] if diagonal_offset is None else diagonal_offset
        yield _Sequence(slice(None), slice(0, q.shape[2]), slice(0, k.shape[2]), offset)
        return

    def bounds(x: Tensor, cu_seqlens: Tensor | None, used: Tensor | None) -> list[tuple[int, int]]:
        if cu_seqlens is None:
            pairs = [(0, x.shape[2])] * x.shape[0]
        else:
            ends = cu_seqlens.clamp(0, x.shape[0]).tolist()
            pairs = [(begin, max(begin, end)) for begin, end in pairwise(ends)]
        if used is None:
            return pairs
        lengths = used.clamp(min=0).tolist()
        return [
            (begin, min(end, begin + n)) for (begin, end), n in zip(pairs, lengths, strict=True)
        ]

    all_rows, all_keys = bounds(q, cu_seqlens_q, seqused_q), bounds(k, cu_seqlens_k, seqused_k)
    starts = [0] * len(all_rows) if key_start is None else key_start.clamp(min=0).tolist()
    for b, ((row, row_end), (key, key_end), start) in enumerate(
        zip(all_rows, all_keys, starts, strict=True)
    ):
        offset = (key_end - key) - (row_end - row) if diagonal_offset is None else diagonal_offset
        keys = slice(min(key + start, key_end), key_end)
        yield _Sequence(slice(b, b + 1), slice(row, row_end), keys, offset - (keys.start - key))


@torch.no_grad()  # autograd.py has the gradients
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    key_start: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    tuning: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_cute::fwd`: (out, lse) for q (B, Hq, Nq, D), k (B, Hkv, Nk, D) and v (B, Hkv, Nk, Dv),
    or for packed ones.

    The mask is that of `scores.visible_keys`. `deterministic` is for the backward, `tuning` for
    GPUs.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, key_start
    optional = learnable_sink, alibi_slopes, bias, *lengths
    if (error := options.refusal_of_op(q, k, v, optional, softmax_scale, softcap)) is not None:
        raise error  # as the CUDA op: traced programs come here with whatever they are given
    # Rows that no sequence has stay as they are here.
    out = checks.empty_out(q, v).zero_()
    lse = torch.full(checks.lse_shape(q), -math.inf, dtype=torch.float32, device=q.device)
    softmax_scale = scale_of(q, softmax_scale)
    for sequence in _sequences(q, k, *lengths, diagonal_offset):
        cpu_kernels.forward(
            *(sequence.rows_of(out), sequence.lse_of(lse)),
            *(sequence.rows_of(q), sequence.keys_of(k), sequence.keys_of(v)),
            softmax_scale,
            (window_left, window_right, sequence.diagonal_offset),
            sequence.changes(softcap, learnable_sink, alibi_slopes, bias),
        )
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
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    key_start: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    bias_grad: bool = False,
    tuning: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`flash_cute::bwd`: (dq, dk, dv, dsink, dbias). Always deterministic here; `tuning` is for
    GPUs."""
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, key_start
    optional = learnable_sink, alibi_slopes, bias, *lengths
    error = options.refusal_of_op(q, k, v, optional, softmax_scale, softcap)
    error = error or checks.refusal_of_results(q, v, out, softmax_lse, dout, dlse)
    if error is not None:
        raise error
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dsink, dbias = (
        q.new_empty(0) if x is None else torch.zeros_like(x)
        for x in (learnable_sink, bias if bias_grad else None)
    )
    if dout is None and dlse is None:
        return dq, dk, dv, dsink, dbias
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(softmax_lse) if dlse is None else dlse
    softmax_scale = scale_of(q, softmax_scale)
    exact = torch.promote_types(q.dtype, torch.float32)
    sink_sum = None if learnable_sink is None else torch.zeros_like(dsink, dtype=exact)
    bias_sum = torch.zeros_like(dbias, dtype=exact) if bias_grad and bias is not None else None
    for sequence in _sequences(q, k, *lengths, diagonal_offset):
        cpu_kernels.backward(
            *(sequence.rows_of(dq), sequence.keys_of(dk), sequence.keys_of(dv)),
            sink_sum,
            None if bias_sum is None else sequence.bias_of(bias_sum),
            *(sequence.rows_of(dout), sequence.rows_of(q), sequence.keys_of(k)),
            *(sequence.keys_of(v), sequence.rows_of(out), sequence.lse_of(softmax_lse)),
            sequence.lse_of(dlse),
            softmax_scale,
            (window_left, window_right, sequence.diagonal_offset),
            sequence.changes(softcap, learnable_sink, alibi_slopes, bias),
        )
    for gradient, total in ((dsink, sink_sum), (dbias, bias_sum)):
        if total is not None:
            gradient.copy_(total)
    return dq, dk, dv, dsink, dbias
