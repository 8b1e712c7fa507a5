"""Results of `forward` and its op on every device, against the plain formula."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support import (
    ALL_KERNELS,
    BANDS,
    DEVICES,
    HEAD_DIM_PAIRS,
    HEAD_DIMS,
    LARGE_HEAD_DIM_PAIRS,
    LARGE_HEAD_DIMS,
    LAYOUTS,
    LENGTHS,
    ONE_KERNEL_EACH,
    check,
    check_rms_error,
    inputs_with_outliers,
    poisoned,
    random_call,
    random_inputs,
    rising_inputs,
    run,
    serves_large_head_dims,
)

import flash_cute

BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
SOME_KERNELS = pytest.mark.parametrize("device, dtype", ONE_KERNEL_EACH)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, *LARGE_HEAD_DIMS])
@pytest.mark.parametrize("device, dtype", ALL_KERNELS)
def test_head_dims_and_dtypes(device, dtype, head_dim, is_causal):
    if head_dim in LARGE_HEAD_DIMS and not serves_large_head_dims(device, dtype):
        pytest.skip("refused (test_compile.py)")
    inputs = random_inputs(2, 4, 129, head_dim, heads_kv=2, len_k=193, dtype=dtype, device=device)
    check(*map(poisoned, inputs), is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim, head_dim_v", [*HEAD_DIM_PAIRS, *LARGE_HEAD_DIM_PAIRS])
@SOME_KERNELS
def test_head_dims_of_v(device, dtype, head_dim, head_dim_v, is_causal):
    """Of its own tensor, and of columns of k. Of few queries, heads share tiles and keys are
    split."""
    if max(head_dim, head_dim_v) > 256 and not serves_large_head_dims(device, dtype):
        pytest.skip("refused (test_compile.py)")
    sizes = {"heads_kv": 2, "len_k": 193, "head_dim_v": head_dim_v}
    for len_q in (129, 3):
        q, k, v = random_inputs(2, 4, len_q, head_dim, **sizes, dtype=dtype, device=device)
        for splits in (1, 3):
            check(*map(poisoned, (q, k, v)), is_causal, splits=splits)
        check(poisoned(q, "bnhd"), k, k[..., -head_dim_v:], is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("len_q, len_k", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 256])
@SOME_KERNELS
def test_lengths(device, dtype, head_dim, len_q, len_k, is_causal):
    inputs = random_inputs(1, 2, len_q, head_dim, len_k=len_k, dtype=dtype, device=device)
    check(*map(poisoned, inputs), is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("heads_q, heads_kv", [(6, 6), (6, 3), (6, 2), (6, 1), (1, 1), (16, 2)])
@SOME_KERNELS
def test_grouped_heads(device, dtype, heads_q, heads_kv, is_causal):
    check(
        *random_inputs(2, heads_q, 70, 40, heads_kv=heads_kv, len_k=90, dtype=dtype, device=device),
        is_causal,
    )


# Not in fp64: there the exact result is no more exact than the one that it is to judge.
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("device, dtype", [p for p in ALL_KERNELS if torch.float64 not in p.values])
def test_random_calls(device, dtype, seed):
    large = seed % 6 == 5 and serves_large_head_dims(device, dtype)
    inputs, call = random_call(seed, dtype, device, large=large)
    check(*inputs, **call)


@pytest.mark.full
@pytest.mark.parametrize("device, dtype", ALL_KERNELS)
def test_sweep(device, dtype):
    large = LARGE_HEAD_DIMS if serves_large_head_dims(device, dtype) else []
    for head_dim, (len_q, len_k), heads_kv, is_causal in itertools.product(
        [*HEAD_DIMS, *large], [*LENGTHS, (1025, 2047), (2048, 511)], (1, 4), (False, True)
    ):
        q, k, v = random_inputs(
            1, 4, len_q, head_dim, heads_kv=heads_kv, len_k=len_k, dtype=dtype, device=device
        )
        check(poisoned(q, "bnhd"), poisoned(k), poisoned(v, gap=16), is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("scale", [0, 0.0, -0.3, 1e-3, 1e-42, 0.5, 1, 3.0])
@SOME_KERNELS
def test_scales(device, dtype, scale, is_causal):
    q, k, v = random_inputs(2, 2, 100, 64, len_k=130, dtype=dtype, device=device)
    check(q, k, v, is_causal, scale)


@BOTH_MASKS
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("device, dtype", ALL_KERNELS)
def test_scores_below_zero_that_rise(device, dtype, scale, is_causal):
    inputs = rising_inputs(1, 2, 150, len_k=700, dtype=dtype, device=device)
    check(*inputs, is_causal, scale)


@pytest.mark.parametrize("exponent", [22, 23, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_scales_of_great_scores(dtype, exponent):
    q, k, v = random_inputs(1, 2, 30, 8, dtype=dtype, device="cpu")
    check(q * 10.0**exponent, k * 10.0**exponent, v, False, 10.0 ** (-2 * exponent))


@pytest.mark.parametrize("scale", [200.0, -200.0, 1e15])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_great_queries_of_small_keys(dtype, scale):
    """q times the scale is beyond fp32, the scores are not."""
    q, k, v = random_inputs(1, 2, 30, 8, dtype=dtype, device="cpu")
    check(q * (4e38 / abs(scale)), k * 1e-38, v, False, scale)


@pytest.mark.parametrize("scale", [0.0, 1e-46, 1e-300])
def test_one_nan_is_one_row(scale):
    q, k, v = random_inputs(2, 2, 30, 8, dtype=torch.float32, device="cpu")
    q[0, 0, 5, 3] = math.nan
    out, lse = run(q, k, v, False, scale)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 0, 5]]
    assert lse.isnan().nonzero().tolist() == [[0, 0, 5]]


@BOTH_MASKS
@pytest.mark.parametrize("scale", [1e4, -1e4, 1e10, 1e30, -1e30, 1e300])
@SOME_KERNELS
def test_huge_scales_pick_the_greatest_scores(device, dtype, scale, is_causal):
    # Products of small integers are exact, so that equal scores are equal and the next one is a
    # whole scale away.
    q, k, v = random_inputs(2, 2, 100, 64, len_k=130, dtype=dtype, device=device)
    q, k = (2 * q).round(), (2 * k).round()
    out, lse = run(q, k, v, is_causal, scale)
    exact_out, exact_lse = flash_cute.reference.attention(q, k, v, is_causal, scale)
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=4 * torch.finfo(dtype).eps)
    if abs(scale) <= 1e30:
        torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [0.0, -2.0, 0.1])
@SOME_KERNELS
def test_rows_without_a_key(device, dtype, scale):
    out, lse = check(
        *random_inputs(2, 2, 300, 64, len_k=40, dtype=dtype, device=device), True, scale
    )
    assert torch.all(out[:, :, :260] == 0) and torch.all(lse[:, :, :260] == -math.inf)
    assert torch.all(lse[:, :, 260:].isfinite())


@SOME_KERNELS
def test_a_row_without_a_key_ignores_nan_in_v(device, dtype):
    q, k, v = random_inputs(1, 2, 300, 64, len_k=40, dtype=dtype, device=device)
    v[:, :, 30] = math.nan
    out, _ = check(q, k, v, True)
    assert torch.all(out[:, :, :260] == 0) and torch.all(out[:, :, 260:].isnan())


@BOTH_MASKS
@pytest.mark.parametrize(
    "batch, heads_q, heads_kv, len_q, len_k",
    [
        (0, 2, 2, 5, 5),
        (2, 0, 1, 5, 5),
        (2, 2, 1, 0, 5),
        (2, 2, 1, 5, 0),
        (2, 2, 1, 0, 0),
        (0, 0, 1, 0, 0),
    ],
)
@pytest.mark.parametrize("device, dtype", ALL_KERNELS)
def test_nothing_to_do(device, dtype, batch, heads_q, heads_kv, len_q, len_k, is_causal):
    q = torch.randn(batch, heads_q, len_q, 32).to(device, dtype)
    k = torch.randn(batch, heads_kv, len_k, 32).to(device, dtype)
    out, lse = run(q, k, k, is_causal)
    assert out.shape == q.shape and out.dtype == dtype and torch.all(out == 0)
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and torch.all(lse == -math.inf)


@BOTH_MASKS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 20])
@SOME_KERNELS
def test_layouts(device, dtype, head_dim, layout, is_causal):
    inputs = random_inputs(2, 3, 70, head_dim, dtype=dtype, device=device)
    q, k, v = (poisoned(x, **LAYOUTS[layout]) for x in inputs)
    out, _ = check(q, k, v, is_causal)
    if layout == "(B, N, H, D) transposed":
        out.transpose(1, 2).view(2, 70, 3 * head_dim)  # raises if it cannot be viewed so


@SOME_KERNELS
def test_each_input_has_its_own_strides(device, dtype):
    q, k, v = random_inputs(2, 3, 70, 64, dtype=dtype, device=device)
    check(poisoned(q, "hbnd", before=1), poisoned(k, "bnhd"), poisoned(v, "bhdn"), True)


@BOTH_MASKS
@SOME_KERNELS
def test_packed_projection(device, dtype, is_causal):
    qkv = torch.randn(2, 70, 3, 4, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    check(*(qkv[:, :, i].transpose(1, 2) for i in range(3)), is_causal)


@pytest.mark.parametrize(
    "sizes", [(1, 3, 70, 64), (2, 1, 70, 64), (2, 3, 1, 64), (2, 3, 70, 1), (1, 1, 1, 64)]
)
@SOME_KERNELS
def test_expanded(device, dtype, sizes):
    for seed, which in enumerate(("q", "k", "v", "qkv")):
        tensors = dict(
            zip(
                "qkv",
                random_inputs(2, 3, 70, 64, dtype=dtype, device=device, seed=seed),
                strict=True,
            )
        )
        for name in which:
            x = tensors[name]
            part = x[tuple(slice(size) for size in sizes)].clone()
            tensors[name] = part.expand(x.shape)
        # Equal elements add up to scores beyond the ordinary size, for which the tolerance is.
        check(**tensors, softmax_scale=1 / 64 if sizes[3] == 1 else None)


@pytest.mark.parametrize("sizes", [(1, 4, 1, 16), (3, 1, 5, 16), (1, 1, 1, 8), (1, 4, 9, 1)])
@SOME_KERNELS
def test_strides_of_dimensions_of_one_mean_nothing(device, dtype, sizes):
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    odd = x.as_strided(
        sizes, [7 if size == 1 else stride for size, stride in zip(sizes, x.stride(), strict=True)]
    )
    assert torch.equal(check(odd, odd, odd)[0], check(x, x, x)[0])


@pytest.mark.parametrize("window_left, window_right, diagonal_offset", BANDS)
@pytest.mark.parametrize("len_q, len_k", [(129, 129), (100, 300), (300, 100), (1, 200)])
@SOME_KERNELS
def test_bands(device, dtype, len_q, len_k, window_left, window_right, diagonal_offset):
    q, k, v = random_inputs(1, 4, len_q, 64, heads_kv=2, len_k=len_k, dtype=dtype, device=device)
    check(
        *(poisoned(q), poisoned(k), poisoned(v)),
        window_left=window_left,
        window_right=window_right,
        diagonal_offset=diagonal_offset,
    )


@BOTH_MASKS
@pytest.mark.parametrize("device, dtype", ALL_KERNELS)
def test_outliers(device, dtype, is_causal):
    """One element in a thousand is a hundred times greater, as in trained models' activations."""
    generator = torch.Generator().manual_seed(1)
    outliers = [torch.rand(2, 2, 300, 128, generator=generator) < 1e-3 for _ in range(3)]
    inputs = random_inputs(2, 2, 300, 128, dtype=dtype, device=device)
    check(*(x * (1 + 99 * o.to(device)) for x, o in zip(inputs, outliers, strict=True)), is_causal)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("device, dtype", [p for p in ALL_KERNELS if torch.float16 in p.values])
