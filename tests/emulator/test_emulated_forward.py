"""The forward kernels on the emulated machine, of both architectures, for whole keys and for
split-KV: the cases of test_forward.py that the kernels themselves decide, where their size allows.
"""

from __future__ import annotations

import itertools
import math

import emulator
import pytest
import torch
from emulator import EmulationError, Emulator
from support import (
    BANDS,
    HEAD_DIM_PAIRS,
    HEAD_DIMS,
    LARGE_HEAD_DIM_PAIRS,
    LARGE_HEAD_DIMS,
    LAYOUTS,
    LENGTHS,
    NOT_FOR_SM90,
    check_rms_error,
    inputs_with_outliers,
    poisoned,
    random_call,
    rising_inputs,
)
from support import random_inputs as random_inputs_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MASKS = False, True
BOTH_MASKS = pytest.mark.parametrize("is_causal", MASKS, ids=["full", "causal"])
# Of one CTA's shared memory, in bytes: what sm_80 and sm_86 lend. By these and by what sm_90 lends
# every entry of sm80's tile table is chosen.
SMEM_LIMITS = [166912, 101376]


def random_inputs(*sizes, dtype=BF16, **options):
    return random_inputs_of(*sizes, dtype=dtype, **options)


def dtypes_of(head_dim):
    """Those that are built (build_emulator.py)."""
    return [BF16, FP16] if 32 < head_dim <= 64 else [BF16]


def serves(kernels, scale):
    return kernels.arch == 80 or scale > 0


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_and_dtypes(kernels, head_dim, is_causal):
    for dtype in dtypes_of(head_dim):
        inputs = random_inputs(1, 2, 129, head_dim, heads_kv=1, len_k=300, dtype=dtype)
        kernels.check(*map(poisoned, inputs), is_causal, multiprocessors=1)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim, head_dim_v", [*HEAD_DIM_PAIRS, *LARGE_HEAD_DIM_PAIRS])
def test_head_dims_of_v(kernels, head_dim, head_dim_v, is_causal):
    """Of its own tensor, and of columns of k."""
    if kernels.arch == 90 and max(head_dim, head_dim_v) > 512:
        pytest.skip("sm80's")
    for len_q in (150, 3):  # of few queries, heads share tiles
        inputs = random_inputs(1, 4, len_q, head_dim, heads_kv=2, len_k=270, head_dim_v=head_dim_v)
        q, k, v = map(poisoned, inputs)
        for smem_limit in (0, *SMEM_LIMITS) if kernels.arch == 80 else (0,):
            kernels.check(q, k, v, is_causal, smem_limit=smem_limit)
        kernels.check(q, k, k[..., -head_dim_v:], is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("smem_limit", SMEM_LIMITS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256, *LARGE_HEAD_DIMS])
def test_every_tile_of_sm80(sm80, head_dim, smem_limit, is_causal):
    for dtype, splits in itertools.product(dtypes_of(head_dim), [1, 2]):
        inputs = random_inputs(1, 2, 150, head_dim, heads_kv=1, len_k=270, dtype=dtype)
        options = {"smem_limit": smem_limit, "splits": splits}
        sm80.check(*map(poisoned, inputs), is_causal, **options)


@BOTH_MASKS
@pytest.mark.parametrize("smem_limit", [0, *SMEM_LIMITS])
@pytest.mark.parametrize("head_dim", [1, 20, 64, 100, 128, 200, 256])
def test_every_tile_of_fp32(sm80, head_dim, smem_limit, is_causal):
    for splits in (1, 2):
        inputs = random_inputs(1, 2, 150, head_dim, heads_kv=1, len_k=270, dtype=FP32)
        options = {"smem_limit": smem_limit, "splits": splits}
        sm80.check(*map(poisoned, inputs), is_causal, **options)


