"""The SM90 forward kernels on the emulated machine. The device has few multiprocessors, so that
each thread block takes several tiles and the rings of stages go round."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from cases import check
from emulator import ACCESSES, EmulationError
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
BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(hopper, head_dim, is_causal):
    inputs = random_inputs(2, 4, 129, head_dim, heads_kv=2, len_k=193, dtype=BF16)
    check(hopper[BF16], *map(poisoned, inputs), is_causal, multiprocessors=3)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", [64, 48])
def test_fp16(hopper, head_dim, is_causal):
    inputs = random_inputs(2, 4, 129, head_dim, heads_kv=2, len_k=193, dtype=FP16)
    check(hopper[FP16], *map(poisoned, inputs), is_causal, multiprocessors=3)


@BOTH_MASKS
@pytest.mark.parametrize("len_q, len_k", [*LENGTHS, (513, 513)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(hopper, head_dim, len_q, len_k, is_causal):
    inputs = random_inputs(1, 2, len_q, head_dim, len_k=len_k, dtype=BF16)
    check(hopper[BF16], *map(poisoned, inputs), is_causal, multiprocessors=1)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(hopper, seed):
    inputs, call = random_call(seed, BF16)
    if call["softmax_scale"] in (0.0, -0.5):  # which are sm80's
        call["softmax_scale"] = 2.0
    no_keys = pytest.raises(EmulationError, match="k has no keys")
    with nullcontext() if inputs[1].shape[2] else no_keys:
        check(hopper[BF16], *inputs, **call, multiprocessors=[1, 2, 5][seed % 3], seed=seed)


@BOTH_MASKS
@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("head_dim", [32, 96, 128, 256])
def test_results_do_not_depend_on_who_is_first(hopper, head_dim, seed, is_causal):
    inputs = random_inputs(1, 3, 400, head_dim, heads_kv=1, len_k=500, dtype=BF16)
    # Up to three multiprocessors, with the same tile.
    first = check(hopper[BF16], *map(poisoned, inputs), is_causal, multiprocessors=3)
    machine = {"multiprocessors": 1 + seed % 3, "seed": seed}
    other = check(hopper[BF16], *map(poisoned, inputs), is_causal, **machine)
    assert all(map(torch.equal, first[:2], other[:2]))


@BOTH_MASKS
@pytest.mark.parametrize(
    "heads, heads_kv", [(2, 1), (3, 1), (7, 1), (8, 2), (20, 1), (33, 1), (64, 1), (65, 1)]
)
@pytest.mark.parametrize("len_q", [1, 5, 70])
def test_groups_of_heads(hopper, len_q, heads, heads_kv, is_causal):
    inputs = random_inputs(2, heads, len_q, 64, heads_kv=heads_kv, len_k=150, dtype=BF16)
    check(hopper[BF16], *map(poisoned, inputs), is_causal, multiprocessors=2)


@BOTH_MASKS
@pytest.mark.parametrize("scale", [1e-3, 1e-42, 3.0, 100.0])
def test_scales(hopper, scale, is_causal):
    inputs = random_inputs(1, 2, 100, 64, len_k=130, dtype=BF16)
    check(hopper[BF16], *map(poisoned, inputs), is_causal, scale)


@BOTH_MASKS
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_below_zero_that_rise(hopper, head_dim, scale, is_causal):
    inputs = rising_inputs(1, 2, 150, head_dim, len_k=700, dtype=BF16)
    check(hopper[BF16], *map(poisoned, inputs), is_causal, scale)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_without_a_key(hopper, head_dim):
    inputs = random_inputs(1, 2, 600, head_dim, len_k=40, dtype=BF16)
    out, lse, _ = check(hopper[BF16], *map(poisoned, inputs), True, multiprocessors=1)
    assert torch.all(out[:, :, :560] == 0) and torch.all(lse[:, :, :560] == -math.inf)


@BOTH_MASKS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_layouts(hopper, head_dim, layout, is_causal):
    inputs = random_inputs(2, 3, 70, head_dim, dtype=BF16)
    inputs = (poisoned(x, **LAYOUTS[layout]) for x in inputs)
    check(hopper[BF16], *inputs, is_causal, multiprocessors=2)


@pytest.mark.parametrize("sizes", [(1, 3, 70, 64), (2, 1, 70, 64), (1, 1, 70, 64)])
@pytest.mark.parametrize("heads_kv", [3, 1])
def test_expanded(hopper, heads_kv, sizes):
    inputs = (
        x[tuple(map(slice, sizes))].clone().expand(x.shape)
        for x in random_inputs(2, 3, 70, 64, heads_kv=heads_kv, dtype=BF16)
    )
    check(hopper[BF16], *inputs, True, multiprocessors=2)


@pytest.mark.parametrize("window_left, window_right, diagonal_offset", BANDS)
@pytest.mark.parametrize("len_q, len_k", [(129, 129), (200, 700), (700, 200), (1, 200)])
def test_bands(hopper, len_q, len_k, window_left, window_right, diagonal_offset):
    inputs = random_inputs(1, 2, len_q, 128, heads_kv=1, len_k=len_k, dtype=BF16)
    check(
        hopper[BF16],
        *map(poisoned, inputs),
        multiprocessors=1,
        window_left=window_left,
        window_right=window_right,
        diagonal_offset=diagonal_offset,
    )


@pytest.mark.parametrize("head_dim", [64, 48])
def test_rms_error_with_outliers(hopper, head_dim):
    inputs = inputs_with_outliers(1, 1, 512, head_dim, dtype=FP16)
    out, _, _ = hopper[FP16].forward(*map(poisoned, inputs), 1 / math.sqrt(head_dim))
    check_rms_error(out, *inputs)


@BOTH_MASKS
@pytest.mark.parametrize("size", [1e-6, 30.0])
def test_magnitudes(hopper, size, is_causal):
    q, k, v = random_inputs(1, 2, 129, 64, dtype=FP16)
    check(hopper[FP16], q * size, k, v * size, is_causal)


def test_keys_beyond_2_to_the_31_elements(hopper):
    rows, stride = 70, 2**25
    storage = torch.empty(rows * stride, dtype=BF16).view(rows, stride)  # takes no memory unused
    q, k_values, v_values = random_inputs(1, 1, 40, 64, len_k=rows, dtype=BF16)
    storage[:, :64], storage[:, 64:128] = k_values[0, 0], v_values[0, 0]
    check(hopper[BF16], q, storage[None, None, :, :64], storage[None, None, :, 64:128], True)


@pytest.mark.parametrize("mask", ["full", "banded"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_counts(hopper, head_dim, mask):
    """Of each row of the tile table, which serves two heads with as many queries as it has in a
    tile."""
    rows = [row for row in hopper[BF16].tiles() if row["head_dim"] == head_dim]
    for row in rows:
        if row["mask"] in ("any", mask):
            call = {"heads": 2, "is_banded": mask == "banded", "multiprocessors": 1}
            assert hopper[BF16].tile(head_dim, row["block_m"], **call) == row
            check_counts(hopper[BF16], row, mask)


def check_counts(emulator, tile, mask):
    heads, head_dim, key_blocks = 2, tile["head_dim"], 3
    m, n = tile["block_m"], key_blocks * tile["block_n"]
    inputs = random_inputs(1, heads, m, head_dim, len_k=n, dtype=BF16)
    # Under a mask that keeps the last key from the first query.
    band = {"window_right": 0, "diagonal_offset": n - 2} if mask == "banded" else {}
    counters = check(emulator, *map(poisoned, inputs), **band, multiprocessors=1)[2]
    # The copy engine reads each element once, threads read none.
    assert counters.box_bytes == heads * (m + 2 * n) * head_dim * 2
    assert counters.global_reads_16 == counters.global_reads == 0
    # It writes each once as well, from where it lies in shared memory once. Threads write the LSE.
    assert counters.box_bytes_out == heads * m * head_dim * 2
    assert counters.store_matrix.wavefronts == heads * m * head_dim * 2 // 128
    assert (counters.global_writes_16, counters.global_writes) == (0, heads * m)
    # The producer tells each consumer of the tiles and of the end, in 16 bytes that g++ takes for
    # four words; its four warps read that.
    told = (heads + 1) * 4 * m // 64
    assert (counters.store.wavefronts, counters.load.wavefronts) == (told, 4 * told)
    assert {access: getattr(counters, access).conflicts for access in ACCESSES} == dict.fromkeys(
        ACCESSES, 0
    )
    # 16 deep each: along the head for S, along the keys for O.
    assert counters.products == heads * m // 16 * (key_blocks * head_dim // 16 + n // 16)
    assert counters.block_barriers == 1


@pytest.mark.parametrize("len_q", [1, 64, 65, 300])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_consumers_without_rows_multiply_nothing(hopper, head_dim, len_q):
    n = 256  # whole blocks of every tile
    inputs = random_inputs(1, 1, len_q, head_dim, len_k=n, dtype=BF16)
    counters = check(hopper[BF16], *map(poisoned, inputs), multiprocessors=1)[2]
    warps = 4 * math.ceil(len_q / 64)
    blocks = n // hopper[BF16].tile(head_dim, len_q, n, multiprocessors=1)["block_n"]
    assert counters.products == warps * (blocks * head_dim // 16 + n // 16)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_products_under_a_causal_mask(hopper, head_dim):
    """Each consumer stops at the last block of which its 64 rows see a key."""
    tile = hopper[BF16].tile(head_dim, is_banded=True)
    m, n = 2 * tile["block_m"], tile["block_n"]
    assert hopper[BF16].tile(head_dim, m, is_banded=True, multiprocessors=1) == tile
    inputs = random_inputs(1, 1, m, head_dim, dtype=BF16)
    counters = check(hopper[BF16], *map(poisoned, inputs), True, multiprocessors=1)[2]
    blocks = sum(math.ceil(end / n) for end in range(64, m + 1, 64))
    assert counters.products == 4 * blocks * (head_dim // 16 + n // 16)
