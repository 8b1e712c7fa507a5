"""Keys in parts, each worked on by thread blocks of its own: into how many, and that what comes of
them makes the same result."""

from __future__ import annotations

import math

import pytest
import torch
from cases import check
from emulator import Emulator
from support import BANDS, HEAD_DIMS, LAYOUTS, check_rms_error, inputs_with_outliers, poisoned
from support import random_inputs as random_inputs_of

from bench import cases as bench_cases
from flash_cute import ops

BF16, FP16 = torch.bfloat16, torch.float16
BOTH_DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
KB = 1024
#: Multiprocessors, and bytes of shared memory that a block may have.
GPUS = {"H200": (132, 227 * KB), "A100": (108, 163 * KB), "RTX 4090": (128, 99 * KB)}


def random_inputs(*sizes, dtype=BF16, **options):
    return random_inputs_of(*sizes, dtype=dtype, **options)


@BOTH_MASKS
@BOTH_DTYPES
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_and_dtypes(emulator, dtype, head_dim, is_causal):
    inputs = random_inputs(1, 4, 100, head_dim, heads_kv=2, len_k=333, dtype=dtype)
    check(emulator, *map(poisoned, inputs), is_causal, splits=3)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_on_hopper(hopper, head_dim, is_causal):
    inputs = random_inputs(2, 4, 150, head_dim, heads_kv=2, len_k=333)
    check(hopper[BF16], *map(poisoned, inputs), is_causal, splits=3, multiprocessors=5)


@BOTH_MASKS
def test_fp16_on_hopper(hopper, is_causal):
    inputs = random_inputs(2, 4, 150, 64, heads_kv=2, len_k=333, dtype=FP16)
    check(hopper[FP16], *map(poisoned, inputs), is_causal, splits=3, multiprocessors=5)


@BOTH_MASKS
@pytest.mark.parametrize("smem_limit", [166912, 101376])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_other_rows_of_the_tile_table(emulator, head_dim, smem_limit, is_causal):
    inputs = random_inputs(1, 2, 100, head_dim, heads_kv=1, len_k=270)
    check(emulator, *map(poisoned, inputs), is_causal, smem_limit=smem_limit, splits=2)


@BOTH_MASKS
@pytest.mark.parametrize("heads, len_q", [(8, 1), (3, 1), (6, 5), (2, 40)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_queries(emulator, hopper, head_dim, heads, len_q, is_causal):
    """As in decoding: heads share tiles; more parts than warps that combine them."""
    inputs = random_inputs(2, heads, len_q, head_dim, heads_kv=heads // 2 or 1, len_k=800)
    for splits in (2, 13):
        check(emulator, *map(poisoned, inputs), is_causal, splits=splits)
        check(hopper[BF16], *map(poisoned, inputs), is_causal, splits=splits, multiprocessors=3)


def test_more_parts_than_threads_that_combine_them(emulator):
    inputs = random_inputs(1, 1, 1, 8, len_k=128 * 300 - 7)
    check(emulator, *map(poisoned, inputs), splits=300)


@BOTH_MASKS
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3, 1e-42, 3.0])
def test_scales(emulator, scale, is_causal):
    inputs = random_inputs(1, 2, 100, 64, len_k=330)
    check(emulator, *map(poisoned, inputs), is_causal, scale, splits=3)


@BOTH_MASKS
@pytest.mark.parametrize("scale", [1e-42, 3.0, 100.0])
def test_scales_on_hopper(hopper, scale, is_causal):
    inputs = random_inputs(1, 2, 100, 64, len_k=330)
    check(hopper[BF16], *map(poisoned, inputs), is_causal, scale, splits=3)


@pytest.mark.parametrize("scale", [1e4, -1e10, 1e300])
def test_huge_scales_pick_the_greatest_scores(emulator, scale):
    q, k, v = random_inputs(1, 2, 100, 64, len_k=330)
    q, k = (2 * q).round(), (2 * k).round()
    out, _, _ = emulator.forward(q, k, v, scale, splits=3)
    scores = q.double() @ k.double().mT * math.copysign(1, scale)
    best = (scores == scores.amax(-1, keepdim=True)).double()
    exact = best / best.sum(-1, keepdim=True) @ v.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(BF16).eps)


def test_scores_that_leave_their_sum_no_digits(emulator):
    """Near 1e6, with exact products: log-sum-exps would tell parts apart by steps of 1/16."""
    q, k, v = random_inputs(1, 1, 20, 64, len_k=330, dtype=FP16)
    q[..., 0], k[..., 0] = 1024, 1024
    q[..., 1:], k[..., 1:] = q[..., 1:].round(), k[..., 1:].round()
    scale = math.log(2)
    out, _, _ = emulator.forward(q, k, v, scale, splits=3)
    exact = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(FP16).eps)


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e10, 0.5])
def test_rows_without_a_key(emulator, hopper, scale):
    kernels = hopper[BF16] if scale == 0.5 else emulator
    inputs = random_inputs(1, 2, 400, 64, len_k=150)
    out, lse, _ = kernels.forward(
        *map(poisoned, inputs), scale, window_right=0, diagonal_offset=-250, splits=3
    )
    assert torch.all(out[:, :, :250] == 0) and torch.all(lse[:, :, :250] == -math.inf)
    assert torch.all(lse[:, :, 250:].isfinite())


