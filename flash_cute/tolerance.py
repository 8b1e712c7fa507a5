"""The one rule for how far a result may be from the exact one. Tests, benchmarks and `python -m
flash_cute` use it.

The exact result is the plain formula in fp64 (`reference.attention`). The output's greatest error
may be twice that of a yardstick plus a rounding floor. The yardstick is what one would write in the
inputs' dtype, step by step:

    softmax((q * scale) @ k^T, in fp32, rounded to the dtype) @ v

The LSE's greatest error may be 1e-5, and more only where scores are far from ordinary size. NaN and
infinities must stand where they stand in the exact result.

Softcap, slopes and bias change scores in that dtype. A sink is one more column.

For gradients the rule is the same, for dq, dk and dv apart, and for dsink and dbias. The exact ones
are `reference.attention_backward`'s, and the yardstick is its formula, step by step: P and dS in
fp32 are rounded to the dtype, as all products are.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cute import reference
from flash_cute.scores import band_of, change, scale_of, visible_mask

LSE_TOLERANCE = 1e-5
#: Scores up to this size (|q| |k| |scale|, lengths of vectors) are ordinary; beyond it fp32's own
#: resolution counts.
ORDINARY_SCORE = 32.0


@dataclass(frozen=True)
class Comparison:
    """Greatest absolute errors, and what they may be. NaN and infinities in the wrong place count
    as an infinite error.
    """

    out_error: float
    out_bound: float
    lse_error: float
    lse_bound: float

    @property
    def passed(self) -> bool:
        return self.out_error <= self.out_bound and self.lse_error <= self.lse_bound

    def __str__(self) -> str:
        return (
            f"out error {self.out_error:.2e} (at most {self.out_bound:.2e}), "
            f"lse error {self.lse_error:.2e} (at most {self.lse_bound:.2e})"
        )


@dataclass(frozen=True)
class GradientComparison:
    """As `Comparison`, of (dq, dk, dv), and of dsink and dbias where they are compared."""

    errors: tuple[float, ...]
    bounds: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return all(error <= bound for error, bound in zip(self.errors, self.bounds, strict=True))

    def __str__(self) -> str:
        rows = zip(("dq", "dk", "dv", "next", "last"), self.errors, self.bounds, strict=False)
        return ", ".join(f"{name} error {x:.2e} (at most {bound:.2e})" for name, x, bound in rows)


def compare(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    **options: Any,
) -> Comparison:
    """Compares (out, lse), computed for these arguments, with the exact result. Goes through the
    batch one by one, for the sake of memory: an item takes some Hq x Nq x Nk numbers of 8 bytes.
    The arguments are those of `reference.attention`.
    """
    scale = scale_of(q, softmax_scale)
    out_error = lse_error = yardstick_error = largest_out = largest_lse = 0.0
    for b in range(q.shape[0]):
        item = slice(b, b + 1)
        inputs = q[item], k[item], v[item]
        others = _of_item(options, b, q.shape[0])
        exact_out, exact_lse = reference.attention(*inputs, is_causal, scale, **others)
        rough_out = _Yardstick(*inputs, is_causal, scale, **others).out
        out_error = max(out_error, _greatest_error(out[item], exact_out))
        lse_error = max(lse_error, _greatest_error(lse[item], exact_lse.float().double()))
        largest_lse = max(largest_lse, _greatest(exact_lse[exact_lse.isfinite()]))
        # Where the yardstick overflows its dtype it says nothing.
        difference = (rough_out.double() - exact_out).abs()
        yardstick_error = max(yardstick_error, _greatest(difference[difference.isfinite()]))
        largest_out = max(largest_out, _greatest(exact_out[exact_out.isfinite()]))
    out_bound = _bound(yardstick_error, largest_out, q.dtype)
    score = abs(scale) * _longest(q) * _longest(k)
    if any(options.get(name) is not None for name in ("alibi_slopes", "bias", "learnable_sink")):
        score = max(score, largest_lse)  # they make scores of any size
    return Comparison(
        out_error, out_bound, lse_error, LSE_TOLERANCE * max(1.0, score / ORDINARY_SCORE)
    )


def compare_gradients(
    gradients: tuple[Tensor, ...],
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    dlse: Tensor | None = None,
    **options: Any,
) -> GradientComparison:
    """As `compare`, of (dq, dk, dv), and of dsink and dbias if sink and bias are given. The
    arguments are those of `reference.attention_backward`."""
    scale = scale_of(q, softmax_scale)
    dout = q.new_zeros(*q.shape[:3], v.shape[3]) if dout is None else dout
    dlse = torch.zeros_like(q[..., 0]).float() if dlse is None else dlse
    sink_size = 0.0
    pairs = []  # of each item, the exact gradients and the rough ones
    for b in range(q.shape[0]):
        item = slice(b, b + 1)
        inputs = q[item], k[item], v[item]
        others = _of_item(options, b, q.shape[0])
        exact = reference.attention_backward(
            dout[item], *inputs, is_causal, scale, dlse=dlse[item], **others
        )
        yardstick = _Yardstick(*inputs, is_causal, scale, **others)
        pairs.append((exact, yardstick.gradients(dout[item], dlse[item])))
        sink_size += yardstick.sink_size
    errors, yardstick_errors, largest = [], [], []
    for i, actual in enumerate(gradients):
        items = [(exact[i], rough[i].double()) for exact, rough in pairs]
        if i >= 3 and items and actual.shape == items[0][0].shape:
            # The batch shares it: the sum of the items' gradients.
            parts = [(actual, *(sum(x) for x in zip(*items, strict=True)))]
        else:
            parts = [(actual[b : b + 1], *pair) for b, pair in enumerate(items)]
        differences = [(rough - exact).abs() for _, exact, rough in parts]
        errors.append(max((_greatest_error(x, exact) for x, exact, _ in parts), default=0.0))
        yardstick_errors.append(max((_greatest(x[x.isfinite()]) for x in differences), default=0.0))
        largest.append(
            max((_greatest(exact[exact.isfinite()]) for _, exact, _ in parts), default=0.0)
        )
    if options.get("learnable_sink") is not None:
        largest[3] = sink_size  # of its terms, which cancel
    if q.dtype == torch.float64:
        # The reference is no more exact than this: what cancels in its sums counts as well.
        dout_size = _longest(dout)
        dscore_size = abs(scale) * (dout_size * _longest(v) + _greatest(dlse[dlse.isfinite()]))
        sizes = [dscore_size * _longest(k), dscore_size * _longest(q), dout_size]
        sizes += [dscore_size] * (len(largest) - 3)
        largest = [max(pair) for pair in zip(largest, sizes, strict=True)]
    score = abs(scale) * _longest(q) * _longest(k)
    # Those of sink and bias are rounded to a dtype of their own.
    dtypes = (max(q.dtype, dx.dtype, key=lambda dtype: torch.finfo(dtype).eps) for dx in gradients)
    bounds = map(_bound, yardstick_errors, largest, dtypes, itertools.repeat(score))
    return GradientComparison(tuple(errors), tuple(bounds))


def _bound(yardstick_error: float, largest: float, dtype: torch.dtype, score: float = 0.0) -> float:
    # One rounding; where the yardstick is as exact as fp32 or fp64, sums in another order add some
    # more. In gradients the more so where scores are large, as the error of an exponential is.
    is_exact = dtype not in (torch.float16, torch.bfloat16)
    ulps = 16 * max(1.0, score / ORDINARY_SCORE) if is_exact else 0.5
    return 2 * yardstick_error + ulps * torch.finfo(dtype).eps * largest


def _of_item(options: dict[str, Any], b: int, batch: int) -> dict[str, Any]:
    """The options of sequence b of a batch."""

    def part(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or name == "learnable_sink" or x.shape[0] != batch:
            return x
        return x if name == "alibi_slopes" and x.dim() == 1 else x[b : b + 1]

    return {name: part(name, x) for name, x in options.items()}


class _Yardstick:
    """What one would write in the dtype of q, step by step."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, *,
        window_left: int = -1, window_right: int = -1, diagonal_offset: int | None = None,
        softcap: float = 0.0, learnable_sink: Tensor | None = None,
        seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        key_start: Tensor | None = None, **changes: Any,
    ) -> None:  # fmt: skip
        used = seqused_q, seqused_k
        band = band_of(q, k, is_causal, window_left, window_right, diagonal_offset, *used)
        lengths = seqused_q, seqused_k, key_start
        visible = visible_mask(q.shape[2], k.shape[2], *band, q.device, *lengths)
        self.kv = k, v
        self.scale, self.softcap, self.changes = scale, softcap, changes
        self.sink, self.sink_size = learnable_sink, 0.0
        self.q, *kv = reference.in_use(q, k, v, *lengths)
        self.k, self.v = (reference.repeat_heads(x, q) for x in kv)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.uncapped = (self.q * scale) @ self.k.mT
        scores = change(self.uncapped, band[2], softcap=softcap, **changes)
        scores = scores.masked_fill(~visible, -math.inf).to(dtype)
        self.lse, weights = reference.softmax(scores, learnable_sink, seqused_q)
        self.weights = weights.masked_fill(~visible, 0.0)  # 0 in rows without a key
        self.out = self.weights.to(q.dtype) @ self.v

    def gradients(self, dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.q, self.k, self.v
        no_key = (self.weights == 0).all(-1)
        dout = dout.masked_fill(no_key[..., None], 0.0)
        delta = (dout * self.out).sum(-1, dtype=self.weights.dtype)
        delta = delta - dlse.masked_fill(self.lse == -math.inf, 0.0)
        dweights = dout @ v.mT - delta[..., None]
        dscores = duncapped = (self.weights * dweights).to(q.dtype)
        if self.softcap:
            duncapped = dscores * (1 - torch.tanh(self.uncapped / self.softcap).square())
        dq, dk = (duncapped @ k) * self.scale, (duncapped.mT @ q) * self.scale
        dv = self.weights.to(q.dtype).mT @ dout
        gradients = [dq, reference.sum_heads(dk, self.kv[0]), reference.sum_heads(dv, self.kv[1])]
        if self.sink is not None:
            share = (self.sink.to(self.lse.dtype)[:, None] - self.lse).exp()
            share = share.masked_fill(self.lse == -math.inf, 0.0)
            terms = share * delta
            self.sink_size = _greatest(terms.abs().sum((0, 2)))
            gradients.append(-terms.sum((0, 2)))
        if (bias := self.changes.get("bias")) is not None:
            gradients.append(dscores.sum_to_size(bias.shape))
        return tuple(gradients)


def _greatest_error(actual: Tensor, exact: Tensor) -> float:
    actual = actual.double()
    odd = ~exact.isfinite()
    if not torch.equal(odd, ~actual.isfinite()) or not torch.equal(
        actual[odd].nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0),
        exact[odd].nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0),
    ):
        return math.inf
    return _greatest((actual - exact)[~odd])


def _greatest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _longest(x: Tensor) -> float:
    """The length of the longest finite row."""
    lengths = x.double().norm(dim=-1)
    return _greatest(lengths[lengths.isfinite()])
