"""Sequences of their own lengths on the emulated machine: packed, padded, with sinks."""

from __future__ import annotations

import pytest
from emulator import EmulationError, Emulator
from packed import BIASED, CALLS, Call, check_sink
from torch import bfloat16 as BF16
from torch import float32 as FP32


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", [0, 1])
def test_forward(unsplit, name, seed):
    Call(**CALLS[name]).check(unsplit, seed)


@pytest.mark.parametrize("name", CALLS)
def test_few_tiles(library, name):
    """There are no more than multiprocessors: sm90 has no list of them."""
    Call(**CALLS[name]).check(Emulator(library, 90), seed=2)


@pytest.mark.parametrize("name", [*CALLS, "bias"])
def test_split_kv(library, name):
    call = Call(**CALLS[name]) if name in CALLS else Call(**BIASED["whole"], is_padded=True)
    for splits in (2, 3):
        call.check(Emulator(library, 80, splits=splits), seed=splits)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (-1, 0), "has_sink": True, "heads": 6},
        {"window": (200, 100), "heads_kv": 2},
        {"window": (-1, -1), "head_dim": 192, "is_padded": True, "starts": True},
    ],
    ids=["causal-sink", "window", "padded"],
)
def test_split_kv_of_sm90(library, options):
    """Keys enough for each split, of some sequences."""
    call = Call([(3, 700), (130, 500), (1, 900), (0, 5), (2, 0)], **options)
    for splits in (2, 3):
        sm90 = Emulator(library, 90, splits=splits, multiprocessors=splits)
        call.check(sm90, seed=splits)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(unsplit, name, deterministic):
    Call(**CALLS[name]).check_backward(unsplit, seed=2, deterministic=deterministic)


@pytest.mark.parametrize("name", BIASED)
def test_bias(unsplit, name):
    for head_dim_v in (64, 20):
        call = Call(**BIASED[name], is_padded=True, head_dim_v=head_dim_v)
        call.check(unsplit)
        for deterministic in (False, True):
            call.check_backward(unsplit, seed=2, deterministic=deterministic)


#: Head dims at which the forward and the backward have kernels of sm90 that read a bias.
BIAS_SM90 = {"forward": (32, 64, 96, 128, 192), "backward": (32, 64, 128, 192)}


@pytest.mark.parametrize(
    "head_dim, head_dim_v", [*((d, d) for d in (32, 96, 128, 192, 256)), (192, 128)]
)
def test_bias_of_head_dims(unsplit, head_dim, head_dim_v):
    head_dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    call = Call(**{**BIASED["whole"], **head_dims}, is_padded=True)
    for op, check in (("forward", call.check), ("backward", call.check_backward)):
        if unsplit.arch == 80 or head_dim in BIAS_SM90[op]:
            check(unsplit)
        else:
            with pytest.raises(EmulationError, match="read a bias at this head dim"):
                check(unsplit)


#: Of sm90's tile of 128 columns, or of (192, 128), a strip has no column.
LACK_STRIPS = [(128, 8), (8, 128), (192, 64)]


@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [
        *((d, d) for d in (32, 96, 128, 192, 256)),
        (64, 40),
        (40, 64),
        (192, 72),
        (192, 128),
        *LACK_STRIPS,
    ],
)
def test_head_dims(unsplit, head_dim, head_dim_v):
    for changes in ({}, {"softcap": 2.0, "slopes": "h"}):
        lengths = [(200, 130), (33, 70), (0, 9)]
        head_dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
        call = Call(lengths, **head_dims, window=(90, 0), gap=1, **changes)
        call.check(unsplit)
        if unsplit.arch == 90 and (head_dim, head_dim_v) in LACK_STRIPS:
            with pytest.raises(EmulationError, match="have to fill the tile's strips"):
                call.check_backward(unsplit)
            continue
        call.check_backward(unsplit)
        call.check_backward(unsplit, deterministic=True)