@pytest.mark.parametrize("seed", range(30))
def test_random_calls_of_fp32(sm80, seed):
    inputs, call = random_call(seed, FP32)
    options = {"smem_limit": [0, *SMEM_LIMITS][seed % 3], "splits": [0, 1, 3][seed % 3]}
    sm80.check(*inputs, **call, **options, seed=seed)


@pytest.mark.parametrize("size", [1e-30, 6.0, 1e3])
@pytest.mark.parametrize("head_dim, len_k", [(64, 1024), (128, 1024), (256, 500)])
def test_scores_of_fp32(sm80, head_dim, len_k, size):
    """Sharp ones, in which errors do not average out. So the yardstick's greatest error is one of
    many rows: of few it is luck, which differs from CPU to CPU."""
    q, k, v = random_inputs(1, 1, 400, head_dim, len_k=len_k, dtype=FP32)
    sm80.check(q * size, k, v)


@BOTH_MASKS
@pytest.mark.parametrize("len_q, len_k", [*LENGTHS, (513, 513)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths(unsplit, head_dim, len_q, len_k, is_causal):
    inputs = random_inputs(1, 2, len_q, head_dim, len_k=len_k)
    unsplit.check(*map(poisoned, inputs), is_causal, multiprocessors=1)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", [257, 320, 384, 400, 512])
def test_large_head_dims_of_sm90(sm90, head_dim, is_causal):
    """Ragged lengths, rows without a key, packed query heads; each CTA has several tiles."""
    for seed, (heads, len_q, len_k) in enumerate([(2, 129, 300), (1, 200, 70), (6, 5, 150)]):
        inputs = random_inputs(2, heads, len_q, head_dim, heads_kv=1, len_k=len_k)
        sm90.check(*map(poisoned, inputs), is_causal, seed=seed)
    inputs = random_inputs(1, 1, 70, head_dim, len_k=330)
    sm90.check(*map(poisoned, inputs), is_causal, 50.0)  # sharp: limits rise again and again


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(unsplit, seed):
    is_sm80 = unsplit.arch == 80
    inputs, call = random_call(seed, BF16, large=is_sm80 and seed % 4 == 3)
    options = {"multiprocessors": [1, 2, 5][seed % 3], "splits": [0, 0, 1, 2, 7][seed % 5]}
    if is_sm80:
        options["smem_limit"] = [0, *SMEM_LIMITS][seed % 3]
    elif call["softmax_scale"] in (0.0, -0.5):
        call["softmax_scale"] = 2.0
    if not is_sm80 and inputs[1].shape[2] == 0:
        with pytest.raises(EmulationError, match="k has no keys"):
            unsplit.check(*inputs, **call, **options)
    else:
        unsplit.check(*inputs, **call, **options, seed=seed)


@pytest.mark.parametrize(
    "head_dim, is_causal",
    [
        *[(64, False), (64, True), (96, False), (96, True), (128, True), (256, False)],
        *[(320, False), (512, True)],
    ],
)
def test_results_do_not_depend_on_who_is_first(kernels, head_dim, is_causal):
    inputs = random_inputs(1, 3, 200, head_dim, heads_kv=1, len_k=260)
    # With up to two multiprocessors sm90's tile is the same.
    first = kernels.check(*map(poisoned, inputs), is_causal, multiprocessors=2)
    for seed in (1, 2, 3):  # of each way in which copies arrive (cta.cpp) one
        options = {"multiprocessors": 1 + seed % 2, "seed": seed}
        other = kernels.check(*map(poisoned, inputs), is_causal, **options)
        assert all(map(torch.equal, first[:2], other[:2]))


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3, 1e-42, 3.0, 100.0, 500.0])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_scales(kernels, head_dim, scale):
    if not serves(kernels, scale):
        pytest.skip("sm80's")
    for len_q, is_causal in itertools.product((40, 100), MASKS):
        inputs = random_inputs(1, 1, len_q, head_dim, len_k=330)
        kernels.check(*map(poisoned, inputs), is_causal, scale)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_scores_below_zero_that_rise(kernels, head_dim, is_causal):
    for dtype in dtypes_of(head_dim):
        inputs = rising_inputs(1, 1, 150, head_dim, len_k=500, dtype=dtype)
        for scale in (1.0, 4.0):
            kernels.check(*map(poisoned, inputs), is_causal, scale)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 500.0])