def test_rms_error_with_outliers(device, dtype, head_dim):
    inputs = inputs_with_outliers(1, 4, 1024, head_dim, dtype=dtype, device=device)
    check_rms_error(run(*inputs)[0], *inputs)


@BOTH_MASKS
@pytest.mark.parametrize("size", [1e-6, 1e-3, 30.0])
@pytest.mark.parametrize("device, dtype", ALL_KERNELS)
def test_magnitudes(device, dtype, size, is_causal):
    q, k, v = random_inputs(1, 2, 129, 64, dtype=dtype, device=device)
    check(q * size, k, v * size, is_causal)
    check(q, k * size, v / size if size > 1 else v, is_causal)


@SOME_KERNELS
def test_nan_in_v_follows_the_formula(device, dtype):
    q, k, v = random_inputs(1, 2, 129, 64, len_k=300, dtype=dtype, device=device)
    clean, _ = run(q, k, v)
    v[0, 1, 123, 5] = math.nan
    out, _ = check(q, k, v)
    assert torch.all(out[0, 1, :, 5].isnan())
    out[0, 1, :, 5] = clean[0, 1, :, 5]
    assert torch.equal(out, clean)


@SOME_KERNELS
def test_nan_in_q_stays_in_its_row(device, dtype):
    q, k, v = random_inputs(1, 2, 129, 64, dtype=dtype, device=device)
    q[0, 1, 77, 3] = math.nan
    out, lse = run(q, k, v)
    assert torch.all(out[0, 1, 77].isnan()) and lse[0, 1, 77].isnan()
    assert out.isnan().sum() == 64 and lse.isnan().sum() == 1


