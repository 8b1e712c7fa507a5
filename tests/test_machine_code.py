"""The machine code that the built library holds for each chip: that kernels have their instructions
in order, no spills, and no more registers than the tile table allows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container
from typing import Any

import pytest
import sass
from sass import Kernel, op_of, tile_of

from flash_cute import ops

INFO = ops.build_info()
# The machine code, and whose kernels it is.
ARCHS = {
    code: "sm90" if code == "sm_90a" else "sm80" for code in INFO["archs"] if code.startswith("sm_")
}
# Bytes of shared memory that a CTA may have, on the GPUs that run it.
SMEM_LIMITS = {
    "sm_80": (163 << 10, 99 << 10),
    "sm_90": (227 << 10,),
    "sm_100": (227 << 10,),
    "sm_120": (99 << 10,),
}
# The machine code, and the op whose kernels a test looks at.
TARGETS = [
    (code, op)
    for code, arch in ARCHS.items()
    for op in sorted({op_of({**tile}) for tile in INFO["tiles"] if tile["arch"] == arch})
]
HALF_DTYPES = len({"fp16", "bf16"} & {*INFO["dtypes"]})
#: Packed sequences and changed scores are further kinds, which sm90's forward has of some entries.
MASKS = {"any": 2, "full": 1, "banded": 1, "none": 0}
# What ptxas of CUDA 13.0 spills on chips that nobody has timed: code, op, head dim and mask of the
# kernel, and the bytes of a thread's stack at most.
KNOWN_SPILLS = {
    ("sm_100", "fwd", 32, "scored"): 32,
    ("sm_100", "fwd", 128, "scored"): 8,
    ("sm_100", "bwd", 128, "banded"): 8,
    ("sm_120", "fwd", 32, "packed"): 8,
    ("sm_120", "fwd", 32, "scored"): 56,
    ("sm_120", "fwd_fp32", 256, "scored"): 8,
}
# What platform.h and hopper.h are to become: ldmatrix, cp.async, the tensor cores, exponentials,
# reciprocals, and stores of 16 bytes, which nvcc may tear apart; sums in global memory; TMA, wgmma,
# stmatrix, fences of the async proxy, and registers that change their owners.
INSTRUCTIONS = {
    ("sm80", "fwd"): ("LDSM", "LDGSTS", "HMMA", r"MUFU\.EX2", r"MUFU\.RCP", r"STG\.E\.128"),
    ("sm80", "bwd"): (
        *(r"LDSM\.16\.M88\.4", r"LDSM\.16\.MT88\.4", r"LDGSTS\.E\.BYPASS\S*\.128", "HMMA"),
        *(r"MUFU\.EX2", r"REDG?\.E\.ADD\.F32"),
    ),
    ("sm80", "bwd_fp32"): (
        *("LDSM", r"LDGSTS\.E\.BYPASS\S*\.128", r"HMMA\.1688\.F32\.TF32", r"MUFU\.EX2"),
        r"REDG?\.E\.ADD\.F32",
    ),
    ("sm80", "large"): (
        *(r"LDSM\.16\.M88\.4", r"LDSM\.16\.MT88\.4", r"LDGSTS\.E\.BYPASS\S*\.128", "HMMA"),
        r"MUFU\.EX2",
    ),
    ("sm80", "large_fp32"): ("LDSM", "LDGSTS", r"HMMA\.1688\.F32\.TF32", r"MUFU\.EX2"),
    ("sm80", "fwd_fp32"): (
        *("LDSM", "LDGSTS", r"HMMA\.1688\.F32\.TF32", r"MUFU\.EX2", r"MUFU\.RCP"),
        r"STG\.E\.128",
    ),
    ("sm90", "fwd"): (
        *("UTMALDG", "HGMMA", r"MUFU\.EX2", r"MUFU\.RCP", r"FENCE\.VIEW\.ASYNC", "USETMAXREG"),
        *("STSM", "UTMASTG"),
    ),
    ("sm90", "bwd"): ("UTMALDG", "UBLKCP", "HGMMA", r"MUFU\.EX2", "USETMAXREG"),
    ("sm90", "dq"): ("UTMALDG", "HGMMA", r"MUFU\.EX2", "USETMAXREG"),
    ("sm90", "window"): (
        *("UTMALDG", "UBLKCP", "HGMMA", r"MUFU\.EX2", "USETMAXREG", "STSM"),
        *(r"FENCE\.VIEW\.ASYNC", r"STG\.E\.(64|128)"),  # nvcc tears some apart
    ),
}


def entries_of(code: str, op: str) -> list[dict[str, Any]]:
    tiles = [{**tile} for tile in INFO["tiles"]]
    return [tile for tile in tiles if (tile["arch"], op_of(tile)) == (ARCHS[code], op)]


def kernels_of(code: str, op: str = "fwd") -> list[Kernel]:
    if code not in ARCHS:
        pytest.skip(f"this build has no {code}")
    return sass.kernels(code, op)


def without_scored(kernels: list[Kernel]) -> list[Kernel]:
    """A softcap has exponentials of its own."""
    return [kernel for kernel in kernels if kernel.mask != "scored"]


@pytest.fixture(scope="module", params=TARGETS, ids="-".join)
def target(request: pytest.FixtureRequest) -> tuple[str, str]:
    code, op = request.param
    return code, op


@pytest.fixture(scope="module")
def entries(target: tuple[str, str]) -> list[dict[str, Any]]:
    return entries_of(*target)


@pytest.fixture(scope="module")
def kernels(target: tuple[str, str]) -> list[Kernel]:
    return kernels_of(*target)


@pytest.fixture(scope="module")
def resources(target: tuple[str, str]) -> dict[str, dict[str, int]]:
    return sass.usage("-arch", target[0])


def test_machine_code_for_every_chip() -> None:
    if not ARCHS:
        pytest.skip(f"this build has no machine code ({', '.join(INFO['archs'])})")
    assert {tile["arch"] for tile in INFO["tiles"]} >= set(ARCHS.values())
    listed = sass.cuobjdump("-lelf")
    assert set(re.findall(r"\.(sm_\d+a?)\.cubin", listed)) == set(INFO["archs"]) - {"compute_80"}
    assert "compute_80" not in INFO["archs"] or ".sm_80.ptx" in sass.cuobjdump("-lptx")


@pytest.mark.parametrize(
    "code, kernel, instructions",
    [
        ("sm_90", "BlocksKernel", {"PREEXIT"}),
        ("sm_90", "PreprocessKernel", {"ACQBULK"}),
        ("sm_90", "CombineKernel", {"ACQBULK"}),
        ("sm_90a", r"9FwdKernel\S*MaskKindE[23]", {"ACQBULK"}),  # packed
        ("sm_90a", "9BwdKernel", {"ACQBULK"}),
        ("sm_90a", "12WindowKernel", {"ACQBULK"}),
        ("sm_90a", "9DkvKernel", {"ACQBULK", "PREEXIT"}),
        ("sm_90a", "8DqKernel", {"ACQBULK"}),
    ],
)
def test_overlapping_kernels_wait_and_let_others_begin(
    code: str, kernel: str, instructions: set[str]
) -> None:
    """PTX of compute_80 lacks these instructions (csrc/cute_fa2/common/grid.h)."""
    if code not in ARCHS:
        pytest.skip(f"this build has no {code}")
    found = [text for name, text in sass.functions_by_code()[code] if re.search(kernel, name)]
    assert found
    for text in found:
        assert set(re.findall("ACQBULK|PREEXIT", text)) >= instructions


def test_every_entry_has_its_kernels(
    entries: list[dict[str, Any]], kernels: list[Kernel], resources: dict[str, dict[str, int]]
) -> None:
    """So that the tests below miss none."""
    # Two entries may have the same tile, of which there is one kernel, or one for each mask.
    masks: dict[tuple[int, ...], int] = {}
    for entry in entries:
        tile, served = tile_of(entry), MASKS[entry["mask"]]
        served += 2 * ("packed" not in entry and not entry.get("dense_only"))
        if op_of(entry).startswith("large"):
            served = 3  # a kernel for each gradient, of any mask
        elif op_of(entry) == "window":
            served = 2  # banded and packed
        masks[tile] = masks.get(tile, 0) + served if entry["mask"] != "any" else served
    for entry in entries:
        is_packed, reads_bias = entry.get("packed", False), entry.get("bias", False)
        is_scored = entry["head_dim"] == entry["head_dim_v"] and (is_packed or reads_bias)
        of_splits = 2 * entry.get("split_kv", False)  # of dense calls and packed ones
        masks[tile_of(entry)] += of_splits + is_packed + is_scored * (op_of(entry) == "fwd")
    dtypes = 1 if entries[0]["op"].endswith("fp32") else HALF_DTYPES
    expected = {tile: dtypes * count for tile, count in masks.items()}
    assert Counter(kernel.tile for kernel in kernels) == expected
    split_kv = {kernel.tile for kernel in kernels if kernel.is_split_kv}
    assert split_kv == {tile_of(entry) for entry in entries if entry.get("split_kv")}
    assert {kernel.name for kernel in kernels} <= set(resources)


def test_instructions(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        wanted = INSTRUCTIONS[kernel.arch, kernel.op]
        if kernel.is_split_kv:  # whose results leave in fp32, from registers
            assert not re.search(r"\b(STSM|UTMASTG)\b", kernel.names), kernel
            wanted = ("STG", *wanted[:-2])
        missing = [name for name in wanted if not re.search(rf"\b{name}\b", kernel.names)]
        assert not missing, (kernel, missing)


def test_wgmma_is_not_serialized(kernels: list[Kernel]) -> None:
    """ptxas may put a WARPGROUP.ARRIVE before each wgmma and a wait behind it."""
    for kernel in kernels:
        count = kernel.opcodes
        assert kernel.arch == "sm80" or count["WARPGROUP"] < count["HGMMA"], kernel


def test_warps_go_together(kernels: list[Kernel]) -> None:
    """Where ptxas cannot tell that the lanes of a warp are together, it makes them meet. What they
    have in common, each then computes. In a backward one thread may wait for a turn or a flag. In
    dQ's own kernel lanes meet where a consumer skips blocks."""
    for kernel in kernels:
        allowed = {"bwd": 1, "dq": 3}.get(kernel.op, 0)
        if (kernel.op, kernel.mask) == ("bwd", "scored"):
            allowed = 3  # behind the branches of their changes, ahead of the first product each
        assert kernel.arch == "sm80" or kernel.opcodes["WARPSYNC"] <= allowed, kernel


