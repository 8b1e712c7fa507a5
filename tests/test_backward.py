"""The gradients of `forward` and its op against the plain formula in fp64, by the one tolerance
rule; test_autograd.py has torch's transforms of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support import (
    ALL_KERNELS,
    BACKENDS,
    BANDS,
    HEAD_DIM_PAIRS,
    LAYOUTS,
    LENGTHS,
    ONE_KERNEL_EACH,
    check_gradients,
    nan_in_new_memory,
    poisoned,
    random_call,
    random_inputs,
    rising_inputs,
    run,
    serves_large_head_dims,
    tuning_of,
)

import flash_cute
from flash_cute import ops, reference, tolerance

F64 = torch.float64
BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
ALL = pytest.mark.parametrize("device, dtype", ALL_KERNELS)
SOME = pytest.mark.parametrize("device, dtype", [*ONE_KERNEL_EACH, BACKENDS[3]])


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", [1, 3, 20, 64, 100, 200, 256])
@ALL
def test_head_dims_and_dtypes(device, dtype, head_dim, is_causal):
    for len_k in (63, 193):  # one key block, and several
        sizes = {"heads_kv": 2, "len_k": len_k, "dtype": dtype, "device": device}
        check_gradients(*map(poisoned, random_inputs(2, 4, 65, head_dim, **sizes)), is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim, head_dim_v", HEAD_DIM_PAIRS)
@SOME
def test_head_dims_of_v(device, dtype, head_dim, head_dim_v, is_causal):
    sizes = {"heads_kv": 2, "len_k": 193, "head_dim_v": head_dim_v}
    for len_q in (65, 300):
        q, k, v = random_inputs(2, 4, len_q, head_dim, **sizes, dtype=dtype, device=device)
        check_gradients(*map(poisoned, (q, k, v)), is_causal)
        check_gradients(q, k, k[..., :head_dim_v], is_causal, head_splits=2)


@BOTH_MASKS
@ALL
def test_large_head_dims(device, dtype, is_causal):
    if not serves_large_head_dims(device, dtype):
        pytest.skip("refused (test_compile.py)")
    for head_dim, head_dim_v in ((257, 257), (500, 64), (1024, 1024), (64, 320)):
        sizes = {"heads_kv": 2, "len_k": 193, "head_dim_v": head_dim_v}
        inputs = random_inputs(1, 4, 165, head_dim, **sizes, dtype=dtype, device=device)
        check_gradients(*map(poisoned, inputs), is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("len_q, len_k", [*LENGTHS, (0, 5), (5, 0), (300, 300)])
@SOME
def test_lengths(device, dtype, len_q, len_k, is_causal):
    """Those longer than keys are rows without any, under the causal mask: their dlse is NaN."""
    inputs = random_inputs(1, 2, len_q, 32, len_k=len_k, dtype=dtype, device=device)
    check_gradients(*map(poisoned, inputs), is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("heads_q, heads_kv", [(6, 6), (6, 2), (14, 2), (5, 1), (1, 1), (0, 0)])
@SOME
def test_grouped_heads(device, dtype, heads_q, heads_kv, is_causal):
    sizes = {"len_k": 200, "dtype": dtype, "device": device}
    q, k, _ = random_inputs(2, max(1, heads_q), 40, 20, heads_kv=max(1, heads_kv), **sizes)
    check_gradients(q[:, :heads_q], k[:, :heads_kv], k[:, :heads_kv], is_causal)


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 4.0])
@pytest.mark.parametrize("len_q, len_k", [(70, 70), (33, 260)])
@SOME
def test_windows_and_scales(device, dtype, len_q, len_k, scale):
    inputs = random_inputs(1, 4, len_q, 16, heads_kv=2, len_k=len_k, dtype=dtype, device=device)
    for left, right, offset in BANDS:
        band = {"window_left": left, "window_right": right, "diagonal_offset": offset}
        check_gradients(*inputs, softmax_scale=scale, **band)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e25])
@ALL
def test_extreme_scales(device, dtype, scale):
    q, k, v = random_inputs(1, 2, 33, 16, dtype=dtype, device=device)
    if scale == 1e25:
        q, k = (x * 2.0**-40 for x in (q, k)) if dtype != torch.float16 else (q * 0, k * 0)
    gradients = check_gradients(q, k, v, True, scale)
    assert all(dx.isfinite().all() for dx in gradients)


@pytest.mark.parametrize(
    "len_q, len_k",
    [(n, n) for n in (1, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193)] + [(70, 1)],
)
@SOME
def test_very_negative_scores(device, dtype, len_q, len_k):
    """LSE below -89, where e^-LSE is infinite: a key past the last must not count as a score 0."""
    q, k, v = rising_inputs(1, 2, len_q, 64, len_k=len_k, dtype=dtype, device=device)
    q, k = 3 * q, 30 * k
    assert flash_cute.forward(q, k, v)[1].max() < -89
    for is_causal in (False, True):
        if dtype == torch.float32 and device == "cuda":
            # Products of TF32 make larger errors of such scores than the formula in fp32.
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out = flash_cute.forward(*inputs, is_causal)[0]
            gradients = torch.autograd.grad(out.sum(), inputs)
        else:
            gradients = check_gradients(q, k, v, is_causal)
        assert all(dx.isfinite().all() for dx in gradients)


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("device, dtype", BACKENDS[:4])
def test_huge_scores(device, dtype, cancels):
    """One key outweighs all others, by scores whose fp32 numbers are thousands apart, or which are
    far smaller than their summands. On a GPU weights come from the fp32 LSE, which does not tell
    them apart."""
    size = 200.0 if dtype == torch.float16 else 133120.0
    sizes = (1, 32, 9, 40) if cancels else (1, 2, 9, 64)
    len_k = 9 if cancels else 20
    q, k, v = random_inputs(*sizes, len_k=len_k, dtype=dtype, device=device)
    q, k = (x * size if cancels else x.sign() * size for x in (q, k))
    dq, dk, dv = check_gradients(q, k, v, True)
    assert dq.isfinite().all() and dk.isfinite().all() and dv.abs().max() < 100


def test_rows_without_keys_and_keys_without_rows_get_zeros():
    q, k, v = random_inputs(2, 2, 40, 16, len_k=30)
    dq, _, _ = check_gradients(q, k, v, True)
    assert torch.all(dq[:, :, :10] == 0) and torch.all(dq[:, :, 10:].abs().amax(-1) > 0)
    _, dk, dv = check_gradients(q, k, v, window_right=0, diagonal_offset=-25)
    assert torch.all(dk[:, :, 15:] == 0) and torch.all(dv[:, :, 15:] == 0)


@ALL
def test_gradients_by_out_by_the_lse_and_by_both(device, dtype):
    q, k, v = random_inputs(2, 4, 33, 16, heads_kv=2, len_k=50, dtype=dtype, device=device)
    dout, dlse = torch.randn(q.shape).to(device, dtype), torch.randn(q.shape[:3], device=device)
    for options in (
        {"dout": dout},
        {"dlse": dlse},
        {"dout": dout, "dlse": dlse, "deterministic": True},
        {"dout": dout[:1, :1, :1, :1].expand_as(q), "dlse": dlse[:1, :1, :1].expand_as(dlse)},
        {"dlse": dlse.mT.contiguous().mT},
    ):
        _, _, dv = check_gradients(q, k, v, True, **options)
        assert ("dout" in options) == bool(dv.abs().max() > 0)
    arguments, tuning = (q, k, v, *run(q, k, v)), tuning_of()
    for by_dout, by_dlse, by_both, by_none in zip(
        ops.bwd(dout, *arguments, tuning=tuning)[:3],
        ops.bwd(None, *arguments, dlse, tuning=tuning)[:3],
        ops.bwd(dout, *arguments, dlse, tuning=tuning)[:3],
        ops.bwd(None, *arguments, tuning=tuning)[:3],
        strict=True,
    ):
        bound = 16 * torch.finfo(dtype).eps * by_both.abs().max().item()
        torch.testing.assert_close(by_dout + by_dlse, by_both, rtol=0, atol=bound)
        assert torch.all(by_none == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@SOME
def test_layouts(device, dtype, layout):
    """Of dout, and of the inputs, whose gradients have their order of dims each. By default,
    that of q is not always the same bits."""
    inputs = random_inputs(2, 4, 33, 16, heads_kv=2, len_k=200, dtype=dtype, device=device)
    dout = torch.randn(inputs[0].shape).to(device, dtype)
    expected = check_gradients(*inputs, True, dout=dout)
    like_this = {"dout": poisoned(dout, **LAYOUTS[layout])}
    by_others = [check_gradients(*inputs, True, **like_this)]
    orders = [poisoned(x, **LAYOUTS[layout]) for x in inputs]
    for i in range(3):
        by_others.append(check_gradients(*inputs[:i], orders[i], *inputs[i + 1 :], True, dout=dout))
    for gradients in by_others:
        assert all(map(torch.equal, gradients[1:], expected[1:]))


def test_sum_slices_of_a_cat_and_expanded_inputs():
    x = random_inputs(1, 4, 33, 16)[0].requires_grad_()

    def losses(x, forward):
        q, k, v = x.expand(3, -1, -1, -1), x[:, ::2], x[:, :1].expand(-1, 2, -1, -1)
        k, v = (y.expand(3, -1, -1, -1) for y in (k, v))
        out, lse = forward(q, k, v, True)
        return out.sum() + torch.cat([out, 2 * out], 3)[..., 8:24].sum() + lse.mean()

    def formula(q, k, v, is_causal):
        return reference.attention(q, k, v, is_causal, dtype=torch.float32)

    actual, expected = (
        torch.autograd.grad(losses(x, f), x)[0] for f in (flash_cute.forward, formula)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_subsets_of_inputs():
    inputs = random_inputs(2, 4, 33, 16, heads_kv=2, len_k=50)
    dout = torch.randn(inputs[0].shape)
    expected = check_gradients(*inputs, dout=dout)
    for wanted in itertools.product((False, True), repeat=3):
        leaves = [x.clone().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
        out, lse = flash_cute.forward(*leaves)
        assert out.requires_grad == lse.requires_grad == any(wanted)
        if any(wanted):
            out.backward(dout)
        for leaf, want, gradient in zip(leaves, wanted, expected, strict=True):
            assert torch.equal(leaf.grad, gradient) if want else leaf.grad is None


def test_what_is_saved():
    """The inputs themselves, and both results."""
    inputs = [x.transpose(1, 2).requires_grad_() for x in random_inputs(2, 4, 6, 16)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        results = flash_cute.forward(*inputs)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (*inputs, *results)]
    assert [x.stride() for x in saved] == [x.stride() for x in (*inputs, *results)]
    results = flash_cute.forward(*inputs)
    with torch.no_grad():
        inputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()


@pytest.mark.parametrize("seed", range(40))
@ALL
def test_random_calls(device, dtype, seed):
    large = seed % 6 == 5 and serves_large_head_dims(device, dtype)
    inputs, call = random_call(seed, dtype, device, large=large)
    check_gradients(*inputs, deterministic=seed % 3 == 0, **call)


def test_gradcheck():
    """Of `out`, as the op's LSE is fp32, which gives no differences; of the reference with it."""
    inputs = [x.requires_grad_() for x in random_inputs(1, 4, 5, 6, heads_kv=2, len_k=7, dtype=F64)]

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *qkv):
            ctx.save_for_backward(*qkv)
            return reference.attention(*qkv, True, 0.7)

        @staticmethod
        def backward(ctx, dout, dlse):
            return reference.attention_backward(dout, *ctx.saved_tensors, True, 0.7, dlse=dlse)

    for scale, is_causal in ((None, False), (-0.5, True), (0.0, True)):
        assert torch.autograd.gradcheck(
            lambda q, k, v, *options: flash_cute.forward(q, k, v, *options)[0],
            (*inputs, is_causal, scale),
        )
    assert torch.autograd.gradcheck(Reference.apply, inputs)


