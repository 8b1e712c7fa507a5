"""The one rule for how far a result may be from the exact one. Tests, benchmarks and `python -m
flash_cute` use it.

The exact result is the plain formula in fp64 (`reference.attention`). The output's greatest error
may be twice that of a yardstick plus a rounding floor. The yardstick is what one would write in the
inputs' dtype, step by step:

    softmax((q * scale) @ k^T, in fp32, rounded to the dtype) @ v

The LSE's greatest error may be 1e-5, and more only where scores are far from ordinary size. NaN and
infinities must stand where they stand in the exact result.

For gradients the rule is the same, for dq, dk and dv apart. The exact ones are
`reference.attention_backward`'s, and the yardstick is its formula, step by step: P and dS in fp32
are rounded to the dtype, as all products are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_cute import reference

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
    """As `Comparison`, of (dq, dk, dv)."""

    errors: tuple[float, ...]
    bounds: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return all(error <= bound for error, bound in zip(self.errors, self.bounds, strict=True))

    def __str__(self) -> str:
        rows = zip(("dq", "dk", "dv"), self.errors, self.bounds, strict=True)
        return ", ".join(f"{name} error {x:.2e} (at most {bound:.2e})" for name, x, bound in rows)


def compare(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
) -> Comparison:
    """Compares (out, lse), computed for these arguments, with the exact result. Goes through the
    batch one by one, for the sake of memory: an item takes some Hq x Nq x Nk numbers of 8 bytes.
    The arguments are those of `reference.attention`.
    """
    scale = reference.scale_of(q, softmax_scale)
    band = reference.band_of(q, k, is_causal, window_left, window_right, diagonal_offset)
    out_error = lse_error = yardstick_error = largest_out = 0.0
    for b in range(q.shape[0]):
        item = slice(b, b + 1)
        inputs = q[item], k[item], v[item]
        exact_out, exact_lse = reference.attention(
            *(*inputs, is_causal, scale),
            window_left=window_left,
            window_right=window_right,
            diagonal_offset=diagonal_offset,
        )
        rough_out = _yardstick(*inputs, scale, band)
        out_error = max(out_error, _greatest_error(out[item], exact_out))
        lse_error = max(lse_error, _greatest_error(lse[item], exact_lse.float().double()))
        # Where the yardstick overflows its dtype it says nothing.
        difference = (rough_out.double() - exact_out).abs()
        yardstick_error = max(yardstick_error, _greatest(difference[difference.isfinite()]))
        largest_out = max(largest_out, _greatest(exact_out[exact_out.isfinite()]))
    out_bound = _bound(yardstick_error, largest_out, q.dtype)
    score = abs(scale) * _longest(q) * _longest(k)
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
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
) -> GradientComparison:
    """As `compare`, of (dq, dk, dv). The arguments are those of `reference.attention_backward`."""
    scale = reference.scale_of(q, softmax_scale)
    band = reference.band_of(q, k, is_causal, window_left, window_right, diagonal_offset)
    dout = torch.zeros_like(q) if dout is None else dout
    dlse = torch.zeros_like(q[..., 0]).float() if dlse is None else dlse
    errors, yardstick_errors, largest = [0.0] * 3, [0.0] * 3, [0.0] * 3
    for b in range(q.shape[0]):
        item = slice(b, b + 1)
        inputs = dout[item], q[item], k[item], v[item]
        all_exact = reference.attention_backward(
            *(*inputs, is_causal, scale),
            dlse=dlse[item],
            window_left=window_left,
            window_right=window_right,
            diagonal_offset=diagonal_offset,
        )
        all_rough = _yardstick_backward(*inputs, dlse[item], scale, band)
        for i, (actual, exact, rough) in enumerate(
            zip(gradients, all_exact, all_rough, strict=True)
        ):
            errors[i] = max(errors[i], _greatest_error(actual[item], exact))
            difference = (rough.double() - exact).abs()
            finite = _greatest(difference[difference.isfinite()])
            yardstick_errors[i] = max(yardstick_errors[i], finite)
            largest[i] = max(largest[i], _greatest(exact[exact.isfinite()]))
    if q.dtype == torch.float64:
        # The reference is no more exact than this: what cancels in its sums counts as well.
        dout_size = _longest(dout)
        dscore_size = abs(scale) * (dout_size * _longest(v) + _greatest(dlse[dlse.isfinite()]))
        sizes = dscore_size * _longest(k), dscore_size * _longest(q), dout_size
        largest = [max(pair) for pair in zip(largest, sizes, strict=True)]
    score = abs(scale) * _longest(q) * _longest(k)
    bounds = (_bound(*pair, q.dtype, score) for pair in zip(yardstick_errors, largest, strict=True))
    return GradientComparison(tuple(errors), tuple(bounds))


def _bound(yardstick_error: float, largest: float, dtype: torch.dtype, score: float = 0.0) -> float:
    # One rounding; where the yardstick is as exact as fp32 or fp64, sums in another order add some
    # more. In gradients the more so where scores are large, as the error of an exponential is.
    is_exact = dtype not in (torch.float16, torch.bfloat16)
    ulps = 16 * max(1.0, score / ORDINARY_SCORE) if is_exact else 0.5
    return 2 * yardstick_error + ulps * torch.finfo(dtype).eps * largest


def _yardstick(q: Tensor, k: Tensor, v: Tensor, scale: float, band: tuple[int, int, int]) -> Tensor:
    k, v = (reference.repeat_heads(x, q) for x in (k, v))
    return _yardstick_weights(q, k, scale, band).to(q.dtype) @ v


def _yardstick_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dlse: Tensor,
    scale: float,
    band: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    k_heads, v_heads = (reference.repeat_heads(x, q) for x in (k, v))
    weights = _yardstick_weights(q, k_heads, scale, band)
    no_key = (weights == 0).all(-1)
    dout = dout.masked_fill(no_key[..., None], 0.0)
    rounded = weights.to(q.dtype)
    delta = (dout * (rounded @ v_heads)).sum(-1, dtype=weights.dtype) - dlse
    dweights = dout @ v_heads.mT - delta.masked_fill(no_key, 0.0)[..., None]
    dscores = (weights * dweights).to(q.dtype)
    dq, dk, dv = (dscores @ k_heads) * scale, (dscores.mT @ q) * scale, rounded.mT @ dout
    return dq, reference.sum_heads(dk, k), reference.sum_heads(dv, v)


def _yardstick_weights(q: Tensor, k: Tensor, scale: float, band: tuple[int, int, int]) -> Tensor:
    """softmax in fp32, or fp64 for such inputs; 0 in rows without a key."""
    visible = reference.visible_mask(q.shape[2], k.shape[2], *band, device=q.device)
    scores = ((q * scale) @ k.mT).masked_fill(~visible, -math.inf)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=dtype).masked_fill(~visible, 0.0)


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