@SOME_KERNELS
def test_nan_in_k_reaches_every_row_that_sees_it(device, dtype):
    q, k, v = random_inputs(1, 2, 129, 64, dtype=dtype, device=device)
    k[0, 1, 77, 3] = math.nan
    out, lse = run(q, k, v)
    assert torch.all(out[0, 1].isnan()) and torch.all(lse[0, 1].isnan())
    assert not out[0, 0].isnan().any() and not lse[0, 0].isnan().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@SOME_KERNELS
def test_a_bad_key_reaches_no_row_that_does_not_see_it(device, dtype, bad):
    q, k, v = random_inputs(1, 2, 129, 64, dtype=dtype, device=device)
    clean_out, clean_lse = run(q, k, v, True)
    k[0, :, 77] = bad
    out, lse = run(q, k, v, True)
    torch.testing.assert_close(out[:, :, :77], clean_out[:, :, :77])
    torch.testing.assert_close(lse[:, :, :77], clean_lse[:, :, :77])
    assert not torch.equal(out[:, :, 77:].nan_to_num(), clean_out[:, :, 77:])


@pytest.mark.parametrize("len_q, len_k", [(200, 200), (70, 200), (200, 150)])
@SOME_KERNELS
def test_causal_rows_do_not_depend_on_later_keys(device, dtype, len_q, len_k):
    q, k, v = random_inputs(1, 2, len_q, 64, len_k=len_k, dtype=dtype, device=device)
    first = run(q, k, v, True)
    hidden = 90
    k[:, :, hidden:] = 100.0
    v[:, :, hidden:] = -100.0
    second = run(q, k, v, True)
    rows = hidden - (len_k - len_q)  # row i sees keys up to i + Nk - Nq
    assert rows < 0 or all(
        torch.equal(a[:, :, :rows], b[:, :, :rows]) for a, b in zip(first, second, strict=True)
    )
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_left_alone(device):
    inputs = random_inputs(1, 2, 65, 20, dtype=torch.float16, device=device)
    before = [x.clone() for x in inputs]
    run(*inputs, True, -0.5)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("device", DEVICES)
