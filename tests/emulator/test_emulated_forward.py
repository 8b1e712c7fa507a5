"""The forward kernels on the emulated machine: the cases of test_forward.py that the kernels
themselves decide, where their size allows."""

from __future__ import annotations

import math

import pytest
import torch
from cases import check
from support import (
    BANDS,
    HEAD_DIMS,
    LAYOUTS,
    LENGTHS,
    check_rms_error,
    inputs_with_outliers,
    poisoned,
    random_call,
    random_inputs,
    rising_inputs,
)

BF16, FP16 = torch.bfloat16, torch.float16
BOTH_DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
# Of one block's shared memory, in bytes: what sm_90, sm_80 and sm_86 lend. Between them every row
# of the tile table is chosen.
SMEM_LIMITS = [232448, 166912, 101376]


@BOTH_MASKS
@BOTH_DTYPES
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_and_dtypes(emulator, dtype, head_dim, is_causal):
    inputs = random_inputs(2, 4, 129, head_dim, heads_kv=2, len_k=193, dtype=dtype)
    check(emulator, *map(poisoned, inputs), is_causal)


@BOTH_MASKS
@BOTH_DTYPES
@pytest.mark.parametrize("smem_limit", SMEM_LIMITS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_every_row_of_the_tile_table(emulator, dtype, head_dim, smem_limit, is_causal):
    inputs = random_inputs(1, 2, 200, head_dim, heads_kv=1, len_k=270, dtype=dtype)
    check(emulator, *map(poisoned, inputs), is_causal, smem_limit=smem_limit)


@BOTH_MASKS
@pytest.mark.parametrize("len_q, len_k", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_lengths(emulator, head_dim, len_q, len_k, is_causal):
    inputs = random_inputs(1, 1, len_q, head_dim, len_k=len_k, dtype=BF16)
    check(emulator, *map(poisoned, inputs), is_causal)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(emulator, seed):
    inputs, call = random_call(seed, [BF16, FP16][seed % 2])
    device = {"smem_limit": SMEM_LIMITS[seed % 3], "multiprocessors": [1, 5, 132][seed // 3 % 3]}
    check(emulator, *inputs, **call, **device, splits=[0, 0, 1, 2, 7][seed % 5], seed=seed)


@BOTH_MASKS
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_results_do_not_depend_on_the_order_of_threads(emulator, head_dim, seed, is_causal):
    inputs = random_inputs(1, 2, 150, head_dim, len_k=260, dtype=FP16)
    first = check(emulator, *map(poisoned, inputs), is_causal)
    other = check(emulator, *map(poisoned, inputs), is_causal, seed=seed)
    assert all(map(torch.equal, first[:2], other[:2]))


@BOTH_MASKS
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3, 1e-42, 3.0])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_scales(emulator, head_dim, scale, is_causal):
    for len_q in (40, 100):
        inputs = random_inputs(1, 2, len_q, head_dim, len_k=130, dtype=BF16)
        check(emulator, *map(poisoned, inputs), is_causal, scale)


@BOTH_DTYPES
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_few_rows_have_the_bits_of_a_whole_tile(emulator, head_dim, dtype):
    q, k, v = random_inputs(1, 2, 128, head_dim, len_k=200, dtype=dtype)
    whole = check(emulator, q, k, v, False, 3.0)
    few = check(emulator, q[:, :, :37], k, v, False, 3.0)
    assert all(torch.equal(a[:, :, :37], b) for a, b in zip(whole[:2], few[:2], strict=True))


def test_rows_that_skip_blocks_rise(emulator):
    """The 128 x 32 tile has two blocks at its end that only half of its rows see."""
    inputs = random_inputs(1, 2, 200, 128, dtype=BF16)
    check(emulator, *map(poisoned, inputs), True, 3.0, smem_limit=99 * 1024)


@BOTH_MASKS
@BOTH_DTYPES
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_scores_below_zero_that_rise(emulator, head_dim, scale, dtype, is_causal):
    inputs = rising_inputs(1, 2, 150, head_dim, len_k=300, dtype=dtype)
    check(emulator, *map(poisoned, inputs), is_causal, scale)


@pytest.mark.parametrize("scale", [1e4, -1e10, 1e300])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_huge_scales_pick_the_greatest_scores(emulator, head_dim, scale):
    q, k, v = random_inputs(1, 2, 100, head_dim, len_k=130, dtype=BF16)
    q, k = (2 * q).round(), (2 * k).round()
    out, _, _ = emulator.forward(q, k, v, scale)
    scores = q.double() @ k.double().mT * math.copysign(1, scale)
    best = (scores == scores.amax(-1, keepdim=True)).double()
    exact = best / best.sum(-1, keepdim=True) @ v.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(BF16).eps)


@pytest.mark.parametrize("scale", [0.0, -2.0, 0.1])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_rows_without_a_key(emulator, head_dim, scale):
    inputs = random_inputs(1, 2, 300, head_dim, len_k=40, dtype=BF16)
    out, lse, _ = check(emulator, *map(poisoned, inputs), True, scale)
    assert torch.all(out[:, :, :260] == 0) and torch.all(lse[:, :, :260] == -math.inf)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", [32, 192])
def test_no_keys(emulator, head_dim, is_causal):
    q, k, v = random_inputs(2, 2, 70, head_dim, len_k=0, dtype=BF16)
    out, lse, _ = check(emulator, q, k, v, is_causal)
    assert torch.all(out == 0) and torch.all(lse == -math.inf)


@BOTH_MASKS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_layouts(emulator, head_dim, layout, is_causal):
    inputs = random_inputs(2, 3, 70, head_dim, dtype=BF16)
    check(emulator, *(poisoned(x, **LAYOUTS[layout]) for x in inputs), is_causal)


@pytest.mark.parametrize("sizes", [(1, 3, 70, 64), (2, 1, 70, 64), (2, 3, 1, 64)])
def test_expanded(emulator, sizes):
    inputs = [
        x[tuple(map(slice, sizes))].clone().expand(x.shape)
        for x in random_inputs(2, 3, 70, 64, dtype=BF16)
    ]
    check(emulator, *inputs, True)


@pytest.mark.parametrize("window_left, window_right, diagonal_offset", BANDS)
@pytest.mark.parametrize("len_q, len_k", [(129, 129), (100, 300), (300, 100), (40, 200), (1, 200)])
def test_bands(emulator, len_q, len_k, window_left, window_right, diagonal_offset):
    # Of the shorter ones, three heads share a tile.
    inputs = random_inputs(1, 6, len_q, 64, heads_kv=2, len_k=len_k, dtype=BF16)
    check(
        emulator,
        *map(poisoned, inputs),
        window_left=window_left,
        window_right=window_right,
        diagonal_offset=diagonal_offset,
    )


@pytest.mark.parametrize("group", [2, 3, 8, 130])
def test_heads_of_one_query_share_tiles(emulator, group):
    def tiles(heads):  # each of which waits equally often
        inputs = random_inputs(2, heads, 1, 64, heads_kv=2, len_k=150, dtype=BF16)
        return check(emulator, *map(poisoned, inputs))[2].block_barriers

    assert tiles(2 * group) == -(-group // 128) * tiles(2)


def test_heads_of_a_tile_read_the_keys_of_their_window_once(emulator):
    inputs = random_inputs(1, 3, 1, 64, heads_kv=1, len_k=200, dtype=BF16)
    band = {"window_left": 10, "window_right": 0, "diagonal_offset": 100}
    counters = check(emulator, *map(poisoned, inputs), **band)[2]
    block_n = emulator.tile(64)["block_n"]  # the window lies in one block
    assert counters.global_reads_16 == (3 + 2 * block_n) * 64 // 8


@pytest.mark.parametrize("len_q, tiles", [(5, 1), (50, 2), (128, 3), (130, 6), (180, 6)])
def test_heads_of_few_queries_share_tiles(emulator, len_q, tiles):
    def barriers(heads, is_causal=False):
        inputs = random_inputs(2, heads, len_q, 64, heads_kv=1, len_k=150, dtype=BF16)
        return check(emulator, *map(poisoned, inputs), is_causal)[2].block_barriers

    assert barriers(3) * -(-len_q // 128) == tiles * barriers(1)
    if tiles == 1:
        assert barriers(3, is_causal=True) == barriers(1, is_causal=True)


@BOTH_MASKS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_heads_that_share_tiles(emulator, layout, is_causal):
    inputs = random_inputs(2, 6, 5, 40, heads_kv=2, len_k=150, dtype=BF16)
    check(emulator, *(poisoned(x, **LAYOUTS[layout]) for x in inputs), is_causal)


@BOTH_MASKS
def test_expanded_heads_that_share_tiles(emulator, is_causal):
    q, k, v = random_inputs(2, 3, 5, 64, heads_kv=1, len_k=150, dtype=BF16)
    check(emulator, q[:, :1].expand_as(q), k, v, is_causal)
    check(emulator, q[:, :, :1].expand_as(q), k, v, is_causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rms_error_with_outliers(emulator, head_dim):
    inputs = inputs_with_outliers(1, 1, 512, head_dim, dtype=FP16)
    out, _, _ = emulator.forward(*map(poisoned, inputs), 1 / math.sqrt(head_dim))
    check_rms_error(out, *inputs)


@BOTH_MASKS
@BOTH_DTYPES
@pytest.mark.parametrize("size", [1e-6, 30.0])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_magnitudes(emulator, head_dim, dtype, size, is_causal):
    q, k, v = random_inputs(1, 2, 129, head_dim, dtype=dtype)
    check(emulator, q * size, k, v * size, is_causal)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_nan_in_v_follows_the_formula(emulator, head_dim):
    q, k, v = random_inputs(1, 2, 129, head_dim, len_k=300, dtype=BF16)
    v[0, 1, 123, 5] = math.nan
    out, _, _ = check(emulator, q, k, v)
    assert torch.all(out[0, 1, :, 5].isnan()) and out.isnan().sum() == 129


def test_keys_beyond_2_to_the_31_elements(emulator):
    rows, stride = 70, 2**25
    storage = torch.empty(rows * stride, dtype=BF16).view(rows, stride)  # takes no memory unused
    q, k_values, v_values = random_inputs(1, 1, 40, 64, len_k=rows, dtype=BF16)
    storage[:, :64], storage[:, 64:128] = k_values[0, 0], v_values[0, 0]
    k, v = storage[None, None, :, :64], storage[None, None, :, 64:128]
    assert k.stride(2) * k.shape[2] > 2**31
    check(emulator, q, k, v, True)
