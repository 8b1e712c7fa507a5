"""The backward's kernels on the emulated machine. Each case compares dq, dk and dv with the exact
ones, and the inputs lie in the midst of NaN."""

from __future__ import annotations

import pytest
import torch
from emulator import Emulator
from support import (
    BANDS,
    HEAD_DIM_PAIRS,
    LAYOUTS,
    LENGTHS,
    poisoned,
    random_call,
    rising_inputs,
)
from support import random_inputs as random_inputs_of
from test_emulated_counts import BWD, LARGE_BWD

from flash_cute import ops

BF16, FP32 = torch.bfloat16, torch.float32
MASKS = False, True
BOTH_MASKS = pytest.mark.parametrize("is_causal", MASKS, ids=["full", "causal"])
SMALL_SMEM = 101376  # of one CTA, in bytes: what sm_86 lends
BWD_SM90 = [t for t in ops.build_info()["tiles"] if (t["arch"], t["op"]) == ("sm90", "bwd")]


@pytest.fixture(params=[80, 0], ids=["sm80", "sm90 where it serves"])
def kernels(request, library):
    return Emulator(library, request.param)


def small_tiles(kernels):
    """sm80's for little shared memory, for more blocks of keys. sm90 has one for each head dim."""
    return {"smem_limit": SMALL_SMEM} if kernels.arch == 80 else {}


def random_inputs(*sizes, dtype=BF16, **options):
    return tuple(map(poisoned, random_inputs_of(*sizes, dtype=dtype, **options)))


@BOTH_MASKS
@pytest.mark.parametrize("name", [*BWD, *LARGE_BWD])
def test_every_tile_of_sm80(sm80, name, is_causal):
    """Of ragged blocks, two of queries and two of keys."""
    tile, smem_limit = {**BWD, **LARGE_BWD}[name]
    len_q, len_k, head_dim = tile["block_m"] + 5, tile["block_n"] + 9, tile["head_dim"]
    dtypes = (BF16, torch.float16) if head_dim == 64 else (BF16,)
    for dtype in (FP32,) if tile["op"] == "bwd_fp32" else dtypes:
        inputs = random_inputs(1, 2, len_q, head_dim, heads_kv=1, len_k=len_k, dtype=dtype)
        sm80.check_backward(*inputs, is_causal, smem_limit=smem_limit, has_dlse=True)


@BOTH_MASKS
@pytest.mark.parametrize(
    "tile", BWD_SM90, ids=lambda tile: f"{tile['head_dim']}_{tile['head_dim_v']}"
)
def test_every_tile_of_sm90(sm90, tile, is_causal):
    """Of ragged blocks: stages and dS's buffers are used again, in two heads of a group."""
    len_q, len_k, head_dim = 5 * tile["block_m"] + 5, tile["block_n"] + 9, tile["head_dim"]
    for dtype in (BF16, torch.float16) if head_dim == 64 else (BF16,):
        sizes = {"heads_kv": 1, "len_k": len_k, "head_dim_v": tile["head_dim_v"]}
        inputs = random_inputs(1, 2, len_q, head_dim, **sizes, dtype=dtype)
        for seed in range(3):
            sm90.check_backward(*inputs, is_causal, has_dlse=True, head_splits=1, seed=seed)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", [1, 20, 40, 72, 100, 136, 200])
def test_head_dims(kernels, head_dim, is_causal):
    for len_k in (20, 140):  # one block of keys, and several
        inputs = random_inputs(1, 1, 70, head_dim, len_k=len_k)
        kernels.check_backward(*inputs, is_causal, **small_tiles(kernels))


@pytest.mark.parametrize("band", BANDS)
def test_bands_of_large_head_dims(sm80, band):
    """Groups of heads, several blocks of either side, rows without a key."""
    band = dict(zip(("window_left", "window_right", "diagonal_offset"), band, strict=True))
    for heads, head_dim, len_q, len_k in [(2, 257, 70, 150), (1, 520, 140, 70)]:
        inputs = random_inputs(1, heads, len_q, head_dim, heads_kv=1, len_k=len_k)
        sm80.check_backward(*inputs, softmax_scale=-0.05, has_dlse=True, **band)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim, head_dim_v", HEAD_DIM_PAIRS)