def test_copies_start_without_a_loop(kernels: list[Kernel]) -> None:
    """Of an elected lane ptxas knows that it is alone. Any other starts loads by TMA, and bulk
    copies, in a loop over lanes (csrc/cute_fa2/notes/packed.md). So do those of large head dims."""
    for kernel in kernels:
        if kernel.arch == "sm90" and kernel.config["head_dim"] <= 256:
            assert not re.search(r"\bBRA\.U\.ANY\b", kernel.text), kernel


def test_dq_begins_behind_the_preprocess(kernels: list[Kernel]) -> None:
    """dQ's own kernel reads what the preprocess wrote, and waits for the kernel before it alone. So
    that one lets it begin (PREEXIT) once it has waited itself (ACQBULK)."""
    for kernel in kernels:
        if (kernel.arch, kernel.op) == ("sm90", "bwd"):
            assert re.findall(r"\b(?:ACQBULK|PREEXIT)\b", kernel.text) == ["ACQBULK", "PREEXIT"], (
                kernel
            )


def test_no_division(kernels: list[Kernel]) -> None:
    """Of integers: a chain of some 20 instructions, ahead of a tile's first load. It begins with a
    conversion to float that rounds up. A backward may have one behind its last MMA, where CTAs
    share the heads of a group."""
    for kernel in kernels:
        text = kernel.text
        if kernel.arch == "sm80" and kernel.op.startswith("bwd"):
            text = text[: text.rindex("HMMA")]
        assert not re.search(r"\bI2F\.(\w+\.)*RP\b", text), kernel