@SOME
def test_keys_in_turns_with_the_results_of_all(device, dtype):
    """As in ring attention: the gradients by some of the keys, with the LSE and out of all."""
    q, k, v = random_inputs(1, 4, 40, 16, heads_kv=2, len_k=60, dtype=dtype, device=device)
    out, lse = run(q, k, v)
    dout, dlse = torch.randn(q.shape).to(q), torch.randn(lse.shape).to(lse)
    halves = [
        ops.bwd(dout, q, k[:, :, keys], v[:, :, keys], out, lse, dlse, tuning=tuning_of())[:3]
        for keys in (slice(0, 25), slice(25, 60))
    ]
    (dq1, *first), (dq2, *second) = halves
    dk, dv = (torch.cat(pair, 2) for pair in zip(first, second, strict=True))
    result = tolerance.compare_gradients((dq1 + dq2, dk, dv), dout, q, k, v, dlse=dlse)
    assert result.passed, str(result)


@pytest.mark.parametrize("score, distance, factor", [(30, 10, 100), (1000, 7, 1), (0, 16, 1e7)])
def test_keys_in_turns_where_the_others_count_little(score, distance, factor):
    """But their values do. On the CPU: the LSE of some keys is nearly that of all."""
    q, (v, dout) = torch.ones(1, 1, 4, 8), torch.randn(2, 1, 1, 6, 8)
    k = torch.full((1, 1, 6, 8), score / 8)
    k[:, :, 3:] -= distance / 8
    v[:, :, 3:] *= factor
    dout = dout[:, :, :4]
    out, lse = flash_cute.forward(q, k, v, softmax_scale=1.0)
    dk = ops.bwd(dout, q, k[:, :, :3], v[:, :, :3], out, lse, softmax_scale=1.0)[1]
    expected = reference.attention_backward(dout, q, k, v, softmax_scale=1.0)[1]
    error = (dk - expected[:, :, :3]).abs().max() / expected[:, :, :3].abs().max()
    assert error < 1e-4