@pytest.mark.parametrize("head_dim", [320, 512, 1024])
def test_softmax_of_large_head_dims(unsplit, head_dim, scale):
    if not serves(unsplit, scale) or (unsplit.arch == 90 and head_dim > 512):
        pytest.skip("sm80's")
    # Of many columns, scores of one sign add up to more than fp32 has digits for.
    for inputs in (random_inputs, rising_inputs)[: 2 if head_dim == 320 else 1]:
        q, k, v = inputs(1, 1, 40, head_dim, len_k=330, dtype=BF16)
        unsplit.check(*map(poisoned, (q, k, v)), True, scale)


@pytest.mark.parametrize("scale", [1e4, -1e10, 1e300])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_huge_scales_pick_the_greatest_scores(kernels, head_dim, scale):
    if not serves(kernels, scale):
        pytest.skip("sm80's")
    q, k, v = random_inputs(1, 2, 100, head_dim, len_k=330)
    q, k = (2 * q).round(), (2 * k).round()
    out, _, _ = kernels.forward(q, k, v, scale)
    scores = q.double() @ k.double().mT * math.copysign(1, scale)
    best = (scores == scores.amax(-1, keepdim=True)).double()
    exact = best / best.sum(-1, keepdim=True) @ v.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(BF16).eps)


@BOTH_MASKS
@pytest.mark.parametrize("size, scale", [(1e3, None), (3e4, None), (1e5, None), (1.9e18, 1e-38)])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_scores_of_any_size(kernels, head_dim, size, scale, is_causal):
    """Up to 1e12 by the default scale, and about 1e38."""
    q, k, v = random_inputs_of(1, 1, 70, head_dim, len_k=330)
    inputs = (q * size).to(BF16), (k * size).to(BF16), v.to(BF16)
    kernels.check(*map(poisoned, inputs), is_causal, scale)


@BOTH_MASKS
def test_scores_near_the_greatest_of_fp32(kernels, is_causal):
    """3e38, times a scale: the limit above the greatest score would overflow."""
    q, k, v = random_inputs(1, 2, 70, 64, len_k=330)
    q = torch.full_like(q, 1.875 * 2**60)
    k = k.sign() * (torch.arange(330) % 7 < 3)[:, None] + (torch.arange(330) % 5 < 4)[:, None]
    k = k.clamp(-1, 1) * q[0, 0, 0, 0]
    kernels.check(*map(poisoned, (q, k, v)), is_causal, 1e-38)


def test_one_enormous_score(unsplit):
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=BF16)
    out, lse, _ = unsplit.forward(x, x, x, 0.125)
    assert torch.equal(out, x) and lse.item() == pytest.approx(133120.0**2 * 64 / 8, rel=1e-6)


def test_scores_that_leave_their_sum_no_digits(kernels):
    """Near 1e6, with exact products: log-sum-exps would tell splits apart by steps of 1/16."""
    q, k, v = random_inputs(1, 1, 20, 64, len_k=330, dtype=FP16)
    q[..., 0], k[..., 0] = 1024, 1024
    q[..., 1:], k[..., 1:] = q[..., 1:].round(), k[..., 1:].round()
    scale = math.log(2)
    out, _, _ = kernels.forward(q, k, v, scale)
    exact = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(FP16).eps)