@pytest.mark.parametrize(
    "kind",
    [
        *("Combine", "Preprocess", "Convert", "Blocks", "SinkGradient", "BiasGradient"),
        *("BiasSum", "LargeBiasGradient"),
    ],
)
def test_small_kernels_do_not_spill(kind: str) -> None:
    """On any chip."""
    codes = set(ARCHS) - {"sm_90a"}
    if not codes:
        pytest.skip("this build has no machine code of theirs")
    usage = sass.cuobjdump("-res-usage")
    found = re.findall(rf"Function \S*\d{kind}Kernel(\S*):\n(.*)", usage)
    assert all("STACK:0" in line and "LOCAL:0" in line for _, line in found)
    if kind in ("BiasGradient", "BiasSum"):  # one for a head dim
        head_dims = {e["head_dim"] for code in codes for e in entries_of(code, "bwd")}
        assert len(found) == HALF_DTYPES * len(head_dims) * len(codes)
    elif kind == "LargeBiasGradient":
        of_op = [
            {tile_of(entry) for code in codes for entry in entries_of(code, op)}
            for op in ("large", "large_fp32")
        ]
        assert len(found) == (HALF_DTYPES * len(of_op[0]) + len(of_op[1])) * len(codes)
    elif kind == "Convert":  # one or two for a tile of sm80's backward, which they name
        config = re.compile(r"DTypeE\d\S*?BwdConfigSm80E(?:Li\d+E)+tl\w+?ELi\dELi\dEE")
        counts = Counter(tile for name, _ in found for tile in config.findall(name)[:1])
        assert (counts.total() < len(found)) == ("sm_90a" in ARCHS)
        of_op = [
            {tile_of(entry) for code in codes for entry in entries_of(code, op)}
            for op in ("bwd", "bwd_fp32")
        ]
        assert len(counts) == HALF_DTYPES * len(of_op[0]) + len(of_op[1])
        assert {count / len(codes) for count in counts.values()} <= {1, 2}
    else:
        dtypes = 3 if kind in ("Combine", "Preprocess") else 1
        assert len(found) == dtypes * len(codes)


