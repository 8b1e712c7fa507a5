"""The tile tables (csrc/cute_fa2/tiles) as the library tells them: every head dim is served on
every GPU, and no entry asks for what the hardware does not have. Shapes are checked where they are
compiled (traits.h)."""

from __future__ import annotations

from typing import Any

import pytest

from flash_cute import ops

KB = 1024
# What a device lends to one CTA at most: sm_86, sm_89 and sm_120; sm_80; sm_90 and sm_100.
LIMITS = {"99 KB": 99 * KB, "163 KB": 163 * KB, "227 KB": 227 * KB}

INFO = ops.build_info()


def entries_of(arch: str, op: str) -> list[Any]:
    return [entry for entry in INFO["tiles"] if (entry["arch"], entry["op"]) == (arch, op)]


SM80, SM90 = entries_of("sm80", "fwd"), entries_of("sm90", "fwd")
BWD_SM80 = entries_of("sm80", "bwd")
BWD_SM90 = [entry for op in ("bwd", "dq", "window") for entry in entries_of("sm90", op)]
FP32 = entries_of("sm80", "fwd_fp32")
BWD_FP32 = entries_of("sm80", "bwd_fp32")
OPS_SM80 = {"fwd": SM80, "fwd_fp32": FP32, "bwd": BWD_SM80, "bwd_fp32": BWD_FP32}
#: Those that each op is built for, on sm80.
HEAD_DIMS = {op: [*INFO["head_dims"], *INFO["large_head_dims"]] for op in OPS_SM80}
HEAD_DIMS["fwd_fp32"] = HEAD_DIMS["bwd_fp32"] = INFO["fp32_head_dims"]


