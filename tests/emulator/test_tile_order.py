"""The tile schedules of both architectures: each tile is scheduled once, and SMs are evenly busy.
Nothing is emulated."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
import torch
from emulator import Emulator

#: Multiprocessors, MB of L2, and KB of shared memory that a CTA may have.
GPUS = {"H100": (132, 50, 227), "H20": (78, 60, 227), "A100": (108, 40, 163)}
FULL, CAUSAL = {}, {"window_right": 0}


def assert_each_row_once(scheduled: torch.Tensor, batch: int, heads: int, len_q: int) -> None:
    """Of each head, the work tiles begin with row 0 and where others end."""
    ends: dict[tuple[int, int], int] = {}
    for row0, row_end, head, sequence in sorted(scheduled[:, 1:].tolist()):
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
    gpu: tuple[int, int, int] = (132, 50, 227),
    len_k: int | None = None,
    **window: int,
) -> float:
    """Until the last CTA ends, as a multiple of the least that it can be with whole tiles. That is
    the mean over the places for CTAs. Or it is j times the shortest of so many tiles that one place
    has j of them. A tile takes a time of 1 for each block of keys, and of sm90 for each consumer.
    A subtile takes the mean of its share of that and all. (Of a head's last tile, if it has few
    rows, sm80 may take half. Its order takes no account of it.)"""
    multiprocessors, l2_mb, smem_kb = gpu
    request = {"batch": batch, "heads_q": heads, "heads_kv": heads_kv, "len_q": len_q}
    request |= {"len_k": len_k or len_q, "head_dim": head_dim, **window}
    request |= {"multiprocessors": multiprocessors, "l2_bytes": l2_mb << 20}
    plan = kernels.plan(**request, splits=1, smem_per_cta=smem_kb << 10)
    m, n, len_k = plan["block_m"], plan["block_n"], request["len_k"]
    scheduled = kernels.schedule(m, **request)
    assert_each_row_once(scheduled, batch, heads, len_q)

    rows_together = m if kernels.arch == 80 else 64
    left, right = window.get("window_left", -1), window.get("window_right", -1)

    def key_blocks(row: int) -> int:  # from that row on
        row += len_k - len_q
        end = min(len_k, row + rows_together + right) if right >= 0 else len_k
        begin = max(0, row - left) if left >= 0 else 0
        return max(1, math.ceil(end / n) - begin // n)

    of_rows = [key_blocks(row) for row in range(0, len_q, rows_together)]
    until = torch.tensor([0, *itertools.accumulate(of_rows)], dtype=torch.float64)

    def time_of(row0: torch.Tensor, row_end: torch.Tensor) -> torch.Tensor:
        return until[-(row_end // -rows_together)] - until[row0 // rows_together]

    starts = torch.arange(0, len_q, m)
    of_tile = time_of(starts, (starts + m).clamp(max=len_q))
    times = 0.5 * (time_of(scheduled[:, 1], scheduled[:, 2]) + of_tile[scheduled[:, 1] // m])
    places = [0.0] * multiprocessors * plan["ctas_per_sm"]
    for cta, time in zip(scheduled[:, 0].tolist(), times.tolist(), strict=True):
        if kernels.arch == 80:  # a CTA for each tile, where there is room first
            heapq.heapreplace(places, places[0] + time)
        else:
            places[cta] += time
    whole = of_tile.repeat(batch * heads)
    longest_first = whole.sort(descending=True).values[:: len(places)].tolist()
    mean = whole.sum().item() / len(places)
    return max(places) / max([mean] + [(j + 1) * time for j, time in enumerate(longest_first)])


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "head_dim, most", [(64, 1.04), (96, 1.11), (128, 1.07), (192, 1.09), (256, 1.07)]
)
def test_training(unsplit, head_dim, most, gpu):
    """With about 16384 rows of 2048 elements, in as many heads and sequences as that makes."""
    if unsplit.arch == 90 and gpu == "A100":
        pytest.skip("runs the sm80 kernels alone")
    for len_q, mask in itertools.product(
        [512, 1000, 1024, 2048, 4096, 8192, 16384], [FULL, CAUSAL]
    ):
        shape = max(1, 16384 // len_q), 2048 // head_dim, 2048 // head_dim, len_q, head_dim
        assert time_taken(unsplit, *shape, GPUS[gpu], **mask) <= most, (len_q, mask)


@pytest.mark.parametrize(
    "shape, mask, most",
    [
        # An odd number of heads, with more work than fits the CTAs evenly.
        ((1, 8, 8, 8192, 64), CAUSAL, 1.15),  # sm80: 1.56 with one head after the other
        ((8, 12, 12, 1024, 64), CAUSAL, 1.15),  # sm90: 1.24 with a head's short last tile first
        ((4, 24, 24, 700, 256), CAUSAL, 1.15),  # sm90: 1.48 in groups of 4, 46 and 46 heads
        ((2, 32, 32, 1500, 256), CAUSAL, 1.15),  # sm90: 1.30 in groups as unequal
        ((3, 24, 8, 2048, 64), CAUSAL, 1.15),
        ((5, 16, 4, 3000, 64), CAUSAL, 1.15),
        ((1, 28, 4, 8000, 128), CAUSAL, 1.15),
        # Fewer than 1024 keys: heads of 4 equal tiles, of which two rounds hold whole ones; of
        # tiles that are not; of a number that leaves the last two rounds empty.
        ((32, 8, 8, 512, 256), CAUSAL, 1.15),
        ((32, 10, 10, 512, 192), CAUSAL, 1.15),
        ((32, 21, 21, 512, 96), CAUSAL, 1.15),
        ((33, 16, 16, 520, 64), CAUSAL, 1.15),
        ((33, 16, 8, 576, 64), CAUSAL, 1.15),
        ((4, 24, 24, 768, 256), CAUSAL, 1.15),
        # Windows. Without a right bound later rows see fewer keys than the first.
        *(
            ((4, 16, 4, len_q, 64), {"window_left": left, "window_right": right}, 1.15)
            for len_q in (1000, 3000)
            for left, right in ((0, -1), (300, -1), (700, 0), (64, 64))
        ),
        ((33, 16, 16, 768, 64), {"window_left": 256, "window_right": 0}, 1.15),
        ((33, 16, 16, 768, 64), {"window_left": 100, "window_right": 100}, 1.15),
        # More queries than keys: the first rows see no key.
        ((33, 8, 8, 1024, 128), {**CAUSAL, "len_k": 512}, 1.15),
        ((33, 8, 8, 1024, 256), {**CAUSAL, "len_k": 512}, 1.15),
    ],
)
def test_unequal_tiles(unsplit, shape, mask, most):
    assert time_taken(unsplit, *shape, (132, 72, 227), **mask) <= most  # 48 MB for K and V


@pytest.mark.parametrize(
    "batch, heads, len_q, head_dim, mask, most",
    [
        # Without a mask, in heads of few tiles of which the last lacks rows.
        (52, 21, 624, 96, FULL, 1.04),  # 1.18 as one sequence
        (39, 16, 824, 128, FULL, 1.04),  # 1.17 as one sequence
        # Where whole tiles leave multiprocessors without work.
        (32, 21, 512, 96, FULL, 0.97),  # ten rounds of 256 rows, and 24 tiles of four subtiles each
        (1, 95, 512, 64, FULL, 0.88),  # one round, and 58 tiles of two subtiles each
        (1, 16, 512, 64, FULL, 0.76),  # 64 tiles of 128 rows, of two subtiles each
        (1, 16, 512, 64, CAUSAL, 0.76),
        (1, 16, 1024, 64, CAUSAL, 0.86),  # 256 subtiles in two rounds, long with short
        (1, 8, 1024, 256, CAUSAL, 0.76),
        (1, 5, 3000, 128, CAUSAL, 0.80),  # of 120 tiles five have 56 rows and the most keys
        (1, 4, 4096, 96, CAUSAL, 0.90),  # 88 tiles of 192 rows, in subtiles of 128 and 64
    ],
)
def test_subtiles_and_short_tiles_of_sm90(sm90, batch, heads, len_q, head_dim, mask, most):
    assert time_taken(sm90, batch, heads, heads, len_q, head_dim, **mask) <= most


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("len_q, len_k", [(1, 4096), (300, 4096), (256, 16384), (4000, 100)])
def test_each_row_has_one_cta(unsplit, len_q, len_k, mask):
    request = {"batch": 3, "heads_q": 11, "heads_kv": 11, "len_q": len_q, "len_k": len_k, **mask}
    for multiprocessors, l2_mb in itertools.product((1, 7, 132), (0, 50)):
        device = {"multiprocessors": multiprocessors, "l2_bytes": l2_mb << 20}
        scheduled = unsplit.schedule(128, **request, head_dim=128, **device)
        assert scheduled[:, 0].min() >= 0
        assert unsplit.arch == 80 or scheduled[:, 0].max() < multiprocessors
        assert_each_row_once(scheduled, 3, 11, len_q)
