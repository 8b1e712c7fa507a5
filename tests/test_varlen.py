"""Packed sequences, and the merge of parts. A packed call is compared with the formula for the same
sequences padded, which knows the lengths."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
import torch
from support import DEVICES, nan_in_new_memory, poisoned, random_inputs
from test_options import DIFFERENTIABLE, SOME, as_reference, random_options, skip_unserved

import flash_cute
from flash_cute import ops, reference, tolerance

F64 = torch.float64
ON_DEVICES = pytest.mark.parametrize("device", DEVICES)
#: Lengths of queries and of keys: empty ones, one token beside many, longer on either side.
LENGTHS = {
    "equal": ([64, 64, 64], [64, 64, 64]),
    "ragged": ([1, 130, 0, 65, 17], [1, 130, 0, 65, 17]),
    "one long": ([1, 1, 700, 1], [1, 1, 700, 1]),
    "of two kinds": ([5, 0, 40, 90, 1], [90, 33, 0, 40, 257]),
    "all empty": ([0, 0], [0, 0]),
    "none": ([], []),
    "no keys": ([3, 4], [0, 0]),
}


def ends_of(lengths, device="cpu", dtype=torch.int32):
    """cu_seqlens"""
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype).to(device)


def pack(padded, lengths, beyond=0):
    """The rows in use of (B, H, N, ...) as (T, H, ...), which lies in the midst of NaN; `beyond`
    the last sequence, too."""
    rows = [x[:, :n].transpose(0, 1) for x, n in zip(padded, lengths, strict=True)]
    rows.append(padded.new_full((beyond, padded.shape[1], *padded.shape[3:]), math.nan))
    packed = torch.cat(rows)
    return poisoned(packed.transpose(0, 1)[None], "bnhd")[0].transpose(0, 1)


def pad(packed, lengths, length, fill=0.0):
    """Its inverse; `fill` where there is no row."""
    padded = packed.new_full((len(lengths), packed.shape[1], length, *packed.shape[2:]), fill)
    for b, end in enumerate(itertools.accumulate(lengths)):
        padded[b, :, : lengths[b]] = packed.detach()[end - lengths[b] : end].transpose(0, 1)
    return padded


def padded_inputs(lengths_q, lengths_k, dtype, device, heads=(4, 2), head_dim=16, seed=0):
    return random_inputs(
        *(len(lengths_q), heads[0], max(lengths_q, default=0), head_dim),
        heads_kv=heads[1], len_k=max(lengths_k, default=0), dtype=dtype, device=device, seed=seed,
    )  # fmt: skip


def check_packed(q, k, v, lengths_q, lengths_k, is_causal=False, beyond=0, **given):
    """Asserts that results and gradients of padded inputs, packed, are as exact as they must be,
    by the formula; returns those of the packed call, (out, lse, *gradients)."""
    device = q.device
    ends_q, ends_k = ends_of(lengths_q, device), ends_of(lengths_k, device)
    skip_unserved(device.type, {**given, "cu_seqlens_q": ends_q})
    packed = [pack(q, lengths_q, beyond), pack(k, lengths_k, beyond), pack(v, lengths_k, beyond)]
    inputs = [x.requires_grad_() for x in packed]
    extra = {n: given[n].detach().requires_grad_() for n in DIFFERENTIABLE if n in given}
    with nan_in_new_memory():
        out, lse = flash_cute.forward_varlen(
            *inputs, ends_q, ends_k, is_causal=is_causal, **given | extra
        )
    tokens = sum(lengths_q)
    assert out.shape == packed[0].shape and out.dtype == q.dtype
    assert lse.shape == (q.shape[1], tokens + beyond) and lse.is_contiguous()
    assert torch.all(out[tokens:] == 0) and torch.all(lse[:, tokens:] == -math.inf)

    formula = as_reference(given)
    for name, lengths in (("seqused_q", lengths_q), ("seqused_k", lengths_k)):
        formula.setdefault(name, torch.tensor(lengths, device=device, dtype=torch.int32))
    all_lse = pad(lse.mT, lengths_q, q.shape[2], -math.inf)
    result = tolerance.compare(
        pad(out.detach(), lengths_q, q.shape[2]), all_lse, q, k, v, is_causal, **formula
    )
    assert result.passed, str(result)

    dout, dlse = torch.randn(q.shape).to(q), torch.randn(all_lse.shape).to(lse)
    given_out = pack(dout, lengths_q, beyond)
    given_lse = pack(dlse.masked_fill(all_lse == -math.inf, math.nan)[..., None], lengths_q, beyond)
    inputs += extra.values()
    with nan_in_new_memory():
        gradients = torch.autograd.grad([out, lse], inputs, [given_out, given_lse[..., 0].mT])
    for x, dx in zip(inputs, gradients, strict=True):
        assert dx.shape == x.shape and dx.dtype == x.dtype and torch.all(dx.isfinite())
    dq, dk, dv, *others = gradients
    padded = [pad(dq, lengths_q, q.shape[2]), *(pad(x, lengths_k, k.shape[2]) for x in (dk, dv))]
    result = tolerance.compare_gradients(
        (*padded, *others), dout, q, k, v, is_causal, dlse=dlse, **formula
    )
    assert result.passed, str(result)
    return out, lse, *gradients


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@SOME
def test_lengths(device, dtype, lengths, is_causal):
    lengths_q, lengths_k = LENGTHS[lengths]
    inputs = padded_inputs(lengths_q, lengths_k, dtype, device)
    check_packed(*inputs, lengths_q, lengths_k, is_causal)
    check_packed(*inputs, lengths_q, lengths_k, is_causal, beyond=3, window_size=(20, 5))


@pytest.mark.parametrize("seed", range(30))
@SOME
def test_everything_together(device, dtype, seed):
    """All but the bias."""
    dice = random.Random(seed)
    batch, heads_kv = dice.randint(1, 5), dice.randint(1, 2)
    lengths_q, lengths_k = ([dice.choice([0, 1, dice.randint(2, 150)]) for _ in range(batch)]
                            for _ in range(2))  # fmt: skip
    heads = heads_kv * dice.choice([1, 3]), heads_kv
    inputs = padded_inputs(lengths_q, lengths_k, dtype, device, heads, dice.choice([5, 32]), seed)
    given, _ = random_options(dice, batch, heads[0], 1, 1, dtype, device)
    for name in ("bias", "seqused_k", "key_start"):
        given.pop(name, None)
    used = lengths_k
    if dice.random() < 0.5:
        used = [dice.randint(0, n) for n in lengths_k]
        given["seqused_k"] = torch.tensor(used, device=device)
    if dice.random() < 0.5:
        given["key_start"] = torch.tensor([dice.randint(0, n) for n in used], device=device)
    if dice.random() < 0.3:
        given["seqused_q"] = torch.tensor([dice.randint(0, n) for n in lengths_q], device=device)
    check_packed(*inputs, lengths_q, lengths_k, dice.random() < 0.4, dice.choice([0, 5]), **given)


@ON_DEVICES
def test_nan_of_neighbours(device):
    """Sequences are as they are alone, whatever is in the others; gradients, too."""
    dtype, lengths = torch.float16, [33, 64, 7]
    skip_unserved(device, {"cu_seqlens_q": lengths})
    packed = [pack(x, lengths) for x in padded_inputs(lengths, lengths, dtype, device)]
    dout, dlse = torch.randn(packed[0].shape).to(packed[0]), torch.randn(4, 104).to(device)

    def results(inputs, dout, dlse, ends):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, lse = flash_cute.forward_varlen(*inputs, ends, is_causal=True)
        gradients = torch.autograd.grad([out, lse], inputs, [dout, dlse])
        return [out, lse.mT, *gradients]

    odd = slice(33, 97)
    broken = [x.clone() for x in (*packed, dout)]
    for x in broken:
        x[odd] = math.nan
    found = results(broken[:3], broken[3], dlse, ends_of(lengths, device))
    for part in (slice(0, 33), slice(97, 104)):
        alone = results(
            [x[part] for x in packed], dout[part], dlse[:, part], ends_of([part.stop - part.start])
            .to(device)
        )  # fmt: skip
        for a, b in zip(found, alone, strict=True):
            torch.testing.assert_close(a[part], b, rtol=0, atol=2e-3)


@ON_DEVICES
def test_packed_is_dense(device):
    """Bit by bit, a sequence as it is in a dense call; hints change nothing, nor do int64 ends."""
    lengths = [33, 64, 0, 7]
    skip_unserved(device, {"cu_seqlens_q": lengths})
    packed = [pack(x, lengths) for x in padded_inputs(lengths, lengths, torch.float16, device)]
    ends = ends_of(lengths, device)
    out, lse = flash_cute.forward_varlen(*packed, ends, is_causal=True)
    for begin, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        alone = [x[begin:end].transpose(0, 1)[None] for x in packed]
        expected = flash_cute.forward(*alone, True)
        torch.testing.assert_close(out[begin:end].transpose(0, 1)[None], expected[0])
        torch.testing.assert_close(lse[None, :, begin:end], expected[1])
    for ends_k in (None, ends, ends.long()):
        for hint in (None, 1, 64, 10**6):
            again = flash_cute.forward_varlen(
                *packed, ends.long(), ends_k, is_causal=True, max_seqlen_q=hint, max_seqlen_k=hint
            )
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)


# --- under torch's transforms ---------------------------------------------------------------------


def packed_call(requires_grad=True):
    """A function of (q, k, v, sink, ends), by both results, and its arguments."""
    q, k, v = (torch.randn(12, heads, 8) for heads in (4, 2, 2))
    inputs = [x.requires_grad_(requires_grad) for x in (q, k, v, torch.randn(4))]

    def loss(q, k, v, sink, ends, most=None):
        out, lse = flash_cute.forward_varlen(
            q, k, v, ends, max_seqlen_q=most, is_causal=True, window_size=(4, 0),
            learnable_sink=sink, softcap=3.0,
        )  # fmt: skip
        return out.sin().sum() + lse.cos().sum()

    return loss, [*inputs, ends_of([5, 0, 7])]


def dense_call(requires_grad=True):
    """The same of (q, k, v, sink, bias, used), dense."""
    q, k, v = random_inputs(2, 4, 7, 8, heads_kv=2, len_k=11)
    inputs = [q, k, v, torch.randn(4), torch.randn(2, 1, 1, 11)]
    slopes = torch.rand(2, 4)

    def loss(q, k, v, sink, bias, used):
        out, lse = flash_cute.forward(
            q, k, v, window_size=(None, 3), softcap=3.0, alibi_slopes=slopes, bias=bias,
            learnable_sink=sink, seqused_k=used, key_start=used // 4,
        )  # fmt: skip
        return out.sin().sum() + lse.cos().sum()

    return loss, [*(x.requires_grad_(requires_grad) for x in inputs), torch.tensor([11, 6])]


CALLS = pytest.mark.parametrize("call", [packed_call, dense_call])


def gradients_of(function, inputs):
    return torch.autograd.grad(function(*inputs), inputs[:-1])


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend, dynamic", [("aot_eager", True), ("inductor", None)])
@CALLS
def test_compiled(call, backend, dynamic):
    torch._dynamo.reset()
    loss, inputs = call()
    compiled = torch.compile(loss, backend=backend, dynamic=dynamic, fullgraph=True)
    assert_close(gradients_of(compiled, inputs), gradients_of(loss, inputs))


def test_hints_may_be_unbacked():
    torch._dynamo.reset()
    loss, inputs = packed_call(requires_grad=False)

    def step(*inputs):
        return loss(*inputs, inputs[-1].diff().max().item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), step(*inputs))


@pytest.mark.parametrize("dynamic", [True, None])
def test_windows_and_lengths_that_change(dynamic):
    """As in training: no graph for each window or each batch."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(
        lambda q, ends, left: flash_cute.forward_varlen(q, q, q, ends, window_size=(left, 0))[0],
        backend=counter, dynamic=dynamic, fullgraph=True,
    )  # fmt: skip
    for step in range(2, 9):
        q, ends = torch.randn(10 + step, 2, 8), ends_of([step, 0, 7])
        expected = flash_cute.forward_varlen(q, q, q, ends, window_size=(step, 0))[0]
        assert torch.equal(function(q, ends, step), expected)
    assert counter.frame_count <= 2