@pytest.mark.parametrize("window_left, window_right, diagonal_offset", BANDS)
@pytest.mark.parametrize("len_q, len_k", [(70, 300), (200, 150), (1, 300)])
def test_bands(emulator, hopper, len_q, len_k, window_left, window_right, diagonal_offset):
    inputs = random_inputs(1, 3, len_q, 64, heads_kv=1, len_k=len_k)
    band = {"window_left": window_left, "window_right": window_right}
    for kernels in (emulator, hopper[BF16]):
        check(kernels, *map(poisoned, inputs), splits=3, **band, diagonal_offset=diagonal_offset)


@BOTH_MASKS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("len_q", [5, 70])
def test_layouts(emulator, hopper, len_q, layout, is_causal):
    inputs = random_inputs(2, 4, len_q, 40, heads_kv=2, len_k=330)
    laid_out = [poisoned(x, **LAYOUTS[layout]) for x in inputs]
    for kernels in (emulator, hopper[BF16]):
        check(kernels, *laid_out, is_causal, splits=2)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_follows_the_formula(emulator, name):
    inputs = dict(zip("qkv", random_inputs(1, 2, 20, 64, len_k=330), strict=True))
    inputs[name][0, 1, 3, 5] = math.nan
    out, lse, _ = check(emulator, *inputs.values(), splits=3)
    assert out[0, 1].isnan().any() and not out[0, 0].isnan().any()
    assert lse.isnan().sum() == {"q": 1, "k": 20, "v": 0}[name]


def test_rms_error_with_outliers(emulator):
    inputs = inputs_with_outliers(1, 1, 512, 128, dtype=FP16)
    out, _, _ = emulator.forward(*map(poisoned, inputs), 1 / math.sqrt(128), splits=4)
    check_rms_error(out, *inputs)


@BOTH_MASKS
def test_results_do_not_depend_on_the_order_of_threads(emulator, hopper, is_causal):
    inputs = random_inputs(1, 2, 150, 64, len_k=460)
    for kernels in (emulator, hopper[BF16]):
        first = check(kernels, *map(poisoned, inputs), is_causal, splits=3, multiprocessors=5)
        other = check(kernels, *map(poisoned, inputs), is_causal, splits=3, seed=1)
        assert all(map(torch.equal, first[:2], other[:2]))


def test_keys_are_read_once(emulator):
    """And of the parts' output, 4 bytes an element, all."""
    rows, len_k, head_dim, splits = 20, 640, 64, 5
    inputs = random_inputs(1, 1, rows, head_dim, len_k=len_k)
    counters = check(emulator, *map(poisoned, inputs), splits=splits)[2]
    chunks = (splits * rows + 2 * len_k) * head_dim // 8
    assert counters.global_reads_16 == chunks + splits * rows * head_dim // 4


def test_keys_are_read_once_on_hopper(hopper):
    """And Q once for each part."""
    rows, len_k, head_dim, splits = 20, 640, 64, 5
    inputs = random_inputs(1, 1, rows, head_dim, len_k=len_k)
    counters = check(hopper[BF16], *map(poisoned, inputs), splits=splits)[2]
    assert counters.box_bytes == 2 * head_dim * (splits * rows + 2 * len_k)
    assert counters.box_bytes_out == 0
    assert counters.global_reads_16 == splits * rows * head_dim // 4


def test_as_many_parts_as_are_asked_for(emulator):
    """As thread blocks tell, each of which writes what comes of its part."""
    inputs = random_inputs(1, 1, 1, 64, len_k=64 * 6)

    def barriers(splits):
        return check(emulator, *map(poisoned, inputs), splits=splits)[2].block_barriers

    whole = barriers(1)
    assert barriers(0) == whole  # too few keys for parts to gain anything
    assert whole < barriers(2) < barriers(3) < barriers(6) == barriers(1000)
    inputs = random_inputs(1, 1, 1, 64, len_k=64 * 12)
    assert barriers(1) < barriers(11) < barriers(0) == barriers(12)


def test_a_negative_number_of_parts_is_refused(emulator):
    with pytest.raises(AssertionError, match="splits is -1: it must be a number of parts, or 0"):
        emulator.forward(*random_inputs(1, 1, 1, 64), 0.125, splits=-1)


# -- into how many parts --------------------------------------------------------------------------


def shape_of(case: bench_cases.Case) -> tuple[int, ...]:
    return case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.head_dim


