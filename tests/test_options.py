"""`forward` with windows, changed scores, sinks and lengths: against the formula by the one rule of
tolerance, forward and gradients. And what it refuses of them."""

from __future__ import annotations

import itertools
import math
import random
import sys

import pytest
import support
import torch
from support import (
    ALL_KERNELS,
    BACKENDS,
    DEVICES,
    nan_in_new_memory,
    poisoned,
    random_inputs,
    serves_large_head_dims,
)

import flash_cute
from flash_cute import memory, options, tolerance

F64 = torch.float64
#: Not in fp64: there the exact result is no more exact than the one that it is to judge.
SOME = pytest.mark.parametrize(
    "device, dtype", [p for p in (*BACKENDS, ALL_KERNELS[-1]) if F64 not in p.values]
)
ON_DEVICES = pytest.mark.parametrize("device", DEVICES)
DIFFERENTIABLE = "learnable_sink", "bias"


def random_options(dice, batch, heads, len_q, len_k, dtype, device):
    """Some of everything that a dense call takes, (arguments of `forward`, of the reference)."""

    def draw(*sizes):
        generator = torch.Generator().manual_seed(dice.randrange(2**30))
        return torch.randn(sizes, generator=generator).to(device)

    given = {}
    if dice.random() < 0.5:
        given["window_size"] = dice.choice([None, -1, 0, 5, 60]), dice.choice([None, 0, 9, 70])
    if dice.random() < 0.4:
        given["softcap"] = dice.choice([1.0, 5, 30.0])
    if dice.random() < 0.4:
        given["alibi_slopes"] = draw(*dice.choice([(heads,), (batch, heads)])).abs() / 8
    if dice.random() < 0.4:
        sizes = [dice.choice([1, n]) for n in (batch, heads, len_q, len_k)]
        bias = draw(*sizes).to(dice.choice([dtype, torch.float32]))
        given["bias"] = bias.masked_fill(bias > 1.5, -math.inf)
    if dice.random() < 0.5:
        given["learnable_sink"] = draw(heads).to(dice.choice([dtype, torch.float32]))
    used = [dice.randint(0, len_k) for _ in range(batch)]
    if dice.random() < 0.5:
        given["seqused_k"] = torch.tensor(used, device=device)
    else:
        used = [len_k] * batch
    if dice.random() < 0.5:
        starts = [dice.randint(0, n) for n in used]
        given["key_start"] = torch.tensor(starts, device=device, dtype=torch.int32)
    return given, as_reference(given)


def as_reference(given):
    """Arguments of `forward` as the reference and the tolerance take them."""
    given = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    sides = given.pop("window_size", (-1, -1))
    left, right = (-1 if side is None else side for side in sides)
    return {**given, "window_left": left, "window_right": right}


def check_options(q, k, v, is_causal=False, deterministic=False, **given):
    """Asserts that results and gradients are as exact as they must be; returns all of them."""
    torch.manual_seed(0)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    extra = {n: given[n].detach().requires_grad_() for n in DIFFERENTIABLE if n in given}
    with nan_in_new_memory():
        out, lse = flash_cute.forward(
            *inputs, is_causal, **given | extra, arch=support.preferred_arch
        )
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.is_contiguous()
    formula = as_reference(given)
    result = tolerance.compare(out.detach(), lse.detach(), q, k, v, is_causal, **formula)
    assert result.passed, str(result)
    dout, dlse = poisoned(torch.randn(out.shape).to(q)), torch.randn(lse.shape).to(lse)
    dlse = dlse.masked_fill(lse == -math.inf, math.nan)
    inputs += extra.values()
    with nan_in_new_memory(deterministic):
        gradients = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    for x, dx in zip(inputs, gradients, strict=True):
        assert dx.shape == x.shape and dx.dtype == x.dtype
    result = tolerance.compare_gradients(gradients, dout, q, k, v, is_causal, dlse=dlse, **formula)
    assert result.passed, str(result)
    return out, lse, *gradients


