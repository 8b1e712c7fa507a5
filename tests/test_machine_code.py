"""The machine code that the built library holds for each chip, read with cuobjdump: instructions
that the kernels stand on, no spills, and no more registers than the tile table allows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container
from typing import Any

import pytest
import torch
from support import cuobjdump

from bench import simulate
from flash_cute import ops

INFO: dict[str, Any] = json.loads(torch.ops.flash_cute.build_info())
# The machine code, and whose kernels it is.
ARCHS = {
    code: "sm90" if code == "sm_90a" else "sm80" for code in INFO["archs"] if code.startswith("sm_")
}
# Bytes of shared memory that a block may have, on the GPUs that run it.
SMEM_LIMITS = {
    "sm_80": (163 << 10, 99 << 10),
    "sm_90": (227 << 10,),
    "sm_100": (227 << 10,),
    "sm_120": (99 << 10,),
}
DTYPES = 2
MASKS = {"any": 2, "full": 1, "banded": 1, "none": 0}
# ldmatrix, cp.async and the tensor cores; TMA, wgmma, stmatrix, and registers that change their
# owners.
INSTRUCTIONS = {
    "sm80": {"LDSM", "LDGSTS", "HMMA"},
    "sm90": {"UTMALDG", "UTMASTG", "HGMMA", "STSM", "USETMAXREG"},
}


def config_of_row(row: dict[str, Any]) -> tuple[int, ...]:
    """The integers of FwdConfigSm80 and FwdConfigSm90 in csrc/cute_fa2/config.h, in their order."""
    if row["arch"] == "sm80":
        row_warps = row["warps"] // row["column_warps"]
        names = ("head_dim", "block_m", "block_n", "column_warps")
        head_dim, block_m, block_n, column_warps = (row[name] for name in names)
        return head_dim, block_m, block_n, row_warps, column_warps
    consumers = row["block_m"] // 64
    return row["head_dim"], consumers, row["block_n"], row["stages"], row["q_stages"]


def config_of(kernel: str) -> tuple[int, ...]:
    """The tile of a kernel, by the configuration in its mangled name."""
    found = re.search(r"FwdConfigSm[89]0E((?:L[ib]\d+E)+)", kernel)
    assert found, kernel
    return tuple(int(number) for number in re.findall(r"Li(\d+)", found[1]))


def is_for_parts(kernel: str) -> bool:
    """Whether keys are in parts, of which sm90 has kernels of their own: by the bool of FwdTraits
    in the mangled name."""
    return re.search(r"FwdConfigSm90E(?:L[ib]\d+E)+EELb1E", kernel) is not None


def is_kernel_of(arch: str, function: str) -> bool:
    """Whether it is a forward kernel. Asked for sm_90, cuobjdump shows sm_90a as well."""
    return f"{ARCHS[arch]}9FwdKernel" in function


def texts_of_kernels(code: str) -> dict[str, str]:
    """For each forward kernel its machine code, as cuobjdump prints it."""
    if code not in ARCHS:
        pytest.skip(f"this build has no {code}")
    texts = simulate.functions(cuobjdump("-sass", "-arch", code))
    kernels = {name: text for name, text in texts.items() if is_kernel_of(code, name)}
    assert kernels
    return kernels


@pytest.fixture(scope="module", params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rows(arch: str) -> list[dict[str, Any]]:
    return [row for row in INFO["tiles"] if (row["arch"], row["op"]) == (ARCHS[arch], "fwd")]


@pytest.fixture(scope="module")
def opcodes(arch: str) -> dict[str, Counter[str]]:
    """For each forward kernel, how often each instruction stands in it."""
    kernels: dict[str, Counter[str]] = {}
    opcodes: Counter[str] = Counter()
    for line in cuobjdump("-sass", "-arch", arch).splitlines():
        if function := re.search(r"Function : (\S+)", line):
            opcodes = Counter()
            if is_kernel_of(arch, function[1]):
                kernels[function[1]] = opcodes
        elif instruction := re.match(
            r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9]+)", line
        ):
            opcodes[instruction[1]] += 1
    return kernels


@pytest.fixture(scope="module")
def resources(arch: str) -> dict[str, dict[str, int]]:
    """For each forward kernel: REG, STACK, LOCAL and so on."""
    text = cuobjdump("-res-usage", "-arch", arch)
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d\])?:(\d+)", usage)}
        for name, usage in re.findall(r"Function (\S+):\n(.*)", text)
        if is_kernel_of(arch, name)
    }


def test_there_is_something_to_read() -> None:
    if not ARCHS:
        pytest.skip(f"this build has no machine code ({', '.join(INFO['archs'])})")
    assert {row["arch"] for row in INFO["tiles"]} >= set(ARCHS.values())


def test_machine_code_for_every_chip() -> None:
    listed = cuobjdump("-lelf")
    assert set(re.findall(r"\.(sm_\d+a?)\.cubin", listed)) == set(INFO["archs"]) - {"compute_80"}
    assert "compute_80" not in INFO["archs"] or ".sm_80.ptx" in cuobjdump("-lptx")


def test_every_row_has_its_kernels(
    rows: list[dict[str, Any]],
    opcodes: dict[str, Counter[str]],
    resources: dict[str, dict[str, int]],
) -> None:
    """So that the tests below miss none."""
    # Two rows may have the same tile, of which there is one kernel, or one for each mask.
    masks: dict[tuple[int, ...], int] = {}
    for row in rows:
        config, served = config_of_row(row), MASKS[row["mask"]]
        masks[config] = masks.get(config, 0) + served if row["mask"] != "any" else served
    for row in rows:
        masks[config_of_row(row)] += row.get("splits", 0)
    expected = {config: DTYPES * count for config, count in masks.items()}
    assert Counter(map(config_of, opcodes)) == expected
    for_parts = {config_of(kernel) for kernel in opcodes if is_for_parts(kernel)}
    assert for_parts == {config_of_row(row) for row in rows if row.get("splits")}
    assert set(resources) == set(opcodes)


def test_instructions(arch: str, opcodes: dict[str, Counter[str]]) -> None:
    for kernel, counts in opcodes.items():
        missing = INSTRUCTIONS[ARCHS[arch]] - set(counts)
        if is_for_parts(kernel):  # whose results leave in fp32, from registers
            assert missing == {"STSM", "UTMASTG"} and counts["STG"], kernel
            continue
        assert not missing, (kernel, missing)


def test_products_are_not_serialized(opcodes: dict[str, Counter[str]]) -> None:
    """ptxas may put a WARPGROUP.ARRIVE before each wgmma and a wait behind it."""
    for kernel, counts in opcodes.items():
        assert counts["WARPGROUP"] < counts["HGMMA"] or "HMMA" in counts, kernel


def test_warps_go_together(opcodes: dict[str, Counter[str]]) -> None:
    """Where ptxas cannot tell that the lanes of a warp are together, it makes them meet, and has
    what they have in common computed by each."""
    for kernel, counts in opcodes.items():
        assert not counts["WARPSYNC"] or "HMMA" in counts, kernel


def test_no_division(arch: str) -> None:
    """Of integers: a chain of some 20 instructions, ahead of a tile's first load. It begins with a
    conversion to float that rounds up."""
    for kernel, text in texts_of_kernels(arch).items():
        assert not re.search(r"\bI2F\.(\w+\.)*RP\b", text), kernel


def test_nothing_spills_where_parts_are_combined() -> None:
    """Of any chip."""
    if not ARCHS:
        pytest.skip("this build has no machine code")
    usages = re.findall(r"Function \S*CombineKernel\S*:\n(.*)", cuobjdump("-res-usage"))
    assert len(usages) == DTYPES * len(set(ARCHS) - {"sm_90a"})
    assert all("STACK:0" in usage and "LOCAL:0" in usage for usage in usages)


def test_no_spills(
    arch: str,
    rows: list[dict[str, Any]],
    opcodes: dict[str, Counter[str]],
    resources: dict[str, dict[str, int]],
) -> None:
    """In what is ever launched: the machine code for a chip has the tiles for others as well."""
    launched = set(map(config_of_row, rows))
    if arch in SMEM_LIMITS:
        tiles = [tile for limit in SMEM_LIMITS[arch] for tile in ops.tiles_for(limit)]
        launched = {config_of_row(dict(tile)) for tile in tiles}
    assert launched <= set(map(config_of, opcodes))
    spills = {
        kernel: (counts["LDL"], counts["STL"], resources[kernel])
        for kernel, counts in opcodes.items()
        if config_of(kernel) in launched
        and (
            counts["LDL"]
            or counts["STL"]
            or resources[kernel]["STACK"]
            or resources[kernel]["LOCAL"]
        )
    }
    assert not spills


def test_registers_within_the_budget(
    arch: str, rows: list[dict[str, Any]], resources: dict[str, dict[str, int]]
) -> None:
    for kernel, usage in resources.items():
        budgets = [row["max_registers"] for row in rows if config_of_row(row) == config_of(kernel)]
        assert usage["REG"] <= min(budgets), (kernel, usage)
        # What warpgroups ask for adds up to all: launched with less, they would wait for ever.
        assert ARCHS[arch] == "sm80" or usage["REG"] == min(budgets), (kernel, usage)


def test_softmax_stands_under_a_product() -> None:
    """All exponentials and additions of a step. ptxas may move a wait for products ahead of them,
    which then no longer run beside it."""
    for kernel, text in texts_of_kernels("sm_90a").items():
        parts = re.split(r"\b(WARPGROUP\.DEPBAR\.LE gsb0, 0x\d|HGMMA)\b", text)
        ahead = list(zip(parts[1::2], parts[2::2], strict=True))  # and what stands behind it
        softmax = [(wait, part) for wait, part in ahead if "MUFU.EX2" in part]
        # For the first scores of a tile; at the head of the loop over its blocks; for the scores of
        # the next block; for all of O. Not where a reference rises: warps would wait alone.
        assert [wait[-1] for wait in parts[1::2] if wait != "HGMMA"] == ["0", "0", "1", "0"], kernel
        # Of a tile's first block, which waits for all products; of the others, where one is left.
        assert [wait[-1] for wait, _ in softmax] == ["0", "1"], kernel
        rows, scores = 2, 64 * config_of(kernel)[2] // 128  # of a thread
        for _, part in softmax:
            assert part.count("MUFU.EX2") == scores + rows, kernel  # each row may rise
            assert len(re.findall(r"\bFADD\b", part)) >= scores, kernel


def test_output_leaves_by_the_copy_engine() -> None:
    """Each strip of a warp's rows of O goes to shared memory as matrices, is shown to the copy
    engine, and stored by it; threads store the log-sum-exp alone."""
    fence = "FENCE.VIEW.ASYNC"
    steps = re.compile(rf"\b(HGMMA|WARPGROUP\.DEPBAR|STG|STSM\.16\.M88\.4|{fence}|UTMASTG)\b")
    for kernel, text in texts_of_kernels("sm_90a").items():
        if is_for_parts(kernel):
            continue
        head_dim = config_of(kernel)[0]
        columns = 64 if head_dim % 64 == 0 else 32  # of a strip, by 16
        strip = [*["STSM.16.M88.4"] * (columns // 16), fence, "UTMASTG"]
        stores = ["STG", *strip * (head_dim // columns)]
        found = steps.findall(text)
        # Behind the fence of the barriers, for a thread block's last tile and for those before.
        without_products = [step for step in found if step in (fence, *stores)]
        assert without_products == [fence, *stores, *stores], kernel
        # Those before are stored under the first product of the next tile, which is the last in
        # the text; the wait for it is at the head of the loop.
        assert found[-len(stores) - 1 :] == ["HGMMA", *stores], kernel


@pytest.mark.parametrize("code", ["sm_90", "sm_90a"])
def test_scores_are_compared_three_at_a_time(code: str) -> None:
    """Hopper finds the greatest of three integers in one instruction."""
    for kernel, text in texts_of_kernels(code).items():
        if code == "sm_90a":
            rows, columns = 2, config_of(kernel)[2] // 4  # of a thread
        else:
            _, block_m, block_n, row_warps, column_warps = config_of(kernel)
            rows, columns = block_m // row_warps // 8, block_n // column_warps // 4
        assert len(re.findall(r"\bVIMNMX3\b", text)) >= rows * ((columns - 1) // 2), kernel


@pytest.mark.parametrize("code", ["sm_80", "sm_90"])
def test_exponentials_stand_among_products(code: str) -> None:
    """The exponentials of a step's later columns run under the products of its earlier ones with V.
    A branch among them would keep ptxas from that. Where warps share rows, they first wait for each
    other's; where scores are ahead, see the next test."""
    for kernel, text in texts_of_kernels(code).items():
        _, block_m, block_n, warps, column_warps = config_of(kernel)
        if column_warps > 1 or has_scores_ahead(kernel):
            continue
        scores = block_m * block_n // (32 * warps)  # of a thread
        with_products = [part for part in re.split(r"\bBRA\b", text) if "HMMA" in part]
        step = max(with_products, key=lambda part: part.count("MUFU.EX2"))
        assert step.count("MUFU.EX2") >= scores, kernel
        assert step[step.index("HMMA") :].count("MUFU.EX2") >= scores // 2, kernel