@pytest.mark.parametrize("scale", [0.0, -2.0, 0.1, 1e10])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_rows_without_a_key(kernels, head_dim, scale):
    if not serves(kernels, scale):
        pytest.skip("sm80's")
    inputs = random_inputs(1, 2, 400, head_dim, len_k=150)
    out, lse, _ = kernels.forward(
        *map(poisoned, inputs), scale, window_right=0, diagonal_offset=-250
    )
    assert torch.all(out[:, :, :250] == 0) and torch.all(lse[:, :, :250] == -math.inf)
    assert torch.all(lse[:, :, 250:].isfinite())


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", [32, 192])
def test_no_keys(sm80, head_dim, is_causal):
    q, k, v = random_inputs(2, 2, 70, head_dim, len_k=0)
    out, lse, _ = sm80.check(q, k, v, is_causal)
    assert torch.all(out == 0) and torch.all(lse == -math.inf)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_layouts(kernels, head_dim, layout):
    # Of few queries, heads share tiles.
    for heads, len_q, is_causal in ((3, 70, True), (6, 5, False)):
        inputs = random_inputs(2, heads, len_q, head_dim, heads_kv=3, len_k=150)
        kernels.check(*(poisoned(x, **LAYOUTS[layout]) for x in inputs), is_causal)


@pytest.mark.parametrize("sizes", [(1, 3, 70, 64), (2, 1, 70, 64), (1, 1, 70, 64), (2, 3, 1, 64)])
@pytest.mark.parametrize("heads_kv", [3, 1])
def test_expanded(kernels, heads_kv, sizes):
    q, k, v = (
        x[tuple(map(slice, sizes))].clone().expand(x.shape)
        for x in random_inputs(2, 3, 70, 64, heads_kv=heads_kv)
    )
    if kernels.arch == 90 and sizes[2] == 1:  # of expanded rows, see test_what_sm90_refuses
        return
    kernels.check(q, k, v, True)
    kernels.check(q[:, :, :5], k, v, True)