def test_head_dims_of_v(kernels, head_dim, head_dim_v, is_causal):
    for len_k, options in ((20, {}), (300, {"head_splits": 2}), (300, {"deterministic": True})):
        sizes = {"heads_kv": 1, "len_k": len_k, "head_dim_v": head_dim_v}
        q, k, v = random_inputs(1, 2, 70, head_dim, **sizes)
        kernels.check_backward(q, k, v, is_causal, **options, **small_tiles(kernels))
    kernels.check_backward(q, k, k[..., :head_dim_v], is_causal)


@BOTH_MASKS
@pytest.mark.parametrize("len_q, len_k", LENGTHS)
def test_lengths(kernels, len_q, len_k, is_causal):
    inputs = random_inputs(1, 2, len_q, 64, len_k=len_k)
    kernels.check_backward(*inputs, is_causal, has_dlse=True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window_left, window_right, diagonal_offset", BANDS)
def test_bands(kernels, window_left, window_right, diagonal_offset, deterministic):
    """Those in order wait for the right number of earlier blocks, or wait for ever."""
    band = {"window_left": window_left, "window_right": window_right}
    options = {"diagonal_offset": diagonal_offset, "deterministic": deterministic, **band}
    for len_q, len_k in [(129, 300), (400, 150)]:
        inputs = random_inputs(1, 1, len_q, 64, len_k=len_k)
        kernels.check_backward(*inputs, has_dlse=True, **small_tiles(kernels), **options, seed=1)


def test_rows_without_a_key_and_keys_without_a_row_get_zeros(kernels):
    inputs = random_inputs(1, 2, 400, 64, len_k=300)
    for options in ({}, {"deterministic": True}, {"head_splits": 2}):
        band = {"window_right": 0, "diagonal_offset": -250}  # row i sees keys up to i - 250
        (dq, dk, dv), _ = kernels.check_backward(*inputs, **band, **options, has_dlse=True)
        assert torch.all(dq[:, :, :250] == 0) and torch.all(dq[:, :, 251:].abs().amax(-1) > 0)
        assert all(torch.all(dx[:, :, 150:] == 0) for dx in (dk, dv))


@pytest.mark.parametrize("head_splits", [1, 2, 3])
@pytest.mark.parametrize("heads, heads_kv", [(2, 2), (6, 2), (7, 1)])
def test_groups_of_heads(kernels, heads, heads_kv, head_splits):
    for is_causal, head_dim in ((True, 64), (False, 40)):
        inputs = random_inputs(2, heads, 70, head_dim, heads_kv=heads_kv, len_k=150)
        options = {"head_splits": head_splits, "deterministic": is_causal, "seed": head_splits}
        kernels.check_backward(*inputs, is_causal, **options, **small_tiles(kernels))


@BOTH_MASKS
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3, 1e-42, 3.0, 100.0, 500.0])
def test_scales(kernels, scale, is_causal):
    for len_k in (50, 200):
        gradients, _ = kernels.check_backward(
            *random_inputs(1, 1, 70, 64, len_k=len_k), is_causal, scale
        )
        assert scale != 0 or not any(dx.any() for dx in gradients[:2])


@BOTH_MASKS
@pytest.mark.parametrize("len_k", [1, 129, 300])
def test_scores_far_below_zero(kernels, len_k, is_causal):
    """Below -89, where e^-lse is infinite: a key past the last must not count as a score of 0."""
    q, k, v = rising_inputs(1, 1, 150, 64, len_k=len_k, dtype=BF16)
    gradients, _ = kernels.check_backward(*map(poisoned, (3 * q, 30 * k, v)), is_causal)
    assert all(dx.isfinite().all() for dx in gradients)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernels, layout):
    for head_dim in (64, 20):
        inputs = random_inputs_of(2, 3, 70, head_dim, heads_kv=3, len_k=150, dtype=BF16)
        kernels.check_backward(*(poisoned(x, **LAYOUTS[layout]) for x in inputs), True)