@pytest.mark.parametrize("seed", range(40))
@SOME
def test_everything_together(device, dtype, seed):
    dice = random.Random(seed)
    heads_kv, group = dice.randint(1, 2), dice.choice([1, 3])
    sizes = dice.randint(1, 3), heads_kv * group, dice.randint(1, 300)
    len_k, head_dim = dice.randint(0, 300), dice.choice([5, 16, 64])
    head_dim_v = dice.choice([head_dim, 7, 24, 128])
    qkv = random_inputs(
        *(*sizes, head_dim), heads_kv=heads_kv, len_k=len_k, head_dim_v=head_dim_v,
        dtype=dtype, device=device, seed=seed,
    )  # fmt: skip
    given, _ = random_options(dice, *sizes, len_k, dtype, device)
    check_options(*map(poisoned, qkv), dice.random() < 0.4, seed % 3 == 0, **given)


@pytest.mark.parametrize("window", [(0, 0), (63, 0), (64, 64), (None, 5), (5, -1), (400, 400)])
@pytest.mark.parametrize("len_q, len_k", [(129, 129), (65, 200), (200, 65)])
@SOME
def test_windows(device, dtype, window, len_q, len_k):
    inputs = random_inputs(1, 4, len_q, 32, heads_kv=2, len_k=len_k, dtype=dtype, device=device)
    for is_causal in (False, True):
        check_options(*inputs, is_causal, window_size=window)


@ON_DEVICES
def test_what_a_window_sees(device):
    """(W - 1, 0) sees W keys; a causal mask wins over the right side."""
    v = torch.eye(8, device=device, dtype=torch.float16).expand(1, 1, 8, 8)
    zeros = torch.zeros_like(v)
    out = flash_cute.forward(zeros, zeros, v, window_size=(2, 1))[0][0, 0]
    rows, keys = torch.arange(8)[:, None], torch.arange(8)
    seen = (keys >= rows - 2) & (keys <= rows + 1)
    assert torch.equal(out.cpu() > 0, seen)
    causal = flash_cute.forward(zeros, zeros, v, True, window_size=(2, 1))[0][0, 0]
    assert torch.equal(causal.cpu() > 0, seen & (keys <= rows))
    for all_keys in ((-1, -1), (None, None), [-1, None], (7, 7)):
        for a, b in zip(
            flash_cute.forward(zeros, zeros, v, window_size=all_keys),
            flash_cute.forward(zeros, zeros, v),
            strict=True,
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(16, 16), (192, 128), (200, 130), (320, 320), (1000, 512)]
)
@pytest.mark.parametrize("names", ["bhqk", "hk", "bq", ""])
@SOME
def test_bias_and_its_gradient(device, dtype, names, head_dim, head_dim_v):
    """A sum over what the bias is expanded over, to which keys of no sequence add nothing."""
    if head_dim > 256 and not serves_large_head_dims(device, dtype):
        pytest.skip("fp32 on GPUs has head dims up to 256")
    qkv = random_inputs(
        *(2, 4, 70, head_dim), heads_kv=2, len_k=150, head_dim_v=head_dim_v, dtype=dtype,
        device=device,
    )  # fmt: skip
    sizes = {"b": 2, "h": 4, "q": 70, "k": 150}
    bias = torch.randn([n if name in names else 1 for name, n in sizes.items()]).to(qkv[0])
    check_options(*qkv, True, bias=bias)
    ends = {"seqused_k": [150, 1], "key_start": [70, 0]}
    given = {n: torch.tensor(x, device=device, dtype=torch.int32) for n, x in ends.items()}
    bias = bias.float().expand(2, 4, 70, 150) if names == "hk" else bias
    check_options(*map(poisoned, qkv), softcap=2.0, bias=bias, **given)


@ON_DEVICES
def test_rows_without_keys(device):
    """By each way in which a row can lose all of them: out 0, and the sink, if there is one."""
    q, k, v = random_inputs(2, 2, 5, 16, len_k=7, dtype=torch.float16, device=device)
    sink = torch.tensor([0.5, -math.inf], device=device)
    zero, seven = (torch.full((2,), n, device=device, dtype=torch.int32) for n in (0, 7))
    for empty in (
        {"seqused_k": zero},
        {"key_start": seven},
        {"bias": torch.full((1, 1, 1, 7), -math.inf, device=device)},
        {"window_size": (None, 0), "seqused_k": zero + 1, "key_start": zero + 1},
    ):
        out, lse, *_ = check_options(q, k, v, **empty)
        assert torch.all(out == 0) and torch.all(lse == -math.inf)
        out, lse, *gradients = check_options(q, k, v, learnable_sink=sink, **empty)
        assert torch.all(out == 0) and torch.equal(lse[0, :, 0], sink)
        assert gradients[3][1] == 0