def test_one_tensor_as_q_k_and_v(device):
    x = random_inputs(1, 2, 65, 64, dtype=torch.bfloat16, device=device)[0]
    check(x, x, x, True)


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.float16,) * 3, (torch.float32, torch.float16, torch.bfloat16)],
    ids=["fp32", "fp16", "mixed"],
)
@pytest.mark.parametrize("autocast_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_as_sdpa_does(device, autocast_dtype, dtypes):
    inputs = random_inputs(1, 2, 65, 64, device=device)
    inputs = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    with torch.autocast(device, dtype=autocast_dtype):
        out, lse = flash_cute.forward(*inputs)
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs)
    assert out.dtype == expected.dtype == autocast_dtype and lse.dtype == torch.float32
    by_hand = flash_cute.forward(*(x.to(autocast_dtype) for x in inputs))
    assert torch.equal(out, by_hand[0]) and torch.equal(lse, by_hand[1])


def test_autocast_leaves_fp64_alone():
    q, k, v = random_inputs(1, 2, 65, 64, dtype=torch.float64)
    with torch.autocast("cpu"):
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == torch.float64
        assert flash_cute.forward(q, k, v)[0].dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
def test_no_grad_and_inference_mode(device):
    q, k, v = random_inputs(1, 2, 65, 64, dtype=torch.float16, device=device)
    q.requires_grad_()
    with torch.no_grad():
        out, _ = flash_cute.forward(q, k, v)
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(flash_cute.forward(q, k, v)[0], out)


def test_cpu_memory_grows_with_the_length_and_not_its_square():
    from torch.profiler import ProfilerActivity, profile

    def largest_allocation(length, is_causal):
        inputs = random_inputs(1, 1, length, 8)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run(*inputs, is_causal)
        return max(event.cpu_memory_usage for event in profiler.events())

    for is_causal in (False, True):
        assert largest_allocation(4000, is_causal) < 6 * largest_allocation(1000, is_causal)