@CALLS
def test_torch_func(call):
    loss, inputs = call()
    expected = gradients_of(loss, inputs)
    inputs = [x.detach() for x in inputs]
    indices = tuple(range(len(inputs) - 1))
    gradient = torch.func.grad(loss, indices)
    assert_close(gradient(*inputs), expected)
    dims = (*(0 for _ in indices), None)
    stacked = [torch.stack([2 * x, x]) for x in inputs[:-1]]
    mapped = torch.vmap(gradient, in_dims=dims)(*stacked, inputs[-1])
    assert_close([x[1] for x in mapped], expected)
    assert_close([x[0] for x in mapped], gradient(*(2 * x for x in inputs[:-1]), inputs[-1]))
    # A sink that all share has a gradient of each.
    shared = torch.vmap(gradient, in_dims=(0, *(None for _ in inputs[1:])))(stacked[0], *inputs[1:])
    assert_close([x[1] for x in shared], expected)


@CALLS
def test_opcheck(call):
    """Of the ops with the arguments of the call."""
    seen = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op in (ops.fwd, ops.bwd):
                detached = [x if x is None else x.detach() for x in args]
                seen.append((op, detached, kwargs or {}))
            return op(*args, **(kwargs or {}))

    loss, inputs = call()
    with Seen():
        gradients_of(loss, inputs)
    assert [op for op, _, _ in seen] == [ops.fwd, ops.bwd]
    for x in seen[0][1]:
        if x is not None and x.is_floating_point():
            x.requires_grad_(x.dim() != 2)  # the slopes have none
    for op, args, keywords in seen:
        torch.library.opcheck(op, args, keywords)


