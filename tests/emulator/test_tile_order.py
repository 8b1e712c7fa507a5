"""In which order the tiles of a call are worked on, and how evenly that keeps the GPU busy, with
the schedules of both architectures. Nothing is emulated."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
import torch
from emulator import Emulator

from flash_cute import ops

BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
#: Multiprocessors, MB of L2, and KB of shared memory that a block may have.
GPUS = {
    "H100": (132, 50, 227),
    "H200": (132, 60, 227),
    "H20": (78, 60, 227),
    "A100": (108, 40, 163),
}


@pytest.fixture(params=["sm80", "sm90"])
def kernels(request: pytest.FixtureRequest) -> Emulator:
    if request.param == "sm80":
        return request.getfixturevalue("emulator")
    return request.getfixturevalue("hopper")[torch.bfloat16]


@BOTH_MASKS
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("len_q", [512, 1000, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize(
    "head_dim, most", [(64, 1.04), (96, 1.11), (128, 1.07), (192, 1.09), (256, 1.07)]
)
def test_equal_work(kernels, head_dim, most, len_q, gpu, is_causal):
    """With about 16384 rows of 2048 elements, in as many heads and sequences as that makes."""
    if kernels.arch == 90 and gpu == "A100":
        pytest.skip("runs the sm80 kernels alone")
    shape = max(1, 16384 // len_q), 2048 // head_dim, 2048 // head_dim, len_q, head_dim
    window = {"window_right": 0} if is_causal else {}
    assert time_taken(kernels, *shape, *GPUS[gpu], **window) <= most


@pytest.mark.parametrize(
    "batch, heads, heads_kv, len_q, head_dim",
    [
        (1, 8, 8, 8192, 64),  # sm80: 1.56 with one head after the other
        (8, 12, 12, 1024, 64),  # sm90: 1.24 when a head's last tile, of 64 rows, came first
        (4, 24, 24, 700, 256),  # sm90: 1.48 in sections of 4, 46 and 46 heads
        (2, 32, 32, 1500, 256),  # sm90: 1.30 in sections as unequal
        (3, 24, 8, 2048, 64),
        (5, 16, 4, 3000, 64),
        (1, 28, 4, 8000, 128),
        # Fewer than 1024 keys: heads of 4 equal tiles, of which two rounds hold whole ones; of
        # tiles that are not; of a number that leaves the last two rounds empty.
        (32, 8, 8, 512, 256),
        (32, 10, 10, 512, 192),
        (32, 21, 21, 512, 96),
        (33, 16, 16, 520, 64),
        (33, 16, 8, 576, 64),
        (4, 24, 24, 768, 256),
    ],
)
def test_odd_numbers_of_heads(kernels, batch, heads, heads_kv, len_q, head_dim):
    """Under a causal mask, with as much work in all as not to fit the blocks."""
    shape = batch, heads, heads_kv, len_q, head_dim
    assert time_taken(kernels, *shape, l2_mb=72, window_right=0) <= 1.15  # 48 MB for K and V


@pytest.mark.parametrize(
    "batch, heads, len_q, head_dim",
    [
        (52, 21, 624, 96),  # sm90: 1.18 as one sequence
        (39, 16, 824, 128),  # sm90: 1.17 as one sequence
    ],
)
def test_short_last_tiles(kernels, batch, heads, len_q, head_dim):
    """Without a mask, in heads of few tiles of which the last lacks rows."""
    if kernels.arch == 80:
        pytest.skip("takes no account of it")
    assert time_taken(kernels, batch, heads, heads, len_q, head_dim) <= 1.04


@pytest.mark.parametrize(
    "batch, heads, len_q, head_dim, is_causal, most",
    [
        (32, 21, 512, 96, False, 0.97),  # ten rounds of 256 rows, and 24 tiles in four parts each
        (1, 95, 512, 64, False, 0.88),  # one round, and 58 tiles in two parts each
        (1, 16, 512, 64, False, 0.76),  # 64 tiles of 128 rows in two parts each
        (1, 16, 512, 64, True, 0.76),
        (1, 16, 1024, 64, True, 0.86),  # 128 tiles; the 256 parts in two rounds, long with short
        (1, 8, 1024, 256, True, 0.76),
        (1, 5, 3000, 128, True, 0.80),  # 120 tiles, of which five have 56 rows and the most keys
        (1, 4, 4096, 96, True, 0.90),  # 88 tiles of 192 rows in parts of 128 and 64
    ],
)
def test_parts_of_tiles(kernels, batch, heads, len_q, head_dim, is_causal, most):
    """Where whole tiles leave multiprocessors without work."""
    if kernels.arch == 80:
        pytest.skip("has whole tiles alone")
    window_right = 0 if is_causal else -1
    taken = time_taken(kernels, batch, heads, heads, len_q, head_dim, window_right=window_right)
    assert taken <= most


@pytest.mark.parametrize("window", [(0, -1), (300, -1), (700, 0), (64, 64)])
@pytest.mark.parametrize("len_q", [1000, 3000])
def test_windows(kernels, len_q, window):
    """Those without a right bound leave later rows fewer keys than the first."""
    windows = dict(zip(("window_left", "window_right"), window, strict=True))
    assert time_taken(kernels, 4, 16, 4, len_q, 64, **windows) <= 1.15


@pytest.mark.parametrize("window", [(256, 0), (100, 100)])
def test_windows_of_short_sequences(kernels, window):
    windows = dict(zip(("window_left", "window_right"), window, strict=True))
    assert time_taken(kernels, 33, 16, 16, 768, 64, **windows) <= 1.15


@pytest.mark.parametrize("head_dim", [128, 256])
def test_more_queries_than_keys(kernels, head_dim):
    """Under a causal mask, of which the first rows see no key."""
    shape = 33, 8, 8, 1024, head_dim
    assert time_taken(kernels, *shape, len_k=512, window_right=0) <= 1.15


@BOTH_MASKS
@pytest.mark.parametrize("l2_mb", [0, 50])
@pytest.mark.parametrize("len_q, len_k", [(1, 4096), (300, 4096), (256, 16384), (4000, 100)])
def test_each_row_has_one_block(kernels, len_q, len_k, l2_mb, is_causal):
    for multiprocessors in (1, 7, 132):
        dealt = kernels.deal(
            3,
            11,
            11,
            len_q,
            len_k,
            128,
            128,
            multiprocessors,
            window_right=0 if is_causal else -1,
            l2_bytes=l2_mb << 20,
        )
        assert dealt[:, 0].min() >= 0
        assert kernels.arch == 80 or dealt[:, 0].max() < multiprocessors
        assert_each_row_once(dealt, 3, 11, len_q)


def assert_each_row_once(dealt: torch.Tensor, batch: int, heads: int, len_q: int) -> None:
    """Of each head, the tiles and parts of tiles begin with row 0 and where others end."""
    ends: dict[tuple[int, int], int] = {}
    for row0, row_end, head, sequence in sorted(dealt[:, 1:].tolist()):
        assert row0 == ends.get((sequence, head), 0) < row_end
        ends[sequence, head] = row_end
    assert ends == dict.fromkeys(itertools.product(range(batch), range(heads)), len_q)


def time_taken(
    kernels: Emulator,
    batch: int,
    heads: int,
    heads_kv: int,
    len_q: int,
    head_dim: int,
    multiprocessors: int = 132,
    l2_mb: int = 50,
    smem_kb: int = 227,
    *,
    len_k: int | None = None,
    window_left: int = -1,
    window_right: int = -1,
) -> float:
    """Until the last block ends, as a multiple of the least that it can be with whole tiles: the
    mean over the places for blocks, or j tiles, each as the shortest of so many that one place has
    j of them. A tile takes a time of 1 for each block of keys, and of sm90 for each consumer. (For
    a head's last tile, if it has few rows, sm80 may take half of that; its order takes no account
    of it.) A part of a tile takes the mean of its share of that and all. Each row has one block."""
    len_k = len_k or len_q
    tile = kernels.tile(
        *(head_dim, len_q, len_k),
        **{"batch": batch, "heads": heads, "heads_kv": heads_kv},
        is_banded=(window_left, window_right) != (-1, -1),
        is_triangle=window_left < 0 <= window_right,
        multiprocessors=multiprocessors,
    )
    if kernels.arch == 80:
        (tile,) = (t for t in ops.tiles_for(smem_kb << 10) if t["head_dim"] == head_dim)
    m, n = tile["block_m"], tile["block_n"]
    shape = batch, heads, heads_kv, len_q, len_k, head_dim
    windows = {"window_left": window_left, "window_right": window_right}
    dealt = kernels.deal(*shape, m, multiprocessors, l2_bytes=l2_mb << 20, **windows)
    assert_each_row_once(dealt, batch, heads, len_q)

    rows_together = m if kernels.arch == 80 else 64

    def key_blocks(row):  # from that row on
        row += len_k - len_q
        end = min(len_k, row + rows_together + window_right) if window_right >= 0 else len_k
        begin = max(0, row - window_left) if window_left >= 0 else 0
        return max(1, math.ceil(end / n) - begin // n)

    of_rows = [key_blocks(row) for row in range(0, len_q, rows_together)]
    until = torch.tensor([0, *itertools.accumulate(of_rows)], dtype=torch.float64)

    def time_of(row0, row_end):
        return until[-(row_end // -rows_together)] - until[row0 // rows_together]

    starts = torch.arange(0, len_q, m)
    of_tile = time_of(starts, (starts + m).clamp(max=len_q))
    times = 0.5 * (time_of(dealt[:, 1], dealt[:, 2]) + of_tile[dealt[:, 1] // m])
    places = [0.0] * multiprocessors * tile["ctas_per_sm"]
    for block, time in zip(dealt[:, 0].tolist(), times.tolist(), strict=True):
        if kernels.arch == 80:  # a block for each tile, where there is room first
            heapq.heapreplace(places, places[0] + time)
        else:
            places[block] += time
    whole = of_tile.repeat(batch * heads)
    longest_first = whole.sort(descending=True).values[:: len(places)].tolist()
    mean = whole.sum().item() / len(places)
    return max(places) / max([mean] + [(j + 1) * time for j, time in enumerate(longest_first)])