@ON_DEVICES
def test_sinks_of_any_size(device):
    q, k, v = random_inputs(1, 3, 33, 16, dtype=torch.float16, device=device)
    out, lse, *_ = check_options(
        q, k, v, learnable_sink=torch.tensor([-1e4, 0.0, 1e4]).to(q.device)
    )
    plain = flash_cute.forward(q, k, v)
    assert torch.equal(out[:, 0], plain[0][:, 0]) and torch.equal(lse[:, 0], plain[1][:, 0])
    assert torch.all(out[:, 2] == 0) and torch.all(lse[:, 2] == 1e4)


@SOME
def test_nan_outside_of_the_lengths(device, dtype):
    """As in a static cache: it reaches neither results nor gradients, and those there are 0."""
    q, k, v = random_inputs(3, 4, 33, 16, heads_kv=2, len_k=90, dtype=dtype, device=device)
    start, used = (torch.tensor(x, device=device) for x in ([0, 20, 70], [90, 55, 70]))
    keys = torch.arange(90, device=device)
    unused = ((keys < start[:, None]) | (keys >= used[:, None]))[:, None, :, None]
    k, v = k.masked_fill(unused, math.nan), v.masked_fill(unused, math.nan)
    bias = torch.randn(3, 1, 1, 90, device=device).masked_fill(unused.mT, math.nan)
    for given in ({}, {"bias": bias, "softcap": 3.0}, {"window_size": (9, 9)}):
        _, _, _, dk, dv, *_ = check_options(q, k, v, key_start=start, seqused_k=used, **given)
        assert torch.all((dk * unused == 0) & (dv * unused == 0))


def test_gradcheck():
    q, k, v = random_inputs(2, 4, 5, 3, heads_kv=2, len_k=7, head_dim_v=2, dtype=F64)
    sink, bias = torch.randn(4, dtype=F64), torch.randn(1, 4, 1, 7, dtype=F64)
    slopes, used = torch.rand(4), torch.tensor([7, 4], dtype=torch.int32)
    inputs = [x.requires_grad_() for x in (q, k, v, sink, bias)]

    def dense(q, k, v, sink, bias):
        return flash_cute.forward(
            q, k, v, True, window_size=(3, 0), softcap=1.5, alibi_slopes=slopes, bias=bias,
            learnable_sink=sink, seqused_k=used, key_start=used // 4 - 1,
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(dense, inputs)
    shapes = (9, 4, 3), (9, 2, 3), (9, 2, 5)
    q, k, v = (torch.randn(shape, dtype=F64).requires_grad_() for shape in shapes)
    ends = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda q, k, v, sink: flash_cute.forward_varlen(
            q, k, v, ends, is_causal=True, softcap=1.5, learnable_sink=sink
        )[0],
        (q, k, v, sink),
    )


def test_out_is_written():
    q, k, v = random_inputs(2, 4, 5, 16, head_dim_v=24)
    out = poisoned(v[:, :, :5].clone(), "bnhd")
    result, lse = flash_cute.forward(q, k, v, out=out)
    assert result is out and torch.equal(out, flash_cute.forward(q, k, v)[0])
    assert torch.equal(lse, flash_cute.forward(q, k, v)[1])
    with torch.no_grad():
        assert flash_cute.forward(q.requires_grad_(), k, v, out=out)[0] is out
    with pytest.raises(ValueError, match=r"out is given and q requires a gradient: .*no_grad"):
        flash_cute.forward(q, k, v, out=out)


def elements_of(x):
    """Their places in the storage."""
    size = x.untyped_storage().size() // x.element_size()
    return torch.arange(size).as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()


def test_what_shares_memory():
    """Exact of slices; of what else as_strided makes, nothing is missed."""
    dice, found = random.Random(0), [0, 0]
    base = torch.empty(3, 4, 5, 6)
    for _ in range(3000):
        slices = []
        for _ in range(2):
            ends = (sorted(dice.sample(range(n + 1), 2)) for n in base.shape)
            x = base[tuple(slice(*pair) for pair in ends)]
            slices.append(x.permute(dice.sample(range(4), 4)))
        is_shared = not set(elements_of(slices[0])).isdisjoint(elements_of(slices[1]))
        assert memory.overlap(*slices) == is_shared and not memory.overlaps_itself(slices[0])
        found[is_shared] += 1
        sizes = [dice.randint(0, 4) for _ in range(3)]
        strided = [base.as_strided(sizes, [dice.randint(0, 20) for _ in sizes]) for _ in range(2)]
        places = [elements_of(x) for x in strided]
        assert memory.overlap(*strided) or set(places[0]).isdisjoint(places[1])
        assert memory.overlaps_itself(strided[0]) or len(set(places[0])) == len(places[0])
    assert min(found) > 500
    assert not memory.overlap(base, torch.empty_like(base))