def test_wrong_arguments_of_the_op():
    q, k, v = random_inputs(1, 2, 5, 8)
    out, lse = flash_cute.forward(q, k, v)
    for change, error, message in (
        ({"dout": out[:, :1]}, ValueError, r"dout has shape \(1, 1, 5, 8\): it must be"),
        ({"dout": out.half()}, TypeError, "dout is float16: it must be float32"),
        ({"lse": lse.double()}, TypeError, "softmax_lse is float64: it must be float32"),
        ({"dlse": lse[..., None]}, ValueError, "dlse has shape"),
        ({"out": out.to("meta")}, ValueError, "out is on meta and q on cpu"),
        ({"k": k[..., :3]}, ValueError, "k has head dim 3"),
        ({"v": v[..., :3]}, ValueError, r"out has shape \(1, 2, 5, 8\): it must be .*5, 3\)"),
    ):
        arguments = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": lse}
        with pytest.raises(error, match=message):
            ops.bwd(*(arguments | change).values())


def test_all_gradients_are_written():
    q, k, v = random_inputs(1, 2, 5, 8)
    empty = [(q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0]), (q[:0], k[:0], v[:0])]
    for inputs in empty:
        with nan_in_new_memory():
            out, lse = flash_cute.forward(*inputs)
            assert all(torch.all(dx == 0) for dx in ops.bwd(out, *inputs, out, lse, lse))