@pytest.mark.parametrize("window", [(128, 0), (64, 64), (20, 0)])
def test_narrow_windows(library, window):
    """Where a CTA walks along the diagonal."""
    lengths = [(n, n) for n in (70, 0, 1, 64, 700, 130)]
    for head_dim, multiprocessors in ((128, 2), (64, 20)):
        sm90 = Emulator(library, 90, multiprocessors=multiprocessors)
        call = Call(lengths, head_dim=head_dim, window=window, heads_kv=2, has_sink=True)
        call.check_backward(sm90, seed=multiprocessors)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1)])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_tiles_that_begin_at_other_rows(library, head_dim, window):
    """A sequence has several tiles, and blocks of rows ahead of those that see a tile."""
    call = Call([(500, 500), (70, 300)], head_dim=head_dim, window=window, gap=1)
    call.check_backward(Emulator(library, 90))
    if window[1] == 0:  # behind the first 2048 rows, and of those few
        Call([(2200, 300)], head_dim=head_dim, window=window).check_backward(Emulator(library, 90))


@pytest.mark.parametrize(("heads", "batch"), [(10, 2), (9, 1)])
def test_last_heads_side_by_side(library, heads, batch):
    """Groups of heads, of which the last one is the largest."""
    lengths = [(16, 400), (20, 20)][:batch]
    call = Call(lengths, heads=heads, heads_kv=heads, window=(-1, 0))
    call.check_backward(Emulator(library, 90, multiprocessors=2))


@pytest.mark.parametrize("name", [*CALLS, *(f"bias of {name}" for name in BIASED)])
def test_fp32(library, name):
    options = CALLS.get(name) or {**BIASED[name.removeprefix("bias of ")], "is_padded": True}
    call = Call(**{**options, "dtype": FP32, "bias_dtype": FP32})
    call.check(Emulator(library, 80))
    call.check_backward(Emulator(library, 80))


@pytest.mark.parametrize("softcap", [1.0, 50.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap_of_fp32(library, head_dim, softcap):
    changes = {"softcap": softcap, "slopes": "h", "bias": "k", "is_padded": True}
    call = Call([(100, 130)], head_dim=head_dim, window=(-1, 0), dtype=FP32, **changes)
    call.check(Emulator(library, 80))
    call.check_backward(Emulator(library, 80))


@pytest.mark.parametrize("smem_limit", [0, 101376])
@pytest.mark.parametrize("head_dim", [192, 320, 512, 1024])
def test_tiles_of_sm80(library, head_dim, smem_limit):
    emulator = Emulator(library, 80, splits=1, smem_limit=smem_limit)
    lengths = [(200, 130), (33, 70), (0, 9)]
    for changes in ({}, {"softcap": 2.0, "slopes": "h"}):
        call = Call(lengths, head_dim=head_dim, window=(90, 0), gap=1, has_sink=True, **changes)
        call.check(emulator)
        call.check_backward(emulator)


@pytest.mark.parametrize("bias", ["hqk", "bk", ""])
@pytest.mark.parametrize("head_dim", [320, 512])
def test_bias_of_large_head_dims(library, head_dim, bias):
    # The kernels of dK and dV read its keys in 16 bits one by one, the others two at once.
    options = {"head_dim": head_dim, "window": (90, 0), "starts": bias != "hqk", "is_padded": True}
    call = Call([(70, 200), (0, 9), (33, 20)], bias=bias, bias_dtype=BF16, **options)
    call.check(Emulator(library, 80, splits=1))
    call.check_backward(Emulator(library, 80))


def test_many_sequences(unsplit):
    """More than the threads that list them, and blocks of every size."""
    lengths = [(n % 3, n % 5) for n in range(600)] + [(300, 300)]
    for is_padded in (False, True):
        call = Call(lengths[:: 1 + 7 * is_padded], window=(-1, 0), heads=1, is_padded=is_padded)
        call.check(unsplit)
        call.check_backward(unsplit)


def test_many_places(library):
    """Each tile looks up its sequence among more than the lanes of a warp, or their square."""
    for count in (70, 1200):
        lengths = [(int(n % 40 == 7) * 3, n % 5) for n in range(count)] + [(70, 70)]
        emulator = Emulator(library, 90, multiprocessors=4096)
        Call(lengths, window=(-1, 0), heads=1, gap=count % 3).check(emulator)


def test_sink_of_dense_calls(kernels):
    check_sink(kernels)
