"""The tile table (csrc/cute_fa2/config.h) as the library tells it: every head dim is served on
every GPU, and no row asks for what the hardware does not have."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import flash_cute  # noqa: F401 (loads the library)

KB = 1024
# What a device lends to one thread block at most: sm_86, sm_89 and sm_120; sm_80; sm_90 and sm_100.
LIMITS = {"99 KB": 99 * KB, "163 KB": 163 * KB, "227 KB": 227 * KB}

INFO: dict[str, Any] = json.loads(torch.ops.flash_cute.build_info())
ROWS: list[dict[str, Any]] = [row for row in INFO["tiles"] if row["arch"] == "sm80"]
SM90_ROWS: list[dict[str, Any]] = [row for row in INFO["tiles"] if row["arch"] == "sm90"]


def name_of(row: dict[str, Any]) -> str:
    tile = f"{row['head_dim']}-{row['block_m']}x{row['block_n']}"
    return f"{row['arch']}-{row['op']}-{row['mask']}-{tile}"


def tiles_for(limit: int) -> list[dict[str, Any]]:
    tiles: list[dict[str, Any]] = json.loads(torch.ops.flash_cute.tiles_for(limit))
    return tiles


def fits(row: dict[str, Any], limit: int) -> bool:
    """A multiprocessor has 1 KB more than it lends to a block, and keeps 1 KB of each block."""
    return bool(row["ctas_per_sm"] * (row["smem_bytes"] + KB) <= limit + KB)


def test_every_built_head_dim_has_rows() -> None:
    assert INFO["head_dims"] == sorted(set(INFO["head_dims"]))
    assert {row["head_dim"] for row in ROWS} == set(INFO["head_dims"]) != set()
    assert {row["mask"] for row in ROWS} == {"any"}
    assert len(ROWS) + len(SM90_ROWS) == len(INFO["tiles"])
    assert bool(SM90_ROWS) == ("sm_90a" in INFO["archs"])


@pytest.mark.parametrize("mask", ["full", "banded"])
def test_every_head_dim_has_rows_of_sm90(mask: str) -> None:
    """Of which calls choose one by the number of tiles: tests/emulator has each chosen."""
    rows = [row for row in SM90_ROWS if row["mask"] in (mask, "any")]
    assert sorted({row["head_dim"] for row in rows}) == (INFO["head_dims"] if SM90_ROWS else [])
    assert len({(row["head_dim"], row["block_m"]) for row in rows}) == len(rows)


def test_every_head_dim_has_a_row_of_sm90_for_keys_in_parts() -> None:
    rows = [row for row in SM90_ROWS if row["splits"]]
    assert [row["head_dim"] for row in rows] == (INFO["head_dims"] if SM90_ROWS else [])
    assert all(row["splits"] for row in SM90_ROWS if row["mask"] == "none")


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_row(row: dict[str, Any]) -> None:
    # Q, and K and V as often as the pipeline has stages, in elements of 2 bytes; of rows that warps
    # share, P and a word for each of them.
    m, n, sharing = (row[name] for name in ("block_m", "block_n", "column_warps"))
    elements = (m + 2 * row["stages"] * n) * row["head_dim"]
    assert row["smem_bytes"] == 2 * elements + (0 if sharing == 1 else m * (2 * n + 4 * sharing))
    assert row["smem_bytes"] <= max(LIMITS.values())
    # Each warp has whole 16-row MMA tiles of the queries, and of the columns 16 at a time.
    assert row["warps"] % sharing == 0
    assert m % (16 * row["warps"] // sharing) == 0
    assert n % (16 * sharing) == 0
    assert row["head_dim"] % 32 == 0
    assert 1 <= row["warps"] <= 32
    # The registers of all the threads that are to be resident come out of one file of 65536.
    threads = 32 * row["warps"] * row["ctas_per_sm"]
    assert 0 < row["max_registers"] <= 255
    assert row["max_registers"] * threads <= 65536


@pytest.mark.parametrize("row", SM90_ROWS, ids=name_of)
def test_sm90_row(row: dict[str, Any]) -> None:
    # As above, Q in stages as well, and 1 KB for barriers. O leaves by strips of columns, of which
    # as many have a place as fit.
    m, n, head_dim = row["block_m"], row["block_n"], row["head_dim"]
    elements = (row["q_stages"] * m + 2 * row["stages"] * n) * head_dim
    strip_columns = 64 if head_dim % 64 == 0 else 32
    strip_bytes = 2 * m * strip_columns
    strips, rest = divmod(row["smem_bytes"] - 2 * elements - KB, strip_bytes)
    assert rest == 0 and 1 <= strips <= head_dim // strip_columns
    assert row["ctas_per_sm"] == 1 and fits(row, LIMITS["227 KB"])
    one_more = {**row, "smem_bytes": row["smem_bytes"] + strip_bytes}
    assert strips == head_dim // strip_columns or not fits(one_more, LIMITS["227 KB"])
    # A warpgroup has 4 warps and 64 rows; one more loads. A product is up to 256 keys wide, and a
    # step of the second product 16 keys long.
    consumers = row["block_m"] // 64
    assert row["block_m"] == 64 * consumers and consumers in (2, 3, 4)
    assert row["warps"] == 4 * (consumers + 1)
    assert row["block_n"] % 16 == 0 and row["block_n"] <= 256
    # What the launch gives to the threads is what they trade among them, in steps of 8 registers.
    launched = 128 * (consumers + 1) * row["max_registers"]
    after = 128 * (row["producer_registers"] + consumers * row["consumer_registers"])
    assert after <= launched <= 65536
    for name in ("max_registers", "producer_registers", "consumer_registers"):
        assert row[name] % 8 == 0 and 24 <= row[name] <= 256, name
    assert row["producer_registers"] <= row["max_registers"] <= row["consumer_registers"]


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_every_gpu_serves_every_head_dim(limit: int) -> None:
    chosen = tiles_for(limit)
    assert [row["head_dim"] for row in chosen] == INFO["head_dims"]
    for row in chosen:
        candidates = [other for other in ROWS if other["head_dim"] == row["head_dim"]]
        assert row == next(other for other in candidates if fits(other, limit))


def test_every_row_is_chosen_on_some_gpu() -> None:
    """A row that no limit leads to would be compiled, and shipped, for nothing."""
    chosen = [row for limit in LIMITS.values() for row in tiles_for(limit)]
    assert [name_of(row) for row in ROWS if row not in chosen] == []


def test_too_little_shared_memory_has_no_tile() -> None:
    assert tiles_for(0) == []
    assert tiles_for(2 * KB) == []