def test_out_beside_its_inputs():
    """It may be q, and lie beside q, k and v in one tensor."""
    fused = torch.randn(2, 5, 4, 3, 16)
    q, k, v, out = (x.transpose(1, 2) for x in fused.unbind(2))
    expected = flash_cute.forward(q, k, v)[0]
    for target in (out, q):
        flash_cute.forward(q, k, v, out=target)
        assert torch.equal(target, expected)


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


SHARED = torch.zeros(2, 6, 8, 16)
REFUSALS = {
    "window no pair": ({"window_size": 5}, TypeError, r"window_size is an int \(5\): .* pair"),
    "window of one": ({"window_size": (5,)}, TypeError, "window_size is a tuple .* pair"),
    "window -2": ({"window_size": (-2, 0)}, ValueError, r"window_size is .*\(-2, 0\).* 0 or more"),
    "window 1.0": ({"window_size": (1.0, 0)}, TypeError, "window_size is .* an int, or None"),
    "window of tensors": (
        {"window_size": (torch.ones(3), -1)}, TypeError, "window_size is .* an int, or None"
    ),
    "softcap -1": ({"softcap": -1.0}, ValueError, r"softcap is a float \(-1.0\): .* or more"),
    "softcap 1e39": ({"softcap": 1e39}, ValueError, "softcap is .* finite in float32"),
    "softcap 10**400": ({"softcap": 10**400}, ValueError, "softcap is .* finite in float32"),
    "softcap 1e-40": ({"softcap": 1e-40}, ValueError, "softcap is .* finite in float32"),
    "softcap NaN": ({"softcap": math.nan}, ValueError, "softcap is .* finite"),
    "softcap text": ({"softcap": "1"}, TypeError, "softcap is a str .* a float"),
    "slopes of fp16": (
        {"alibi_slopes": torch.ones(4).half()}, TypeError, "alibi_slopes is float16: .* float32"
    ),
    "slopes of keys": (
        {"alibi_slopes": torch.ones(2)}, ValueError, r"alibi_slopes has shape \(2,\): .*\(4,\) or"
    ),
    "slopes' gradient": (
        {"alibi_slopes": torch.ones(4).requires_grad_()}, ValueError, "alibi_slopes requires a grad"
    ),
    "bias no tensor": ({"bias": 1.0}, TypeError, "bias is a float: .* torch.Tensor or None"),
    "bias of 2 dims": ({"bias": torch.ones(8, 8)}, ValueError, r"bias has shape \(8, 8\): .* \(2,"),
    "bias too long": ({"bias": torch.ones(1, 1, 8, 9)}, ValueError, "bias has shape"),
    "bias of fp64": (
        {"bias": torch.ones(1, 1, 1, 8).double()}, TypeError, "bias is float64: .* float32"
    ),
    "bias elsewhere": (
        {"bias": torch.ones(1, 1, 1, 8, device="meta")}, ValueError, "bias is on meta and q on cpu"
    ),
    "sinks of keys": (
        {"learnable_sink": torch.ones(2)}, ValueError, r"learnable_sink has shape \(2,\): .*\(4,\)"
    ),
    "sinks of ints": ({"learnable_sink": ints(1, 2, 3, 4)}, TypeError, "learnable_sink is int32"),
    "used of 3": ({"seqused_k": ints(1, 2, 3)}, ValueError, r"seqused_k has shape \(3,\): .*2,"),
    "used of floats": ({"seqused_k": torch.ones(2)}, TypeError, "seqused_k is float32: .* int32"),
    "start a list": ({"key_start": [0, 1]}, TypeError, "key_start is a list: .* torch.Tensor"),
    "out's shape": ({"out": torch.empty(2, 4, 8, 8)}, ValueError, r"out has shape \(2, 4, 8, 8\)"),
    "out's head dim": (
        {"out": torch.empty(2, 4, 8, 16), "v": torch.empty(2, 2, 8, 24)}, ValueError,
        r"out has shape .* must be \(2, 4, 8, 24\): .* v's head dim",
    ),
    "sparse bias": (
        {"bias": torch.ones(1, 1, 8, 8).to_sparse()}, TypeError, "bias is a sparse_coo tensor"
    ),
    "expanded out": (
        {"out": torch.empty(1, 1, 8, 16).expand(2, 4, 8, 16)}, ValueError, "out has strides"
    ),
    "out of overlapping rows": (
        {"out": torch.empty(1200).as_strided((2, 4, 8, 16), (512, 128, 15, 1))}, ValueError,
        r"out has strides \(512, 128, 15, 1\): its elements must not overlap",
    ),
    "out on v": (
        {"v": SHARED[:, :2], "out": SHARED[:, 1:5]}, ValueError, "out shares memory with v: .* not"
    ),
    "out on a bias": (
        {"bias": SHARED[:, :4, :, :8], "out": torch.nn.Parameter(SHARED[:, :4], False)}, ValueError,
        "out shares memory with bias",
    ),
    "out on rows of q": (
        {"q": SHARED[:, :4], "out": SHARED[:, 1:5]}, ValueError, "out shares memory with q"
    ),
    "out's dtype": ({"out": torch.empty(2, 4, 8, 16).half()}, TypeError, "out is float16 and q is"),
    "out elsewhere": (
        {"out": torch.empty(2, 4, 8, 16, device="meta")}, ValueError, "out is on meta and q on cpu"
    ),
}  # fmt: skip
REFUSALS_OF_PACKED = {
    "out on k": (
        {"k": SHARED[0, 3:5].transpose(0, 1), "out": SHARED[0, :4].transpose(0, 1)}, ValueError,
        "out shares memory with k",
    ),
    "no ends": ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q is a NoneType: .* torch.Tensor"),
    "ends of floats": (
        {"cu_seqlens_q": torch.ones(3)}, TypeError, "cu_seqlens_q is float32: .* int32"
    ),
    "ends of 2 dims": (
        {"cu_seqlens_q": ints([0, 8])}, ValueError, r"cu_seqlens_q has shape \(1, 2\): .*sequences"
    ),
    "ends of k": ({"cu_seqlens_k": ints(0, 8)}, ValueError, r"cu_seqlens_k has shape \(2,\)"),
    "bias": (
        {"bias": torch.ones(1, 1, 1, 1)}, ValueError, "bias is given with cu_seqlens_q: packed"
    ),
    "dense q": ({"q": torch.ones(2, 4, 8, 16)}, ValueError, "q has shape .* 3 dimensions"),
    "k longer": (
        {n: torch.ones(9, 2, 16) for n in "kv"}, ValueError, "k has 9 tokens, q has 8 and cu_seql"
    ),
    "used": ({"seqused_q": ints(1)}, ValueError, r"seqused_q has shape \(1,\): .*\(2,\)"),
    "slopes": ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"alibi_slopes has shape \(3, 4\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*REFUSALS, *REFUSALS_OF_PACKED])
def test_refusals(case):
    is_packed = case not in REFUSALS
    changes, error, message = (REFUSALS_OF_PACKED if is_packed else REFUSALS)[case]
    q, k, v = random_inputs(2, 4, 8, 16, heads_kv=2)
    arguments = {"q": q, "k": k, "v": v}
    if is_packed:
        arguments = {n: x[0].transpose(0, 1) for n, x in arguments.items()}
        arguments["cu_seqlens_q"] = ints(0, 3, 8)
    function = flash_cute.forward_varlen if is_packed else flash_cute.forward
    with pytest.raises(error, match=message) as raised:
        function(**arguments | changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cu_seqlens_q": ints(1, 8)}, r"cu_seqlens_q\[0\] is 1: it must be 0"),
        ({"cu_seqlens_q": ints(0, 5, 4, 8)}, r"cu_seqlens_q\[2\] is 4, after 5"),
        ({"cu_seqlens_q": ints(0, 7)}, r"cu_seqlens_q\[1\], the last, is 7 and q has 8 tokens"),
        ({"cu_seqlens_q": ints(0, 9)}, r"cu_seqlens_q\[1\], the last, is 9 and q has 8 tokens"),
        ({"seqused_q": ints(5, 4)}, r"seqused_q\[0\] is 5: it must be 0 to 3"),
        ({"seqused_k": ints(3, -1)}, r"seqused_k\[1\] is -1: it must be 0 to 5"),
        ({"seqused_k": ints(3, 2), "key_start": ints(3, 3)}, r"key_start\[1\] is 3: .* 0 to 2"),
    ],
)
@ON_DEVICES
def test_values_are_checked_on_demand(device, monkeypatch, changes, message):
    q, k, v = (x[0].transpose(0, 1) for x in random_inputs(1, 2, 8, 16, dtype=torch.float16))
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": ints(0, 3, 8)} | changes
    arguments = {name: x.to(device) for name, x in arguments.items()}
    flash_cute.forward_varlen(**arguments)  # without it, nothing is said, and nothing read beyond
    monkeypatch.setenv("FLASH_CUTE_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        flash_cute.forward_varlen(**arguments)
    assert options.looks_at_values()


class Subclass(torch.Tensor):
    """Of which nobody knows whether it has values."""


def test_looking_at_values_that_are_not_there(monkeypatch):
    """Of int64 the upper half counts; batched and meta tensors and subclasses have none to look at.
    What goes beside them is looked at."""
    monkeypatch.setenv("FLASH_CUTE_CHECK", "1")
    q = torch.randn(2, 1, 4, 8)

    def of(x, used, **more):
        return flash_cute.forward(x, x, x, seqused_k=used, **more)[0]

    with pytest.raises(ValueError, match=r"seqused_k\[0\] is 4294967297: it must be 0 to 4"):
        of(q, torch.tensor([2**32 + 1, 2]))
    wrong, sink = torch.tensor([5, 2]), torch.nn.Parameter(torch.zeros(1))
    for call in (
        lambda: of(q, wrong, learnable_sink=sink),
        lambda: torch.func.grad(lambda x: of(x, wrong).sum())(q),
        lambda: torch.vmap(lambda x: of(x, wrong))(q[None]),
        lambda: of(q, wrong, key_start=torch.zeros(2).int().as_subclass(Subclass)),
    ):
        with pytest.raises(ValueError, match=r"seqused_k\[0\] is 5: it must be 0 to 4"):
            call()
    used = torch.tensor([[3, 4], [1, 2]]).int()
    batched = torch.vmap(of, in_dims=(None, 0))(q, used)
    torch.testing.assert_close(batched, torch.stack([of(q, row) for row in used]))
    assert of(q.to("meta"), used[0].to("meta")).shape == q.shape


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9, 1e9])
def test_scores_of_any_size_have_weights_that_sum_to_one(value):
    """As rows have that an additive mask leaves nothing of."""
    q, v = torch.zeros(1, 2, 3, 8), torch.ones(1, 2, 5, 8)
    out = flash_cute.forward(q, v, v, bias=torch.full((1, 1, 3, 5), value))[0]
    torch.testing.assert_close(out, torch.ones_like(q))