@pytest.mark.parametrize("window_left, window_right, diagonal_offset", BANDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bands(kernels, head_dim, window_left, window_right, diagonal_offset):
    band = {"window_left": window_left, "window_right": window_right}
    # Of few queries, heads share tiles.
    for heads, len_q, len_k in [(1, 129, 129), (3, 20, 400), (1, 400, 70), (3, 1, 300)]:
        inputs = random_inputs(1, heads, len_q, head_dim, heads_kv=1, len_k=len_k)
        kernels.check(*map(poisoned, inputs), **band, diagonal_offset=diagonal_offset)


GROUPS = [(2, 1), (3, 1), (7, 1), (8, 2), (20, 1), (33, 1), (64, 1), (65, 1), (130, 1)]


@pytest.mark.parametrize(
    "len_q, heads, heads_kv",
    # Of 70 queries, the heads of a small group have tiles of their own, those of 7 share several.
    [*((len_q, *group) for len_q in (1, 5) for group in GROUPS), (70, 3, 1), (70, 7, 1)],
)
def test_groups_of_heads(kernels, len_q, heads, heads_kv):
    batch = 2 if heads <= 8 else 1
    inputs = random_inputs(batch, heads, len_q, 64, heads_kv=heads_kv, len_k=150)
    for is_causal in MASKS:
        kernels.check(*map(poisoned, inputs), is_causal)


@pytest.mark.parametrize("head_dim", [48, 64, 128, 256])
def test_rms_error_with_outliers(kernels, head_dim):
    if FP16 not in dtypes_of(head_dim):
        pytest.skip("not built")
    inputs = inputs_with_outliers(1, 1, 512, head_dim, dtype=FP16)
    out, _, _ = kernels.forward(*map(poisoned, inputs), 1 / math.sqrt(head_dim))
    check_rms_error(out, *inputs)


@BOTH_MASKS
@pytest.mark.parametrize("size", [1e-6, 30.0])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_magnitudes(kernels, head_dim, size, is_causal):
    for dtype in dtypes_of(head_dim):
        q, k, v = random_inputs(1, 2, 129, head_dim, dtype=dtype)
        kernels.check(q * size, k, v * size, is_causal)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_nan_follows_the_formula(kernels, head_dim, name):
    inputs = dict(zip("qkv", random_inputs(1, 2, 20, head_dim, len_k=330), strict=True))
    inputs[name][0, 1, 3, 5] = math.nan
    out, lse, _ = kernels.check(*inputs.values())
    assert out[0, 1].isnan().any() and not out[0, 0].isnan().any()
    assert lse.isnan().sum() == {"q": 1, "k": 20, "v": 0}[name]


def test_keys_beyond_2_to_the_31_elements(kernels):
    rows, stride = 150, 2**24
    storage = torch.empty(rows * stride, dtype=BF16).view(rows, stride)  # takes no memory unused
    q, k_values, v_values = random_inputs(1, 1, 40, 64, len_k=rows)
    storage[:, :64], storage[:, 64:128] = k_values[0, 0], v_values[0, 0]
    k, v = storage[None, None, :, :64], storage[None, None, :, 64:128]
    assert k.stride(2) * k.shape[2] > 2**31
    kernels.check(q, k, v, True)


def test_more_splits_than_threads_that_combine_them(sm80):
    inputs = random_inputs(1, 1, 1, 8, len_k=128 * 300 - 7)
    sm80.check(*map(poisoned, inputs), splits=300)


@pytest.mark.parametrize("head_dim", [8, 64, 192])
def test_rows_that_a_cta_combines_together(sm80, head_dim):
    """1,035: more than have a CTA each, and the last CTA has three."""
    inputs = random_inputs(1, 5, 207, head_dim, len_k=150)
    sm80.check(*map(poisoned, inputs), splits=2)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_few_rows_have_the_bits_of_a_whole_tile(sm80, head_dim):
    q, k, v = random_inputs(1, 2, 128, head_dim, len_k=200)
    whole = sm80.check(q, k, v, False, 3.0)
    few = sm80.check(q[:, :, :37], k, v, False, 3.0)
    assert all(torch.equal(a[:, :, :37], b) for a, b in zip(whole[:2], few[:2], strict=True))


@pytest.mark.parametrize("head_dim", [128, 192])
def test_rows_rise_in_tiles_for_99_kb(sm80, head_dim):
    """At 128 the tile has two blocks at its end that only half of its rows see."""
    inputs = random_inputs(1, 2, 200, head_dim)
    sm80.check(*map(poisoned, inputs), True, 3.0, smem_limit=99 * 1024)


def check_refusal(library, inputs, scale, reason, **options):
    """Of sm90's kernels; by default sm80's then have the call."""
    with pytest.raises(EmulationError, match=f"arch is 'sm90', but .*{reason}"):
        Emulator(library, 90).forward(*inputs, scale, **options)
    assert Emulator(library).check(*inputs, False, scale, **options)[2].wgmma == 0


@pytest.mark.parametrize("case", NOT_FOR_SM90)
def test_what_sm90_refuses(library, case):
    change, scale, reason = NOT_FOR_SM90[case]
    inputs = random_inputs(2, 4, 70, 64, len_k=100)
    check_refusal(library, change(*inputs), 0.125 if scale is None else scale, reason)


def test_sm90_refuses_enormous_strides(library, monkeypatch):
    def far_apart(x):
        tensor = as_c(x)
        tensor.strides[1] = 2**38
        return tensor

    as_c = emulator._as_c
    monkeypatch.setattr(emulator, "_as_c", far_apart)
    inputs = random_inputs(1, 4, 70, 64)
    with pytest.raises(EmulationError, match=r"arch is 'sm90', but .*a stride .* is 2\^40 bytes"):
        Emulator(library, 90).forward(*inputs, 0.125)


def test_a_driver_that_refuses_tensor_maps(library):
    inputs = random_inputs(1, 4, 70, 64, len_k=200)
    for splits in (0, 2):
        options = {"refuses_tensor_maps": True, "splits": splits}
        check_refusal(library, inputs, 0.125, "driver refused a tensor map", **options)


def test_hopper_gets_sm90(library):
    inputs = random_inputs(1, 4, 70, 64)
    assert Emulator(library).check(*inputs)[2].wgmma > 0