def pair(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["head_dim"], entry["head_dim_v"]


def kind(entry: dict[str, Any]) -> tuple[int, int, bool]:
    """Gradients in fp32 have two kinds of tiles for some head dims."""
    return *pair(entry), "columns" in entry


def name_of(entry: dict[str, Any]) -> str:
    head_dims = "x".join(map(str, dict.fromkeys(pair(entry))))
    tile = f"{head_dims}-{entry['block_m']}x{entry['block_n']}-{entry['stages']}"
    return f"{entry['arch']}-{entry['op']}-{entry['mask']}-{tile}"


def fits(entry: dict[str, Any], limit: int) -> bool:
    """An SM has 1 KB more than it lends to a CTA, and reserves 1 KB for each CTA."""
    return bool(entry["ctas_per_sm"] * (entry["smem_bytes"] + KB) <= limit + KB)


def test_every_built_head_dim_has_entries() -> None:
    for op, entries in OPS_SM80.items():
        assert HEAD_DIMS[op] == sorted(set(HEAD_DIMS[op]))
        assert {entry["head_dim"] for entry in entries} == set(HEAD_DIMS[op])
        is_built = "fp32" in INFO["dtypes"] or "fp32" not in op
        assert {entry["mask"] for entry in entries} == ({"any"} if is_built else set())
    assert sum(map(len, (*OPS_SM80.values(), SM90, BWD_SM90))) == len(INFO["tiles"])
    assert bool(SM90) == ("sm_90a" in INFO["archs"])


@pytest.mark.parametrize("mask", ["full", "banded"])
def test_every_head_dim_has_entries_of_sm90(mask: str) -> None:
    """Of which calls choose one by the number of tiles: tests/emulator has each chosen."""
    entries = [entry for entry in SM90 if entry["mask"] in (mask, "any")]
    built = [*INFO["head_dims"], *(d for d in INFO["large_head_dims"] if d <= 512)]
    assert sorted({entry["head_dim"] for entry in entries}) == (built if SM90 else [])
    assert len({(*pair(entry), entry["block_m"]) for entry in entries}) == len(entries)


def test_every_head_dim_has_an_entry_of_sm90_for_split_kv() -> None:
    entries = [entry for entry in SM90 if entry["split_kv"]]
    assert [entry["head_dim"] for entry in entries] == (INFO["head_dims"] if SM90 else [])
    assert all(entry["split_kv"] for entry in SM90 if entry["mask"] == "none")


@pytest.mark.parametrize("entry", SM80 + FP32 + BWD_SM80 + BWD_FP32, ids=name_of)
def test_sm80_entry(entry: dict[str, Any]) -> None:
    assert fits(entry, max(LIMITS.values()))
    assert 1 <= entry["warps"] <= 32
    # The registers of all the threads that are to be resident come out of one file of 65536.
    threads = 32 * entry["warps"] * entry["ctas_per_sm"]
    assert 0 < entry["max_registers"] <= 255
    assert entry["max_registers"] * threads <= 65536
    if entry.get("q_in_registers"):  # Q beside K, V beside O
        rows = entry["block_m"] + entry["block_n"]
        assert entry["smem_bytes"] == 2 * rows * max(pair(entry))


@pytest.mark.parametrize("entry", SM90 + BWD_SM90, ids=name_of)
def test_sm90_entry(entry: dict[str, Any]) -> None:
    assert entry["ctas_per_sm"] == 1 and fits(entry, LIMITS["227 KB"])
    # A consumer warpgroup has 4 warps and 64 rows, in a backward 64 keys. Two share them in a
    # backward above head dim 128; in a forward above 256, where one more has the scores. One more
    # warpgroup loads. wgmma is up to 256 keys wide. Under a narrow window each of two has a block.
    rows = {"bwd": entry["block_n"], "window": 2 * entry["block_n"]}.get(
        entry["op"], entry["block_m"]
    )
    has_scores = entry.get("column_groups", 1) > 1
    shares = has_scores or (entry["op"] == "bwd" and entry["head_dim"] > 128)
    consumers = 2 if shares else rows // 64
    assert rows == 64 * (1 if shares else consumers)
    assert entry["warps"] == 4 * (consumers + 1 + has_scores)
    assert entry["block_n"] <= 256
    # What the launch gives to the threads is what they trade among them, in steps of 8 registers.
    launched = 128 * (consumers + 1 + has_scores) * entry["max_registers"]
    after = 128 * (entry["producer_registers"] + consumers * entry["consumer_registers"])
    after += 128 * entry.get("scores_registers", 0)
    assert after <= launched <= 65536
    for name in ("max_registers", "producer_registers", "consumer_registers"):
        assert entry[name] % 8 == 0 and 24 <= entry[name] <= 256, name
    assert entry["producer_registers"] <= entry["max_registers"] <= entry["consumer_registers"]


OPS = pytest.mark.parametrize("op", OPS_SM80)


@OPS
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_every_gpu_serves_every_head_dim(limit: int, op: str) -> None:
    chosen = ops.tiles_for(limit, op)
    fitting = [entry for entry in OPS_SM80[op] if fits(entry, limit)]
    assert [kind(entry) for entry in chosen] == list(dict.fromkeys(map(kind, fitting)))
    assert {(d, d) for d in HEAD_DIMS[op]} <= set(map(pair, chosen))
    for entry in chosen:
        assert entry == next(other for other in fitting if kind(other) == kind(entry))


@OPS
def test_the_last_entry_fits_every_gpu(op: str) -> None:
    last = {pair(entry): entry for entry in OPS_SM80[op]}
    assert {(d, d) for d in HEAD_DIMS[op]} <= set(last)
    assert [name_of(x) for x in last.values() if not fits(x, min(LIMITS.values()))] == []


@OPS
def test_every_entry_is_chosen_on_some_gpu(op: str) -> None:
    """An entry that no limit leads to would be compiled, and shipped, for nothing."""
    chosen = [entry for limit in LIMITS.values() for entry in ops.tiles_for(limit, op)]
    assert [name_of(entry) for entry in OPS_SM80[op] if entry not in chosen] == []


@OPS
def test_too_little_shared_memory_has_no_tile(op: str) -> None:
    assert ops.tiles_for(0, op) == []
    assert ops.tiles_for(2 * KB, op) == []
