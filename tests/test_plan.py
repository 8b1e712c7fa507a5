"""Plans as data: the kernel, tile and schedule of a call (csrc/cute_fa2/host/plan_fwd.h), by the op
`plan`, which needs no GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from bench import cases
from flash_cute import ops

KB, MB = 1 << 10, 1 << 20
NAMES = "compute_capability", "multiprocessors", "l2_bytes", "smem_per_cta"
GPUS = {
    name: dict(zip(NAMES, properties, strict=True))
    for name, properties in {
        "H100": (90, 132, 50 * MB, 227 * KB),
        "A100": (80, 108, 40 * MB, 163 * KB),
        "RTX 4090": (89, 128, 72 * MB, 99 * KB),
        "B200": (100, 148, 126 * MB, 227 * KB),
    }.items()
}
HEAD_DIMS = [32, 64, 96, 128, 192, 256]
LARGE_HEAD_DIMS = [384, 512, 768, 1024]
INFO = ops.build_info()
pytestmark = pytest.mark.skipif(
    [*INFO["head_dims"], *INFO["large_head_dims"]] != [*HEAD_DIMS, *LARGE_HEAD_DIMS]
    or "sm_90a" not in INFO["archs"],
    reason="needs a full build",
)


def plan(gpu: str, *sizes: int, causal: bool = False, **options: int) -> dict[str, Any]:
    """`sizes`: batch, query heads, heads of K and V, queries, keys, head dim."""
    names = "batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim"
    request = {**GPUS[gpu], **dict(zip(names, sizes, strict=True)), **options}
    if causal:
        request["window_right"] = 0
    tuning = {name: request.pop(name) for name in TUNING if name in request}
    return ops.plan(*(",".join(f"{n}={x}" for n, x in d.items()) for d in (request, tuning)))


def plan_of(gpu: str, case: cases.Case, **options: int) -> dict[str, Any]:
    heads = case.heads, case.kv_heads
    sizes = case.batch, *heads, case.q_len, case.kv_len, case.head_dim
    return plan(gpu, *sizes, causal=case.causal, **options)


ONE_TILE = "one tile per CTA"
HEADS = "persistent, head by head"
GROUPS = "persistent, head group by head group"
SEQUENCE = "persistent, head groups as one sequence"
FIELDS = (
    *("arch", "block_m", "block_n", "splits", "rows_per_query", "tail_tiles", "subtiles"),
    *("head_group", "ctas", "workspace_bytes", "scheduler"),
)
FULL, CAUSAL = False, True
TUNING = "arch", "splits", "smem_limit"


@pytest.mark.parametrize(
    "gpu, sizes, causal, expected",
    [
        # Training.
        ("H100", (4, 16, 16, 4096, 4096, 128), FULL,
         ("sm90", 192, 64, 1, 1, 0, 1, 16, 132, 0, SEQUENCE)),
        ("H100", (4, 16, 16, 4096, 4096, 128), CAUSAL,
         ("sm90", 192, 64, 1, 1, 0, 1, 16, 132, 0, GROUPS)),
        ("H100", (4, 32, 32, 4096, 4096, 64), CAUSAL,
         ("sm90", 256, 64, 1, 1, 0, 1, 33, 132, 0, GROUPS)),
        ("H100", (8, 8, 8, 2048, 2048, 256), CAUSAL,
         ("sm90", 128, 64, 1, 1, 0, 1, 16, 132, 0, GROUPS)),
        ("A100", (4, 16, 16, 4096, 4096, 128), FULL,
         ("sm80", 128, 64, 1, 1, 0, 1, 1, 2048, 0, ONE_TILE)),
        ("A100", (4, 16, 16, 4096, 4096, 128), CAUSAL,
         ("sm80", 128, 64, 1, 1, 0, 1, 13, 2048, 0, ONE_TILE)),
        ("RTX 4090", (4, 16, 16, 4096, 4096, 128), CAUSAL,
         ("sm80", 128, 32, 1, 1, 0, 1, 24, 2048, 0, ONE_TILE)),
        ("RTX 4090", (8, 8, 8, 2048, 2048, 256), CAUSAL,
         ("sm80", 64, 64, 1, 1, 0, 1, 24, 2048, 0, ONE_TILE)),
        # Tiles of equal work, and heads that fill two rounds.
        ("H100", (32, 21, 21, 512, 512, 96), FULL,
         ("sm90", 256, 48, 1, 1, 24, 4, 1, 132, 0, HEADS)),
        ("H100", (33, 16, 16, 512, 512, 64), CAUSAL,
         ("sm90", 256, 64, 1, 1, 0, 1, 1, 132, 0, HEADS)),
        # Few tiles: in subtiles.
        ("H100", (1, 16, 16, 512, 512, 64), FULL,
         ("sm90", 128, 128, 1, 1, 64, 2, 1, 128, 0, HEADS)),
        ("H100", (1, 8, 8, 77, 77, 80), CAUSAL,
         ("sm90", 192, 64, 1, 1, 8, 3, 8, 24, 0, SEQUENCE)),
        # In two rounds, if few CTAs have a second one for the number of keys.
        ("H100", (1, 24, 24, 512, 512, 128), CAUSAL,
         ("sm90", 128, 128, 1, 1, 96, 2, 24, 132, 0, SEQUENCE)),
        ("H100", (1, 28, 28, 512, 512, 128), CAUSAL,
         ("sm90", 128, 128, 1, 1, 0, 1, 28, 112, 0, SEQUENCE)),
        ("H100", (1, 48, 48, 256, 256, 128), CAUSAL,
         ("sm90", 128, 128, 1, 1, 0, 1, 48, 96, 0, SEQUENCE)),
        ("H100", (1, 32, 32, 512, 512, 256), CAUSAL,
         ("sm90", 128, 64, 1, 1, 128, 2, 32, 132, 0, SEQUENCE)),
        # Decoding: packed heads, split-KV.
        ("H100", (1, 32, 8, 1, 32768, 128), CAUSAL,
         ("sm90", 128, 128, 16, 4, 0, 1, 1, 128, 266240, HEADS)),
        ("H100", (2, 32, 4, 6, 4096, 128), CAUSAL,
         ("sm90", 128, 128, 16, 8, 0, 1, 1, 128, 3194880, HEADS)),
        ("A100", (1, 32, 8, 1, 32768, 128), CAUSAL,
         ("sm80", 128, 64, 27, 4, 0, 1, 1, 216, 449280, ONE_TILE)),
    ],
)  # fmt: skip
def test_plan(gpu: str, sizes: tuple[int, ...], causal: bool, expected: tuple[Any, ...]) -> None:
    result = plan(gpu, *sizes, causal=causal)
    assert {name: result[name] for name in FIELDS} == dict(zip(FIELDS, expected, strict=True))


@pytest.mark.parametrize(
    "gpu, sizes, options, expected",
    [
        ("H100", (4, 16, 16, 4096, 4096, 128), {}, ("sm90", 64, 128, 1, 1, "sums", 132)),
        ("H100", (4, 32, 8, 4096, 4096, 128), {"window_right": 0},
         ("sm90", 64, 128, 1, 4, "sums", 132)),
        ("H100", (1, 32, 1, 4096, 4096, 128), {}, ("sm90", 64, 128, 8, 1, "sums", 132)),
        ("H100", (16, 32, 32, 1024, 1024, 64), {"window_right": 0},
         ("sm90", 64, 192, 1, 8, "sums", 132)),
        ("H100", (2, 4, 4, 4096, 100, 64), {}, ("sm90", 64, 192, 1, 1, "tile", 8)),
        ("H100", (1, 16, 16, 8192, 8192, 128), {"window_left": 128, "window_right": 0},
         ("sm90", 64, 64, 1, 4, "window", 128)),
        ("H100", (4, 8, 8, 4096, 4096, 256), {}, ("sm90", 64, 64, 1, 1, "own kernel", 132)),
        ("A100", (4, 16, 16, 4096, 4096, 128), {}, ("sm80", 64, 128, 1, 1, "sums", 2048)),
        ("RTX 4090", (4, 16, 16, 4096, 4096, 64), {}, ("sm80", 64, 128, 1, 1, "sums", 2048)),
    ],
)  # fmt: skip
def test_plan_of_a_backward(
    gpu: str, sizes: tuple[int, ...], options: dict[str, int], expected: tuple[Any, ...]
) -> None:
    result = plan(gpu, *sizes, backward=1, **options)
    names = "arch", "block_m", "block_n", "head_splits", "head_group", "dq_by", "ctas"
    assert tuple(result[name] for name in names) == expected
    blocks = math.ceil(sizes[3] / result["block_m"]) * sizes[0] * sizes[1]
    kv_rows = math.ceil(sizes[4] / result["block_n"]) * result["block_n"] * sizes[0] * sizes[2]
    of_splits = 2 * result["head_splits"] * kv_rows * sizes[5] * 4
    stats = blocks * result["block_m"] * 8 + (of_splits if result["head_splits"] > 1 else 0)
    sums = blocks * result["block_m"] * 4 * sizes[5]
    in_order = plan(gpu, *sizes, backward=1, deterministic=1, **options)
    if result["arch"] == "sm80":
        assert result["workspace_bytes"] == stats + sums
        added = math.ceil(blocks * 4 / 16) * 16
        assert in_order["workspace_bytes"] == stats + sums + 16 + added
    else:
        finished = math.ceil((24 + blocks) * 4 / 16) * 16
        in_any = sums + blocks * 16 + finished if result["dq_by"] == "sums" else 0
        assert result["workspace_bytes"] == stats + in_any + 16
        assert in_order["workspace_bytes"] == stats + 16
        assert in_order["dq_by"] == result["dq_by"].replace("sums", "own kernel")


@pytest.mark.parametrize(
    "window, options, is_narrow",
    [
        ((127, 0), {}, True),
        ((128, 0), {}, True),
        ((129, 0), {}, False),  # of which a block of rows sees four of keys
        ((64, 64), {}, True),
        ((65, 64), {}, False),
        ((0, 128), {"head_dim": 40}, True),
        ((64, 64), {"heads_kv": 2}, False),  # groups
        ((64, 64), {"len_k": 2001}, False),  # the diagonal is not where blocks meet
        ((64, 64), {"head_dim": 192}, False),
        ((64, 64), {"len_q": 100, "len_k": 100}, False),  # one tile has all keys
    ],
)
def test_narrow_windows(window: tuple[int, int], options: dict[str, int], is_narrow: bool) -> None:
    """A few tiles or very many: so many that the GPU has work, and no more than it takes."""
    names = "batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim"
    sizes = dict(zip(names, (2, 4, 4, 2000, 2000, 128), strict=True)) | options
    band = {"window_left": window[0], "window_right": window[1]}
    found = plan("H100", *sizes.values(), backward=1, **band)["dq_by"]
    assert (found == "window") == is_narrow
    if options:
        return
    for batch, heads, length in ((1, 1, 150), (1, 1, 2**30 - 4096), (300, 40, 4000), (1, 7, 65536)):
        result = plan("H100", batch, heads, heads, length, length, 64, backward=1, **band)
        if is_narrow:
            waves = result["ctas"] / 132
            assert result["n_blocks"] == math.ceil(length / (64 * max(3, result["stretch"])))
            assert result["ctas"] == result["n_blocks"] * batch * heads
            assert waves <= 1 or (result["stretch"] >= 4 and waves / math.ceil(waves) > 0.8)


def test_which_architecture() -> None:
    sizes = 2, 4, 4, 70, 70, 64
    assert (plan("H100", *sizes)["arch"], plan("H100", *sizes)["why_not_sm90"]) == ("sm90", "")
    for gpu in ("A100", "RTX 4090", "B200"):
        other = plan(gpu, *sizes)
        assert other["arch"] == "sm80" and "compute capability is not 9.x" in other["why_not_sm90"]
        with pytest.raises(RuntimeError, match=r"arch is 'sm90', but .*capability is not 9\.x"):
            plan(gpu, *sizes, arch=90)
    named = plan("H100", *sizes, arch=80)
    assert (named["arch"], named["why_not_sm90"]) == ("sm80", "")
    assert "smem_limit" in plan("H100", *sizes, smem_limit=101376)["why_not_sm90"]
    with pytest.raises(RuntimeError, match=r"arch is 'sm90', but .*smem_limit"):
        plan("H100", *sizes, smem_limit=101376, arch=90)


@pytest.mark.parametrize(
    "options, why_not",
    [
        ({"k_stride_batch": 0, "q_stride_head": 0}, ""),
        ({"k_stride_row": 0}, "the rows of k are expanded"),
        ({"v_stride_head": 32}, "rows of v overlap"),
        ({"q_stride_batch": 1 << 40}, "a stride of q is 2^40 bytes or more"),
        ({"scale_sign": 0}, "softmax_scale is not above 0"),
        ({"scale_sign": -1}, "softmax_scale is not above 0"),
    ],
)
def test_strides_and_scale_that_sm90_takes(options: dict[str, int], why_not: str) -> None:
    assert plan("H100", 2, 4, 4, 70, 70, 64, **options)["why_not_sm90"] == why_not
    packed = plan("H100", 2, 8, 2, 1, 700, 64, **options)
    assert packed["rows_per_query"] == (1 if "q_stride_head" in options else 4)


@pytest.mark.parametrize(
    "sizes, mask, block_m",
    [
        # On 132 multiprocessors. Of 256 rows 64 tiles, and 128: 128 and 256 of 128 rows.
        ((1, 16, 16, 1024, 64), "full", 128),
        ((1, 16, 16, 2048, 64), "full", 256),
        ((1, 16, 16, 2048, 64), "causal", 128),
        ((1, 16, 16, 2048, 64), "window 1024", 256),
        ((1, 16, 16, 4096, 64), "causal", 256),
        # An eighth to a quarter less to do, in tiles that take two fifths more time for a row.
        ((16, 32, 32, 1152, 64), "full", 256),
        ((25, 32, 32, 640, 64), "full", 256),
        ((42, 32, 32, 384, 64), "causal", 256),
        # Of 512 keys blocks of 96 waste an eighth.
        ((32, 21, 21, 512, 96), "full", 256),
        ((32, 21, 21, 512, 96), "causal", 192),
        ((4, 21, 21, 4096, 96), "full", 192),
        ((32, 16, 16, 512, 128), "full", 128),
        ((8, 16, 16, 2048, 128), "full", 192),
        ((4, 16, 16, 4096, 128), "causal", 192),
        # Rows of a large tile leave much of its keys out.
        ((1, 16, 16, 32768, 128), "window 128", 128),
        ((1, 16, 16, 8192, 128), "window 512", 128),
        ((1, 16, 16, 32768, 128), "window 4096", 192),
        ((1, 16, 16, 32768, 64), "window 128", 256),
        # About the diagonal, a small tile touches three blocks of 128 keys.
        ((1, 16, 16, 32768, 128), "window 64 64", 192),
        # Heads that are rows of one sequence: 64 for a query, but no more.
        ((64, 64, 1, 6, 128), "full", 192),
        ((64, 128, 1, 128, 128), "causal", 128),
    ],
)
def test_tiles_of_sm90(sizes: tuple[int, ...], mask: str, block_m: int) -> None:
    *heads, length, head_dim = sizes
    window = {}
    if mask.startswith("window"):
        seen, right = (*map(int, mask.split()[1:]), 0)[:2]
        window = {"window_left": seen - 1, "window_right": right}
    call = *heads, length, max(length, 128), head_dim
    assert plan("H100", *call, causal=mask == "causal", **window)["block_m"] == block_m


@pytest.mark.parametrize(
    "len_q, rows_per_query, tiles", [(1, 4, 1), (5, 4, 1), (50, 4, 2), (128, 1, 3), (180, 1, 6)]
)
def test_heads_of_few_queries_share_tiles(len_q: int, rows_per_query: int, tiles: int) -> None:
    """Three to a head of K and V."""
    result = plan("A100", 2, 3, 1, len_q, 150, 64)
    assert (result["rows_per_query"], result["tiles"]) == (rows_per_query, 2 * tiles)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("suite", ["train", "fp16", "layouts", "tuning"])
def test_one_split_where_tiles_fill_the_gpu(suite: str, gpu: str) -> None:
    for case in cases.SUITES[suite]():
        assert plan_of(gpu, case)["splits"] == 1, case.name


ARCHS = pytest.mark.parametrize("arch", [80, 90])


@pytest.mark.parametrize(
    "arch, gpu, head_dim, most",
    [
        (80, "H100", 64, 512),
        (80, "RTX 4090", 256, 384),
        (90, "H100", 64, 1152),
        (90, "H100", 256, 320),
    ],
)
def test_splits_begin_where_they_save_a_fifth(
    arch: int, gpu: str, head_dim: int, most: int
) -> None:
    """A split of few keys saves little: what it costs is that of its blocks, filled or not."""

    def splits(len_k: int) -> int:
        return int(plan(gpu, 1, 8, 8, 1, len_k, head_dim, arch=arch)["splits"])

    assert [splits(n) for n in (most - 60, most - 1, most)] == [1, 1, 1]
    assert splits(most + 1) > 1
    for len_k in (1, 64, 300):
        assert {plan(gpu, 1, 8, 8, n, len_k, head_dim, arch=arch)["splits"] for n in (1, 300)} == {
            1
        }


@pytest.mark.parametrize("gpu", GPUS)
def test_decoding_fills_the_gpu(gpu: str) -> None:
    multiprocessors = GPUS[gpu]["multiprocessors"]
    for case in cases.SUITES["decode"]():
        result = plan_of(gpu, case)
        splits, keys = result["splits"], result["split_keys"]
        assert (splits - 1) * keys < case.kv_len <= splits * keys, case.name
        unsplit = result["tiles"] // splits
        if unsplit < multiprocessors / 2:
            assert 0.75 * multiprocessors <= splits * unsplit <= 4 * multiprocessors, case.name


@ARCHS
def test_splits(arch: int) -> None:
    def splits(*sizes: int, **options: int) -> int:
        return int(plan("H100", *sizes, arch=arch, **options)["splits"])

    # Of the same tiles and keys, splits of many rows cost more.
    len_k = 1088 if arch == 80 else 2560
    assert splits(4, 12, 12, 1, len_k, 64) > 1 == splits(4, 12, 12, 128, len_k, 64)
    # Windows are not split, unless they leave nothing out.
    sizes = 1, 8, 8, 1, 100_000, 64
    assert splits(*sizes) > 1 < splits(*sizes, window_right=0)
    assert splits(*sizes, window_left=99_999) > 1 == splits(*sizes, window_left=500)
    # As many as are asked for, at most one a block of keys.
    sizes = 1, 1, 1, 1, 64 * 12, 32
    block_n = plan("H100", *sizes, arch=arch, splits=2)["block_n"]
    assert [splits(*sizes, splits=n) for n in (1, 2, 3, 1000)] == [1, 2, 3, 64 * 12 // block_n]


@ARCHS
@pytest.mark.parametrize("len_k", [4095, 4097, 100_001, 2**30 - 2**12])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_every_split_has_keys(arch: int, head_dim: int, len_k: int) -> None:
    # Heads of so many keys are far apart, and sm90 takes no stride of 2^40 bytes.
    for batch, heads in ((1, 1), (3, 5), (7, 8), (1, 200)) if len_k < 2**20 else ((1, 1),):
        result = plan("H100", batch, heads, heads, 1, len_k, head_dim, arch=arch)
        splits, keys = result["splits"], result["split_keys"]
        assert splits <= 1024 and (splits - 1) * keys < len_k <= splits * keys


@pytest.mark.parametrize(
    "arch, head_dim, most",
    [
        *((arch, *x) for arch in (80, 90) for x in [(128, 35.2e6), (256, 70e6)]),
        *((80, dim, 70e6) for dim in LARGE_HEAD_DIMS),
    ],
)
def test_memory_of_splits(arch: int, head_dim: int, most: float) -> None:
    """What README.md says."""
    for heads, len_q, len_k in [(1, 1, 2**20), (1, 128, 2**20), (4, 512, 2**20), (16, 128, 2**17)]:
        result = plan("H100", 1, heads, heads, len_q, len_k, head_dim, arch=arch)
        rows = result["splits"] * heads * len_q
        assert result["workspace_bytes"] == (
            rows * (4 * head_dim + 8) if rows > heads * len_q else 0
        )
        assert result["workspace_bytes"] <= most


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("head_dim", [1, 8, 33, 64, 100, 192, 255])
def test_every_head_dim_has_the_smallest_tile_that_serves_it(head_dim: int, gpu: str) -> None:
    for arch in (80, 90) if gpu == "H100" else (80,):
        for causal in (FULL, CAUSAL):
            result = plan(gpu, 2, 8, 8, 300, 300, head_dim, causal=causal, arch=arch)
            assert result["head_dim"] == next(d for d in HEAD_DIMS if d >= head_dim)


@pytest.mark.parametrize("head_dim, head_dim_v", [(192, 136), (64, 96), (8, 256), (256, 8)])
@pytest.mark.parametrize("backward", [0, 1])
def test_v_of_another_head_dim_has_the_tile_of_the_greater(
    head_dim: int, head_dim_v: int, backward: int
) -> None:
    sizes = 2, 8, 8, 4096, 4096
    options = {"causal": True, "backward": backward}
    result = plan("H100", *sizes, head_dim, head_dim_v=head_dim_v, **options)
    expected = plan("H100", *sizes, max(head_dim, head_dim_v), **options)
    assert result["arch"] == "sm90"
    for name in ("head_dim", "block_m", "block_n"):
        assert result[name] == expected[name]
    if not backward:  # splits keep V's columns
        result = plan("H100", 1, 1, 1, 1, 2**17, head_dim, head_dim_v=head_dim_v)
        assert result["workspace_bytes"] == result["splits"] * (4 * head_dim_v + 8)
        assert result["splits"] > 1


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("head_dim, head_dim_v", [(192, 128), (136, 1)])
def test_some_head_dims_of_v_have_tiles_of_their_own(
    head_dim: int, head_dim_v: int, gpu: str
) -> None:
    for arch in (80, 90) if gpu == "H100" else (80,):
        for causal, length in itertools.product((FULL, CAUSAL), (300, 4096)):
            sizes = 2, 8, 8, length, length, head_dim
            backward = {"backward": 1} if arch == 90 else {}
            for more in ({}, backward):
                options = {"causal": causal, "arch": arch, **more}
                result = plan(gpu, *sizes, head_dim_v=head_dim_v, **options)
                assert (result["head_dim"], result["head_dim_v"]) == (192, 128)
                result = plan(gpu, *sizes, head_dim_v=136, **options)
                assert (result["head_dim"], result["head_dim_v"]) == (192, 192)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("head_dim", [257, 320, 384, 385, 512, 640, 1024])
@pytest.mark.parametrize("backward", [0, 1])
def test_large_head_dims(head_dim: int, gpu: str, backward: int) -> None:
    result = plan(gpu, 2, 8, 8, 300, 300, head_dim, backward=backward)
    has_sm90 = gpu == "H100" and head_dim <= 512 and not backward
    assert result["arch"] == ("sm90" if has_sm90 else "sm80")
    assert result["head_dim"] == next(d for d in LARGE_HEAD_DIMS if d >= head_dim)
    if backward:  # the statistics alone need memory
        assert (result["dq_by"], result["head_splits"]) == ("own kernel", 1)
        assert (result["m_blocks"], result["n_blocks"], result["ctas"]) == (3, 5, 2 * 8 * 5)
        assert result["workspace_bytes"] == 2 * 8 * 3 * 128 * 8
    if gpu == "H100" and not has_sm90:
        why_not = f"the head dim is above {256 if backward else 512}"
        assert result["why_not_sm90"] == why_not
        with pytest.raises(RuntimeError, match=f"arch is 'sm90', but .* {why_not}"):
            plan(gpu, 2, 8, 8, 300, 300, head_dim, arch=90, backward=backward)
    if has_sm90:
        assert (result["block_m"], result["block_n"], result["splits"]) == (64, 64, 1)


def test_large_head_dims_have_splits_of_sm80() -> None:
    sizes = 1, 8, 8, 1, 8192, 512
    result = plan("H100", *sizes)
    assert result["arch"] == "sm80" and result["splits"] > 1
    assert result["why_not_sm90"] == "above head dim 256 split-KV has kernels of sm80 alone"
    assert plan("H100", *sizes, arch=90)["splits"] == 1


def test_requests_that_no_call_makes() -> None:
    for sizes, why in [
        ((1, 3, 2, 1, 1, 64), "heads_q is 3: it must be a multiple of heads_kv"),
        ((0, 1, 1, 1, 1, 64), "batch is 0: it must be 1 to"),
        ((1, 1, 1, 1, 1, 1025), "head_dim is 1025: it must be 1 to 1024"),
    ]:
        with pytest.raises(RuntimeError, match=why):
            plan("H100", *sizes)
    for tuning, why in [
        ("splits=-1", "splits in tuning is -1: it must be 0 or more"),
        ("splits=1x", "tuning has 'splits=1x': it must be name=number"),
        ("tiles=1", "tuning has 'tiles': it must be arch, smem_limit, splits or head_splits"),
    ]:
        with pytest.raises(RuntimeError, match=why):
            ops.plan("batch=1", tuning)
    with pytest.raises(RuntimeError, match="multiprocessors is 4294967296: it must be 1 to"):
        ops.plan("multiprocessors=4294967296")


def test_waves() -> None:
    assert math.isclose(plan("H100", 1, 132, 132, 128, 128, 256)["waves"], 1.0)