@pytest.mark.parametrize("smem_limit", [0, SMALL_SMEM])
@BOTH_MASKS
def test_order_of_sums(kernels, is_causal, smem_limit):
    """Only dQ's sums may come in any order, and not where they are asked for in order."""
    inputs = random_inputs(1, 2, 150, 64, heads_kv=1, len_k=600, dtype=torch.float16)
    in_order, in_any = (
        [
            kernels.check_backward(
                *inputs, is_causal, deterministic=deterministic, seed=seed, smem_limit=smem_limit
            )[0]
            for seed in range(5)
        ]
        for deterministic in (True, False)
    )
    first = in_order[0]
    assert all(all(map(torch.equal, first, other)) for other in in_order)
    assert all(all(map(torch.equal, first[1:], other[1:])) for other in in_any)
    assert not all(torch.equal(first[0], other[0]) for other in in_any)


@pytest.mark.parametrize("heads", [33, 45, 70])
def test_groups_of_heads_in_order(sm90, heads):
    """The last group is the largest."""
    for head_dim in (64, 256):
        sm90.check_backward(*random_inputs(1, heads, 10, head_dim, len_k=200), True)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_dq_that_ctas_share(library, seed):
    """Each finished block is made once, by whichever CTA takes it. CTAs have several tiles each."""
    sm90 = Emulator(library, 90, workers=4, multiprocessors=2 + seed % 3)
    sizes = {"heads_kv": [4, 2, 1][seed % 3], "len_k": [600, 900, 2400][seed % 3]}
    inputs = random_inputs(1, 4, 300, 64 + 64 * (seed % 2), **sizes)
    sm90.check_backward(*inputs, seed >= 3, head_splits=1, seed=seed)


NARROW = [(128, 0), (127, 0), (64, 64), (0, 128), (63, 0), (0, 0), (10, 60), (100, 0)]


@pytest.mark.parametrize("window", NARROW)
def test_narrow_windows(library, window):
    """A CTA walks along the diagonal: tiles of several lengths, and the ends of a sequence."""
    left, right = window
    for head_dim, length, multiprocessors, seed in [
        (64, 200, 4, 0),
        (64, 581, 2, 1),
        (128, 300, 4, 2),
        (96, 640, 3, 3),
        (20, 449, 1, 4),
    ]:
        sm90 = Emulator(library, 90, multiprocessors=multiprocessors)
        inputs = random_inputs(1, 2, length, head_dim)
        call = {"window_left": left, "window_right": right}
        sizes = {"batch": 1, "heads_q": 2, "heads_kv": 2, "len_q": length, "len_k": length}
        assert sm90.plan(backward=1, head_dim=head_dim, **sizes, **call)["dq_by"] == "window"
        call["has_dlse"] = True
        first, _ = sm90.check_backward(*inputs, **call, seed=seed)
        again, _ = sm90.check_backward(*inputs, **call, seed=seed + 10)
        assert all(map(torch.equal, first, again))
    q, k, v = random_inputs(2, 1, 300, 64, head_dim_v=40)
    shifted = {"window_left": left + 1, "window_right": right - 1, "diagonal_offset": 1}
    sm90.check_backward(q, k[:1].expand_as(k), v, **call | (shifted if right > 0 else {}))


@pytest.mark.parametrize("seed", range(30))
def test_random_calls_of_fp32(sm80, seed):
    inputs, call = random_call(seed, FP32)
    if inputs[1].shape[2] > 0:
        sm80.check_backward(*inputs, **call, has_dlse=True, seed=seed)


@pytest.mark.parametrize("size", [1e-30, 6.0])
@pytest.mark.parametrize("head_dim, len_k", [(64, 1024), (128, 1024), (256, 500)])
def test_scores_of_fp32(sm80, head_dim, len_k, size):
    """Sharp ones, in which errors do not average out."""
    q, k, v = random_inputs(1, 1, 40, head_dim, len_k=len_k, dtype=FP32)
    sm80.check_backward(q * size, k, v)


@pytest.mark.parametrize("seed", range(25))
def test_random_calls(kernels, seed):
    inputs, call = random_call(seed, BF16, large=kernels.arch == 80 and seed % 4 == 3)
    if inputs[1].shape[2] == 0:
        pytest.skip("the op answers without a kernel")
    options = {"multiprocessors": [1, 2, 5][seed % 3], "head_splits": [0, 1, 2][seed % 3]}
    options["deterministic"] = seed % 2
    if kernels.arch == 80:
        options["smem_limit"] = [0, 166912, SMALL_SMEM][seed // 3 % 3]
    kernels.check_backward(*inputs, **call, **options, has_dlse=True, seed=seed)
