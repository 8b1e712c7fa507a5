"""The merge of attention over splits of the keys."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from support import DEVICES, random_inputs

import flash_cute
from flash_cute import ops, reference

F64 = torch.float64
ON_DEVICES = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_sink", [False, True])
@ON_DEVICES
def test_merge_is_attention_over_all_keys(device, has_sink, is_packed):
    """Results and gradients: rows that see no key in a split, or in none."""
    q, k, v = (
        x.requires_grad_()
        for x in random_inputs(
            1, 4, 40, 16, heads_kv=2, len_k=60, head_dim_v=24, dtype=torch.float16, device=device
        )
    )
    sink = torch.randn(4, device=device).requires_grad_() if has_sink else None
    inputs = [q, k, v, *([sink] if has_sink else [])]
    band = functools.partial(reference.attention, q, k, v, window_left=9, window_right=2)
    expected = band(diagonal_offset=-12, learnable_sink=sink)
    splits = []
    for first in (0, 7, 60):
        keys = slice(first, {0: 7, 7: 60, 60: 60}[first])
        out, lse = ops.fwd(
            q, k[:, :, keys], v[:, :, keys],
            window_left=9, window_right=2, diagonal_offset=-12 - first,
        )  # fmt: skip
        splits.append((out[0].transpose(0, 1), lse[0]) if is_packed else (out, lse))
    out, lse = flash_cute.merge(*zip(*splits, strict=True), learnable_sink=sink)
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    if is_packed:
        out, lse = out.transpose(0, 1)[None], lse[None]
    assert torch.equal(lse.isinf(), expected[1].isinf()) and (has_sink or lse.isinf().any())
    torch.testing.assert_close(out, expected[0].half(), rtol=0, atol=2e-3)
    torch.testing.assert_close(lse, expected[1].float(), rtol=0, atol=1e-5)
    dout, dlse = torch.randn(out.shape).to(out), torch.randn(lse.shape).to(lse)
    dlse = dlse.masked_fill(lse.isinf(), math.nan)
    actual = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    dlse = dlse.double().nan_to_num(0)
    visible = expected[1].isfinite()
    loss = (expected[0] * dout).sum() + (expected[1][visible] * dlse[visible]).sum()
    for a, b in zip(actual, torch.autograd.grad(loss, inputs), strict=True):
        assert torch.all(a.isfinite())
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_gradcheck_of_merge():
    outs = [torch.randn(2, 3, 4, 5, dtype=F64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(2, 3, 4, dtype=F64, requires_grad=True) for _ in range(3)]
    sink = torch.randn(3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda sink, *x: flash_cute.merge(x[:3], x[3:], learnable_sink=sink), (sink, *outs, *lses)
    )


def test_merge_keeps_what_nobody_saw_out():
    out, lse = torch.randn(1, 1, 3, 4), torch.tensor([[[0.5, -math.inf, 300.0]]])
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for merged in (
        flash_cute.merge([out, nothing[0]], [lse, nothing[1]]),
        flash_cute.merge([out], [lse]),
    ):
        assert torch.equal(merged[1], lse)
        assert torch.equal(merged[0], out * lse.isfinite()[..., None])


@pytest.mark.parametrize(
    "outs, lses, error, message",
    [
        ([], [], ValueError, "outs has 0 tensors and lses 0"),
        ([torch.ones(1, 2, 3, 4)], [], ValueError, "outs has 1 tensors and lses 0"),
        (torch.ones(1, 2, 3, 4), [], TypeError, "outs is .*: it must be a list"),
        ([torch.ones(2, 3)], [torch.ones(2)], ValueError, r"outs\[0\] has shape \(2, 3\)"),
        ([torch.ones(3, 2, 4)], [torch.ones(3, 2)], ValueError, r"lses\[0\] .*must be \(2, 3\)"),
        (
            [torch.ones(3, 2, 4), torch.ones(3, 2, 4).half()], [torch.ones(2, 3)] * 2,
            TypeError, r"outs\[1\] is float16: it must be float32",
        ),
        (
            [torch.ones(3, 2, 4)], [torch.ones(2, 3, device="meta")],
            ValueError, r"lses\[0\] is on meta and outs\[0\] on cpu",
        ),
    ],
)  # fmt: skip
def test_merge_refuses(outs, lses, error, message):
    with pytest.raises(error, match=message):
        flash_cute.merge(outs, lses)