@pytest.mark.parametrize("side", [2**31, sys.maxsize, 2**63, 2**70])
def test_windows_beyond_all_keys(side):
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 6, 8)
    for window, same in (((side, side), (-1, -1)), ((side, 0), (-1, 0)), ((0, side), (0, -1))):
        results = [flash_cute.forward(q, k, k, window_size=x) for x in (window, same)]
        torch.testing.assert_close(*results, rtol=0, atol=0)


def test_slopes_of_no_heads():
    empty = torch.randn(2, 0, 3, 8)
    for slopes in (torch.ones(0), torch.ones(2, 0)):
        out, lse = flash_cute.forward(empty, empty, empty, alibi_slopes=slopes)
        assert out.shape == empty.shape and lse.shape == (2, 0, 3)


def test_reference_masks_are_intervals():
    """`visible_mask`, which knows lengths, and `visible_keys`, which the kernels have."""
    reference = flash_cute.reference
    for left, right, offset in itertools.product((-1, 0, 3, 40), (-1, 0, 5), (-30, 0, 7)):
        begin, end = reference.visible_keys(torch.arange(17), 45, left, right, offset)
        keys = torch.arange(45)
        expected = (begin[:, None] <= keys) & (keys < end[:, None])
        assert torch.equal(reference.visible_mask(17, 45, left, right, offset), expected)