def test_no_spills(
    target: tuple[str, str],
    entries: list[dict[str, Any]],
    kernels: list[Kernel],
    resources: dict[str, dict[str, int]],
) -> None:
    """In what is ever launched: the machine code for a chip has the tiles for others as well."""
    code, op = target
    launched = set(map(tile_of, entries))
    if code in SMEM_LIMITS:
        of_op = op.replace("large", "bwd")
        chosen = [{**e} for limit in SMEM_LIMITS[code] for e in ops.tiles_for(limit, of_op)]
        launched = {tile_of(entry) for entry in chosen if op_of(entry) == op}
    assert launched <= {kernel.tile for kernel in kernels}
    spilling = []
    for kernel in kernels:
        if kernel.tile in launched:
            used = resources[kernel.name]
            spills = kernel.opcodes["LDL"], kernel.opcodes["STL"], used["STACK"], used["LOCAL"]
            known = KNOWN_SPILLS.get((code, op, kernel.tile[0], kernel.mask), 0)
            spilling += [(kernel, spills)] if any(spills) and not 0 < used["STACK"] <= known else []
    assert spilling == []


def test_registers_within_the_budget(
    entries: list[dict[str, Any]], kernels: list[Kernel], resources: dict[str, dict[str, int]]
) -> None:
    for kernel in kernels:
        budget = min(e["max_registers"] for e in entries if tile_of(e) == kernel.tile)
        used = resources[kernel.name]["REG"]
        assert used <= budget, (kernel, used)
        # What warpgroups ask for adds up to all: launched with less, they would wait for ever.
        assert kernel.arch == "sm80" or used == budget, (kernel, used)