def has_scores_ahead(kernel: str) -> bool:
    """By the bool of FwdConfigSm80 in its mangled name."""
    found = re.search(r"FwdConfigSm80E(?:Li\d+E)+Lb([01])E", kernel)
    assert found, kernel
    return found[1] == "1"


@pytest.mark.parametrize("code", ["sm_80", "sm_90"])
def test_scores_ahead_are_computed_among_exponentials(code: str) -> None:
    """Between two branches are the products of 16 keys, those with V and those for the scores of
    the next block, and with them the exponentials of the next 16."""
    kernels = {k: text for k, text in texts_of_kernels(code).items() if has_scores_ahead(k)}
    assert kernels
    for kernel, text in kernels.items():
        head_dim, block_m, block_n, warps, _ = config_of(kernel)
        rows = block_m // warps  # of a warp
        exponentials, products = rows * 16 // 32, 2 * rows * 16 * head_dim // (16 * 8 * 16)
        pieces = re.split(r"\bBRA\b", text)
        # Behind the last 16 keys there are no next.
        whole = among_products(pieces, products, range(exponentials, 2 * exponentials))
        assert len(whole) >= block_n // 16 - 1, kernel
        assert min(whole) >= exponentials // 2, kernel
        # Of a tile with few rows. Before the first 16 keys there are others' exponentials; at head
        # dim 32 sm_80 has one of the pieces with its exponentials before its products.
        half = among_products(pieces, products // 2, [exponentials // 2])
        assert len(half) >= block_n // 16 - 2, kernel
        assert sum(half) >= len(half) * exponentials // 4, kernel


def among_products(pieces: list[str], products: int, exponentials: Container[int]) -> list[int]:
    """Of the pieces with so many of each, how many exponentials stand among the products."""
    return [
        piece[piece.index("HMMA") : piece.rindex("HMMA")].count("MUFU.EX2")
        for piece in pieces
        if piece.count("HMMA") == products and piece.count("MUFU.EX2") in exponentials
    ]