def tiles(case: bench_cases.Case, smem_limit: int) -> int:
    """Or thread blocks, if the keys stay whole."""
    tile = next(t for t in ops.tiles_for(smem_limit) if t["head_dim"] >= case.head_dim)
    packed = case.q_len * case.heads // case.kv_heads
    of_batch = min(
        case.heads * math.ceil(case.q_len / tile["block_m"]),
        case.kv_heads * math.ceil(packed / tile["block_m"]),
    )
    return case.batch * of_batch


@pytest.fixture(params=["sm80", "sm90"])
def kernels(request: pytest.FixtureRequest) -> Emulator:
    if request.param == "sm80":
        return request.getfixturevalue("emulator")
    return request.getfixturevalue("hopper")[BF16]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("suite", ["train", "fp16", "layouts", "tuning"])
def test_keys_stay_whole_where_tiles_fill_the_gpu(kernels, suite, gpu):
    for case in bench_cases.SUITES[suite]():
        window = {"window_right": 0} if case.causal else {}
        multiprocessors, smem_limit = GPUS[gpu]
        options = {"smem_limit": smem_limit, **window}
        assert kernels.splits(*shape_of(case), multiprocessors, **options)[0] == 1, case.name


@pytest.mark.parametrize(
    "arch, gpu, head_dim, most",
    [
        (80, "H200", 64, 640),
        (80, "RTX 4090", 256, 512),
        (90, "H200", 64, 1536),
        (90, "H200", 256, 448),
    ],
)
def test_keys_stay_whole_until_parts_of_them_spare_a_quarter(
    emulator, hopper, arch, gpu, head_dim, most
):
    """A part of few keys saves little: what a part costs is that of its blocks, filled or not."""
    kernels = emulator if arch == 80 else hopper[BF16]
    multiprocessors, smem_limit = GPUS[gpu]

    def parts(len_k):
        shape = (1, 8, 8, 1, len_k, head_dim)
        return kernels.splits(*shape, multiprocessors, smem_limit=smem_limit)[0]

    assert [parts(n) for n in (most - 60, most - 1, most)] == [1, 1, 1]
    assert parts(most + 1) > 1


@pytest.mark.parametrize("gpu", GPUS)
def test_decoding_fills_the_gpu(kernels, gpu):
    for case in bench_cases.SUITES["decode"]():
        multiprocessors, smem_limit = GPUS[gpu]
        count, keys = kernels.splits(*shape_of(case), multiprocessors, smem_limit=smem_limit)
        assert (count - 1) * keys < case.kv_len <= count * keys, case.name
        blocks = tiles(case, smem_limit)
        if blocks < multiprocessors / 2:
            assert 0.75 * multiprocessors <= count * blocks <= 4 * multiprocessors, case.name


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("gpu", GPUS)
def test_short_keys_stay_whole(kernels, gpu, head_dim):
    multiprocessors, smem_limit = GPUS[gpu]
    for len_k in (1, 64, 300, 400):
        for len_q in (1, 7, 300):
            shape = 1, 8, 8, len_q, len_k, head_dim
            assert kernels.splits(*shape, multiprocessors, smem_limit=smem_limit)[0] == 1


def test_rows_that_cost_more_to_combine_stay_whole(kernels):
    """The same tiles and keys, with one row and with all."""
    len_k = 2048 if kernels.arch == 80 else 8192
    assert kernels.splits(4, 12, 12, 1, len_k, 64)[0] > 1
    assert kernels.splits(4, 12, 12, 128, len_k, 64)[0] == 1


@pytest.mark.parametrize("len_k", [4095, 4097, 100_001, 2**30 - 1])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_every_part_has_keys(kernels, head_dim, len_k):
    for batch, heads in ((1, 1), (3, 5), (7, 8), (1, 200)):
        count, keys = kernels.splits(batch, heads, heads, 1, len_k, head_dim)
        assert count <= 1024 and (count - 1) * keys < len_k <= count * keys


@pytest.mark.parametrize("head_dim, most", [(128, 35.2e6), (256, 70e6)])
def test_memory_of_the_parts(kernels, head_dim, most):
    """On an H200, what README.md says."""
    for heads, len_q, len_k in [(1, 1, 2**20), (1, 128, 2**20), (4, 512, 2**20), (16, 128, 2**17)]:
        count, _ = kernels.splits(1, heads, heads, len_q, len_k, head_dim)
        assert count * heads * len_q * (4 * head_dim + 8) <= most


def test_windows_stay_whole(kernels):
    assert kernels.splits(1, 8, 8, 1, 100_000, 64)[0] > 1
    assert kernels.splits(1, 8, 8, 1, 100_000, 64, window_right=0)[0] > 1
    assert kernels.splits(1, 8, 8, 1, 100_000, 64, window_left=99_999)[0] > 1  # leaves none out
    assert kernels.splits(1, 8, 8, 1, 100_000, 64, window_left=500)[0] == 1
