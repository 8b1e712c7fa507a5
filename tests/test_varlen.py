"""Packed sequences. A packed call is compared with the formula for the same
sequences padded, which knows the lengths."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import support
import torch
from support import (
    DEVICES,
    GPU_KERNELS,
    launched,
    nan_in_new_memory,
    poisoned,
    random_inputs,
)
from test_options import DIFFERENTIABLE, SOME, as_reference, random_options

import flash_cute
from flash_cute import interface, ops, tolerance

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


def padded_inputs(
    lengths_q, lengths_k, dtype, device, heads=(4, 2), head_dim=16, seed=0, head_dim_v=None
):
    return random_inputs(
        *(len(lengths_q), heads[0], max(lengths_q, default=0), head_dim),
        heads_kv=heads[1], len_k=max(lengths_k, default=0), head_dim_v=head_dim_v,
        dtype=dtype, device=device, seed=seed,
    )  # fmt: skip


def check_packed(
    q, k, v, lengths_q, lengths_k, is_causal=False, beyond=0, deterministic=False, **given
):
    """Asserts that results and gradients of padded inputs, packed, are as exact as they must be,
    by the formula; returns those of the packed call, (out, lse, *gradients)."""
    torch.manual_seed(0)
    device = q.device
    ends_q = ends_of(lengths_q, device)
    ends_k = ends_q if lengths_k is lengths_q else ends_of(lengths_k, device)
    packed = [pack(q, lengths_q, beyond), pack(k, lengths_k, beyond), pack(v, lengths_k, beyond)]
    inputs = [x.requires_grad_() for x in packed]
    extra = {n: given[n].detach().requires_grad_() for n in DIFFERENTIABLE if n in given}
    with nan_in_new_memory():
        out, lse = flash_cute.forward_varlen(
            *inputs, ends_q, ends_k, is_causal=is_causal, arch=support.preferred_arch,
            **given | extra,
        )  # fmt: skip
    tokens = sum(lengths_q)
    assert out.shape == (*packed[0].shape[:2], v.shape[3]) and out.dtype == q.dtype
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

    dout, dlse = torch.randn(*q.shape[:3], v.shape[3]).to(q), torch.randn(all_lse.shape).to(lse)
    given_out = pack(dout, lengths_q, beyond)
    given_lse = pack(dlse.masked_fill(all_lse == -math.inf, math.nan)[..., None], lengths_q, beyond)
    inputs += extra.values()
    with nan_in_new_memory(deterministic):
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


@pytest.mark.parametrize("window", [(128, 0), (64, 64), (0, 0), (20, 70)])
@SOME
def test_narrow_windows(device, dtype, window):
    """On Hopper some have kernels of their own, if all sequences have as many queries as keys."""
    lengths = [1, 0, 700, 64, 130, 5]
    for head_dim, heads in ((100, (4, 4)), (64, (4, 4)), (64, (4, 2))):
        inputs = padded_inputs(lengths, lengths, dtype, device, heads, head_dim)
        check_packed(*inputs, lengths, lengths, window_size=window)


def test_one_tensor_of_lengths_stays_one():
    """Kernels tell by its address that queries and keys are alike."""
    for dtype in (torch.int32, torch.int64):
        ends = torch.tensor([0, 3], dtype=dtype)
        for given in ({"cu_seqlens_q": ends}, {"cu_seqlens_q": ends, "cu_seqlens_k": ends}):
            tensors = interface._tensors_of(given)
            assert tensors["cu_seqlens_k"] is tensors["cu_seqlens_q"]


@pytest.mark.parametrize("seed", range(30))
@SOME
def test_everything_together(device, dtype, seed):
    """All but the bias."""
    dice = random.Random(seed)
    batch, heads_kv = dice.randint(1, 5), dice.randint(1, 2)
    lengths_q, lengths_k = ([dice.choice([0, 1, dice.randint(2, 300)]) for _ in range(batch)]
                            for _ in range(2))  # fmt: skip
    heads = heads_kv * dice.choice([1, 3]), heads_kv
    head_dims = dice.choice([5, 32]), seed, dice.choice([None, 3, 40, 128])
    inputs = padded_inputs(lengths_q, lengths_k, dtype, device, heads, *head_dims)
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
    call = dice.random() < 0.4, dice.choice([0, 5]), seed % 3 == 0
    check_packed(*inputs, lengths_q, lengths_k, *call, **given)


@ON_DEVICES
def test_nan_of_neighbours(device):
    """Sequences are as they are alone, whatever is in the others; gradients, too."""
    dtype, lengths = torch.float16, [33, 64, 7]
    packed = [pack(x, lengths) for x in padded_inputs(lengths, lengths, dtype, device)]
    dout, dlse = torch.randn(packed[0].shape).to(packed[0]), torch.randn(4, 104).to(device)

    def results(inputs, dout, softcap):
        inputs = [x.detach().requires_grad_() for x in inputs]
        ends = ends_of(lengths, device)
        out, lse = flash_cute.forward_varlen(
            *inputs, ends, is_causal=True, deterministic=True, softcap=softcap
        )
        return out, lse.mT, *torch.autograd.grad([out, lse], inputs, [dout, dlse])

    odd = slice(33, 97)
    for softcap in (0.0, 5.0):
        changed = [x.clone() for x in (*packed, dout)]
        for x in changed:
            x[odd] = math.nan
        right = results(packed, dout, softcap)
        for a, b in zip(results(changed[:3], changed[3], softcap), right, strict=True):
            assert torch.equal(a[: odd.start], b[: odd.start])
            assert torch.equal(a[odd.stop :], b[odd.stop :]) and torch.all(b.isfinite())


@SOME
def test_nan_of_unused_rows(device, dtype):
    """Within sequences: queries past seqused_q, keys before key_start and past seqused_k."""
    lengths_q, lengths_k = [5, 90, 40, 1], [70, 130, 40, 33]
    q, k, v = padded_inputs(lengths_q, lengths_k, dtype, device)
    start, used, used_q = (
        torch.tensor(x, device=device) for x in ([3, 64, 0, 0], [64, 129, 0, 20], [5, 64, 17, 1])
    )
    keys = torch.arange(k.shape[2], device=device)
    unused = ((keys < start[:, None]) | (keys >= used[:, None]))[:, None, :, None]
    rows = (torch.arange(q.shape[2], device=device) >= used_q[:, None])[:, None, :, None]
    given = {"seqused_q": used_q, "seqused_k": used, "key_start": start, "is_causal": True}
    out, _, dq, dk, dv = check_packed(
        q.masked_fill(rows, math.nan), *(x.masked_fill(unused, math.nan) for x in (k, v)),
        lengths_q, lengths_k, **given,
    )  # fmt: skip
    for x in (out, dq):
        assert torch.all(pad(x, lengths_q, q.shape[2]) * rows == 0)
    for x in (dk, dv):
        assert torch.all(pad(x, lengths_k, k.shape[2]) * unused == 0)


@pytest.mark.parametrize("given", [{}, {"window_size": (20, 5)}, {"learnable_sink": True}], ids=str)
@SOME
def test_softcap_backward(device, dtype, given):
    """Of scores that it bends. Peers had these gradients wrong, of packed sequences alone."""
    lengths_q, lengths_k = [40, 0, 90, 1], [33, 5, 140, 64]
    q, k, v = padded_inputs(lengths_q, lengths_k, dtype, device)
    if given.get("learnable_sink"):
        given = {"learnable_sink": torch.randn(4).to(q)}
    check_packed(4 * q, k, v, lengths_q, lengths_k, True, softcap=2.0, **given)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window_size": (30, 0)}], ids=str)
@SOME
def test_neighbours_change_no_bit(device, dtype, options):
    """A sequence beside others of other values and lengths, where sizes are the same."""
    n, tokens = 77, 400
    torch.manual_seed(0)
    first = [torch.randn(n, heads, 16).to(device, dtype) for heads in (4, 2, 2, 4)]
    expected = None
    for lengths in ([n, 300, 23], [n, 0, 323], [n, 1, 2]):
        tensors = [torch.cat([x, torch.randn(tokens - n, *x.shape[1:]).to(x)]) for x in first]
        *inputs, dout = tensors
        inputs = [x.requires_grad_() for x in inputs]
        out, lse = flash_cute.forward_varlen(
            *inputs, ends_of(lengths, device), is_causal=True, deterministic=True,
            arch=support.preferred_arch, **options,
        )  # fmt: skip
        gradients = torch.autograd.grad([out, lse], inputs, [dout, torch.ones_like(lse)])
        results = [x[:n].detach() for x in (out, lse.mT, *gradients)]
        expected = expected or results
        assert all(map(torch.equal, results, expected))


@pytest.mark.gpu
def test_nothing_synchronises():
    """Lengths stay on the device, forward and backward."""
    q, k, v = (torch.randn(104, 4, 16, device="cuda").half().requires_grad_() for _ in range(3))
    given = {"cu_seqlens_q": ends_of([33, 64, 7], "cuda"), "cu_seqlens_k": None}
    given["seqused_k"] = torch.tensor([30, 64, 0], device="cuda", dtype=torch.int32)
    given["key_start"] = torch.tensor([3, 0, 0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = flash_cute.forward_varlen(q, k, v, **given, is_causal=True)
        torch.autograd.grad([out, lse], [q, k, v], [out.detach(), torch.zeros_like(lse)])
    finally:
        torch.cuda.set_sync_debug_mode("default")


#: Lengths of three sequences of at most 400 tokens together: even, one long, short ones. With 20
#: times as many tokens Hopper's forward has a list of tiles, too.
REPLAYED = ([100, 150, 150], [400, 0, 0], [1, 1, 398], [0, 33, 7], [0, 0, 0])


@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("mode", ["forward", "training", "deterministic training"])
@GPU_KERNELS
@pytest.mark.gpu
def test_cuda_graph_with_other_lengths(kernels, mode, times):
    """Captured once; replays find lengths, queries in use and values as they then are."""
    replayed = [[times * n for n in lengths] for lengths in REPLAYED]
    is_training, deterministic = mode != "forward", "deterministic" in mode
    dtype = torch.bfloat16
    q, k, v, dout = (torch.randn(400 * times, heads, 64, device="cuda", dtype=dtype)
                     for heads in (4, 2, 2, 4))  # fmt: skip
    inputs = [x.requires_grad_(is_training) for x in (q, k, v)]
    ends, used = ends_of(replayed[0], "cuda"), torch.zeros(3, device="cuda", dtype=torch.int32)

    def step():
        out, lse = flash_cute.forward_varlen(
            *inputs, ends, seqused_q=used, is_causal=True, deterministic=deterministic,
            arch=support.preferred_arch,
        )  # fmt: skip
        if not is_training:
            return out, lse
        given = dout, torch.zeros_like(lse)
        dq, dk, dv = torch.autograd.grad([out, lse], inputs, given)
        return out.detach(), lse.detach(), dk, dv, dq

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    if times > 1:
        assert any("BlocksKernel" in name for name in launched(step))
    for lengths in (*replayed[1:], replayed[0]):
        ends.copy_(ends_of(lengths))
        used.copy_(torch.tensor([max(0, n - 1) for n in lengths]))
        with torch.no_grad():
            for x in (*inputs, dout):
                x.normal_()
        with nan_in_new_memory():
            expected = step()
        for x in captured:
            x.fill_(math.nan)
        graph.replay()
        same = captured[:4] if mode == "training" else captured
        assert all(map(torch.equal, same, expected)), lengths
        torch.testing.assert_close(captured, expected, rtol=2e-2, atol=2e-2)
        assert all(x[sum(lengths) :].eq(0).all() for x in (captured[0], *captured[2:]))


@ON_DEVICES
def test_packed_is_dense(device):
    """Bit by bit, a sequence as it is in a dense call; hints change nothing, nor do int64 ends."""
    lengths = [33, 64, 0, 7]
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
    q, k, v = (torch.randn(shape) for shape in ((12, 4, 8), (12, 2, 8), (12, 2, 5)))
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
    q, k, v = random_inputs(2, 4, 7, 8, heads_kv=2, len_k=11, head_dim_v=5)
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
    # What all share has a gradient of each.
    shared = torch.vmap(gradient, in_dims=(0, *(None for _ in inputs[1:])))(stacked[0], *inputs[1:])
    assert_close([x[1] for x in shared], expected)
    nothing = torch.vmap(gradient, in_dims=dims)(*(x[:0] for x in stacked), inputs[-1])
    assert [x.shape for x in nothing] == [x[:0].shape for x in stacked]


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
    assert counter.get_total_flops() == 2 * 4 * (5 * 5 + 7 * 7) * (4 * 8 + 3 * 5)
    out, lse = flash_cute.forward_varlen(
        *(x.detach().to("meta") for x in (*inputs[:3], inputs[-1]))
    )
    assert out.shape == (12, 4, 5) and lse.shape == (4, 12) and lse.dtype == torch.float32