def test_memory_grows_with_the_length_and_not_its_square():
    from torch.profiler import ProfilerActivity, profile

    def largest_allocation(length):
        inputs = [x.requires_grad_() for x in random_inputs(1, 32, length, 8)]
        out = flash_cute.forward(*inputs)[0]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            out.sum().backward()
        return max(event.cpu_memory_usage for event in profiler.events())

    assert largest_allocation(4000) < 6 * largest_allocation(1000)


def test_training_is_that_of_sdpa():
    """200 steps from the same start: the same loss."""

    def train(attention):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 24, 32, generator=generator)
        weights = [torch.randn(32, n, generator=generator) / 6 for n in (96, 32)]
        optimizer = torch.optim.AdamW([w.requires_grad_() for w in weights], 1e-2)
        for _ in range(200):
            q, k, v = (x @ weights[0]).view(2, 24, 3, 4, 8).permute(2, 0, 3, 1, 4)
            out = attention(q, k, v).transpose(1, 2).flatten(2)
            loss = (out @ weights[1] - x.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    ours = train(lambda q, k, v: flash_cute.forward(q, k, v, True)[0])
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert ours < 0.5 and math.isclose(
        ours, train(lambda *x: sdpa(*x, is_causal=True)), abs_tol=1e-3
    )