#: Exponentials behind the main loop: of the sink's share in each of two rows, and in the LSE.
OF_SINK = 4


def test_softmax_stands_under_a_product() -> None:
    """All exponentials and additions of a step. ptxas may move a wait for a gemm ahead of them,
    which then no longer run beside it."""
    for kernel in without_scored(kernels_of("sm_90a")):
        if kernel.config["column_groups"] > 1:
            continue  # it has a warpgroup of its own
        pieces = re.split(r"\b(WARPGROUP\.DEPBAR\.LE gsb0, 0x\d|HGMMA)\b", kernel.text)
        ahead = list(zip(pieces[1::2], pieces[2::2], strict=True))  # and what stands behind it
        # A sink takes a few more, behind the last product.
        softmax = [(wait, piece) for wait, piece in ahead if piece.count("MUFU.EX2") > OF_SINK]
        # For the first scores of a tile; at the head of the loop over its blocks; for the scores of
        # the next block; for all of O. Not where a reference rises: warps would wait alone.
        waits = [wait[-1] for wait, _ in ahead if wait != "HGMMA"]
        assert waits == ["0", "0", "1", "0"], kernel
        # Of a tile's first block, which waits for all gemms; of the others, where one is left.
        assert [wait[-1] for wait, _ in softmax] == ["0", "1"], kernel
        rows, scores = 2, 64 * kernel.config["block_n"] // 128  # of a thread
        # In the other blocks a row's limit may change, which takes one more.
        for (_, piece), changes in zip(softmax, (0, rows), strict=True):
            assert piece.count("MUFU.EX2") == scores + changes, kernel
            assert len(re.findall(r"\bFADD\b", piece)) >= scores, kernel


def test_products_follow_each_other() -> None:
    """Between two products of P V there is little that takes a warp's time: instructions for all of
    it (U...) aside, two at most. Five cost 4% (csrc/cute_fa2/notes/packed.md). Where scores change,
    a bias is asked for there. Split-KV has more at head dim 32."""
    for kernel in without_scored(kernels_of("sm_90a")):
        if kernel.is_split_kv:
            continue
        between: int | None = None  # behind a product of P V that another one follows
        products = 0
        for line in kernel.text.splitlines():
            if line.startswith("HGMMA") and "tnspB" in line:
                products += 1
                assert between is None or between <= 2, kernel
                between = None if "gsb0" in line else 0
            elif between is not None and not line.startswith("U"):
                between += 1
        assert products > 1, kernel