def test_autocast_counts_and_meta():
    loss, inputs = packed_call()
    cast = [x.detach().bfloat16().requires_grad_() for x in inputs[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        result = flash_cute.forward_varlen(*inputs[:3], inputs[-1])
        assert torch.equal(result[0], flash_cute.forward_varlen(*cast, inputs[-1])[0])
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss(*inputs).backward()
    assert counter.get_total_flops() == 3.5 * (4 * 4 * (5 * 5 + 7 * 7) * 8)
    out, lse = flash_cute.forward_varlen(
        *(x.detach().to("meta") for x in (*inputs[:3], inputs[-1]))
    )
    assert out.shape == (12, 4, 8) and lse.shape == (4, 12) and lse.dtype == torch.float32


# --- merge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_sink", [False, True])
@ON_DEVICES
def test_merge_is_attention_over_all_keys(device, has_sink, is_packed):
    """Results and gradients, with parts in which rows see no key, and rows that see none at all."""
    q, k, v = (
        x.requires_grad_()
        for x in random_inputs(
            1, 4, 40, 16, heads_kv=2, len_k=60, dtype=torch.float16, device=device
        )
    )
    sink = torch.randn(4, device=device).requires_grad_() if has_sink else None
    inputs = [q, k, v, *([sink] if has_sink else [])]
    band = functools.partial(reference.attention, q, k, v, window_left=9, window_right=2)
    expected = band(diagonal_offset=-12, learnable_sink=sink)
    parts = []
    for first in (0, 7, 60):
        keys = slice(first, {0: 7, 7: 60, 60: 60}[first])
        out, lse = ops.fwd(
            q, k[:, :, keys], v[:, :, keys],
            window_left=9, window_right=2, diagonal_offset=-12 - first,
        )  # fmt: skip
        parts.append((out[0].transpose(0, 1), lse[0]) if is_packed else (out, lse))
    out, lse = flash_cute.merge(*zip(*parts, strict=True), learnable_sink=sink)
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
        (torch.ones(1, 2, 3, 4), [], TypeError, "outs must be a list"),
        ([torch.ones(2, 3)], [torch.ones(2)], ValueError, r"outs\[0\] has shape \(2, 3\)"),
        ([torch.ones(3, 2, 4)], [torch.ones(3, 2)], ValueError, r"lses\[0\] .*must be \(2, 3\)"),
        (
            [torch.ones(3, 2, 4), torch.ones(3, 2, 4).half()], [torch.ones(2, 3)] * 2,
            TypeError, r"outs\[1\] is torch.float16",
        ),
    ],
)  # fmt: skip
def test_merge_refuses(outs, lses, error, message):
    with pytest.raises(error, match=message):
        flash_cute.merge(outs, lses)