def test_output_leaves_by_tma() -> None:
    """Each strip of a warp's rows of O goes to shared memory as matrices. Behind a fence of the
    async proxy TMA stores it. Threads store the log-sum-exp alone."""
    fence = "FENCE.VIEW.ASYNC"
    steps = re.compile(rf"\b(HGMMA|WARPGROUP\.DEPBAR|STG|STSM\.16\.M88\.4|{fence}|UTMASTG)\b")
    for kernel in kernels_of("sm_90a"):
        if kernel.is_split_kv or kernel.mask in ("packed", "scored"):
            continue  # their last rows leave from registers
        if kernel.config["column_groups"] > 1:
            continue  # whose P takes the same way
        head_dim = kernel.config["head_dim_v"]
        columns = 64 if head_dim % 64 == 0 else 32  # of a strip, by 16
        strip = [*["STSM.16.M88.4"] * (columns // 16), fence, "UTMASTG"]
        stores = ["STG", *strip * (head_dim // columns)]
        found = steps.findall(kernel.text)
        # Behind the fence of the barriers, for a CTA's last tile and for those before.
        without_gemms = [step for step in found if step in (fence, *stores)]
        assert without_gemms == [fence, *stores, *stores], kernel
        # Those before are stored under the first product of the next tile, which is the last in
        # the text; the wait for it is at the head of the loop.
        assert found[-len(stores) - 1 :] == ["HGMMA", *stores], kernel


@pytest.mark.parametrize("code", ["sm_90", "sm_90a"])
def test_scores_are_compared_three_at_a_time(code: str) -> None:
    """Hopper finds the greatest of three integers in one instruction."""
    for kernel in kernels_of(code):
        config = kernel.config
        if code == "sm_90a":
            rows, columns = 2, config["block_n"] // 4  # of a thread
        else:
            rows = config["block_m"] // config["row_warps"] // 8
            columns = config["block_n"] // config["column_warps"] // 4
        assert kernel.opcodes["VIMNMX3"] >= rows * ((columns - 1) // 2), kernel


@pytest.mark.parametrize("code", ["sm_80", "sm_90"])
def test_exponentials_stand_among_mmas(code: str) -> None:
    """The exponentials of a step's later columns run under P V of its earlier ones.
    A branch among them would keep ptxas from that. Where warps share rows, they first wait for each
    other's; where Q K^T is pipelined, see the next test."""
    for kernel in without_scored(kernels_of(code)):
        config = kernel.config
        if config["column_warps"] > 1 or config["pipelined_qk"]:
            continue
        scores = config["block_m"] * config["block_n"] // (32 * config["row_warps"])  # of a thread
        with_mmas = [piece for piece in re.split(r"\bBRA\b", kernel.text) if "HMMA" in piece]
        step = max(with_mmas, key=lambda piece: piece.count("MUFU.EX2"))
        assert step.count("MUFU.EX2") >= scores, kernel
        assert step[step.index("HMMA") :].count("MUFU.EX2") >= scores // 2, kernel


@pytest.mark.parametrize("code", ["sm_80", "sm_90"])
def test_pipelined_qk_stands_among_exponentials(code: str) -> None:
    """Between two branches are the MMAs of 16 keys: P V, and Q K^T of the next block. Among them
    are the exponentials of the next 16 keys."""
    kernels = without_scored(kernels_of(code))
    pipelined = [kernel for kernel in kernels if kernel.config["pipelined_qk"]]
    assert pipelined
    for kernel in pipelined:
        config = kernel.config
        rows = config["block_m"] // config["row_warps"]  # of a warp
        blocks_of_16 = config["block_n"] // 16
        exponentials = rows * 16 // 32
        mmas = 2 * rows * 16 * config["head_dim"] // (16 * 8 * 16)
        pieces = re.split(r"\bBRA\b", kernel.text)
        # The first 16 keys may have all of their own there, too. Behind the last there are no next.
        whole = among_mmas(pieces, mmas, range(exponentials, 2 * exponentials + 1))
        assert len(whole) >= blocks_of_16 - 1, kernel
        assert min(whole) >= exponentials // 2, kernel
        # Of a tile with few rows. Before the first 16 keys there are others' exponentials; at head
        # dim 32 sm_80 has one of the pieces with its exponentials before its MMAs.
        half = among_mmas(pieces, mmas // 2, [exponentials // 2])
        assert len(half) >= blocks_of_16 - 2, kernel
        assert sum(half) >= len(half) * exponentials // 4, kernel


def among_mmas(pieces: list[str], mmas: int, exponentials: Container[int]) -> list[int]:
    """Of the pieces with so many of each, how many exponentials stand among the MMAs."""
    return [
        piece[piece.index("HMMA") : piece.rindex("HMMA")].count("MUFU.EX2")
        for piece in pieces
        if piece.count("HMMA") == mmas and piece.count("MUFU.EX2") in exponentials
    ]
