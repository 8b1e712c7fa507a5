"""The forward kernels as nvcc compiles them: their PTX, launched by the project's own code and run
instruction by instruction. The emulated machine (tests/emulator) runs the same sources through
another compiler and without their inline assembly; here are both, and the launch's parameters."""

from __future__ import annotations

import math
import re

import pytest
import torch
from cases import check
from support import BANDS, poisoned, random_inputs

pytest.importorskip("numpy")

from ptx_emulator import PtxEmulator
from ptx_instructions import compile_kernel
from ptx_text import parse

BF16, FP16 = torch.bfloat16, torch.float16
BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
EVERY_BUCKET = pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])


@BOTH_MASKS
@EVERY_BUCKET
def test_sm80(sm80, head_dim, is_causal):
    inputs = random_inputs(1, 2, 129, head_dim, heads_kv=1, len_k=193, dtype=BF16)
    check(sm80[BF16], *map(poisoned, inputs), is_causal)


@BOTH_MASKS
@EVERY_BUCKET
def test_sm90(sm90, head_dim, is_causal):
    inputs = random_inputs(1, 2, 200, head_dim, heads_kv=1, len_k=333, dtype=BF16)
    check(sm90[BF16], *map(poisoned, inputs), is_causal, multiprocessors=1)


@BOTH_MASKS
def test_fp16(sm80, sm90, is_causal):
    inputs = random_inputs(1, 2, 70, 64, len_k=150, dtype=FP16)
    check(sm80[FP16], *map(poisoned, inputs), is_causal)
    check(sm90[FP16], *map(poisoned, inputs), is_causal, multiprocessors=1)


@BOTH_MASKS
@pytest.mark.parametrize("smem_limit", [166912, 101376])  # of sm_80, and of sm_86, 89 and 120
@pytest.mark.parametrize("head_dim", [128, 256])
def test_other_rows_of_the_tile_table(sm80, head_dim, smem_limit, is_causal):
    inputs = random_inputs(1, 1, 129, head_dim, len_k=140, dtype=BF16)
    check(sm80[BF16], *map(poisoned, inputs), is_causal, smem_limit=smem_limit)


@pytest.mark.parametrize(
    "head_dim, len_q, is_causal",
    [(64, 100, False), (64, 100, True), (96, 150, False), (128, 150, False), (128, 150, True)],
)
def test_other_rows_of_sm90(sm90, head_dim, len_q, is_causal):
    """Than those which `test_sm90` has."""
    call = {"heads": 2, "is_banded": is_causal, "multiprocessors": 1}
    other = sm90[BF16].tile(head_dim, 200, 333, heads_kv=1, **call)
    assert sm90[BF16].tile(head_dim, len_q, 140, **call) != other
    inputs = random_inputs(1, 2, len_q, head_dim, len_k=140, dtype=BF16)
    check(sm90[BF16], *map(poisoned, inputs), is_causal, multiprocessors=1)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 136, 200])
def test_head_dims_below_the_tile(sm80, sm90, head_dim):
    inputs = random_inputs(1, 1, 70, head_dim, len_k=90, dtype=BF16)
    check(sm80[BF16], *map(poisoned, inputs), True)
    check(sm90[BF16], *map(poisoned, inputs), True, multiprocessors=1)


@BOTH_MASKS
@pytest.mark.parametrize("heads, len_q", [(8, 1), (3, 5), (64, 3)])
def test_groups_of_heads(sm80, sm90, heads, len_q, is_causal):
    inputs = random_inputs(2, heads, len_q, 64, heads_kv=1, len_k=150, dtype=BF16)
    check(sm80[BF16], *map(poisoned, inputs), is_causal)
    check(sm90[BF16], *map(poisoned, inputs), is_causal, multiprocessors=2)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim, heads, len_q", [(64, 2, 70), (40, 6, 3), (128, 8, 1)])
def test_keys_in_parts(sm80, sm90, head_dim, heads, len_q, is_causal):
    inputs = random_inputs(2, heads, len_q, head_dim, heads_kv=2, len_k=333, dtype=BF16)
    for splits in (2, 5):
        check(sm80[BF16], *map(poisoned, inputs), is_causal, splits=splits)
        check(sm90[BF16], *map(poisoned, inputs), is_causal, splits=splits, multiprocessors=2)


@pytest.mark.parametrize("head_dim", [32, 96, 192, 256])
def test_keys_in_parts_of_other_head_dims(sm90, head_dim):
    inputs = random_inputs(1, 2, 70, head_dim, len_k=333, dtype=BF16)
    check(sm90[BF16], *map(poisoned, inputs), True, splits=3, multiprocessors=2)


def test_keys_in_parts_of_other_tiles(sm80):
    """Of which several warps share the rows."""
    inputs = random_inputs(1, 2, 5, 256, heads_kv=1, len_k=150, dtype=BF16)
    check(sm80[BF16], *map(poisoned, inputs), True, smem_limit=166912, splits=2)
    inputs = random_inputs(1, 1, 5, 64, len_k=150, dtype=FP16)
    check(sm80[FP16], *map(poisoned, inputs), True, -3.0, splits=2)


def test_expanded_and_strided(sm80, sm90):
    q, k, v = random_inputs(2, 3, 70, 64, dtype=BF16)
    k = k[:, :1].clone().expand(2, 3, 70, 64)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # (batch, rows, heads, columns) in memory
    for emulator in (sm80[BF16], sm90[BF16]):
        check(emulator, q, k, v, True, multiprocessors=2)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-42, 3.0, 100.0])
def test_scales(sm80, sm90, scale):
    inputs = random_inputs(1, 1, 70, 64, len_k=130, dtype=BF16)
    check(sm80[BF16], *map(poisoned, inputs), True, scale)
    if scale > 0:
        check(sm90[BF16], *map(poisoned, inputs), True, scale, multiprocessors=1)


def test_huge_scale_picks_the_greatest_scores(sm80):
    q, k, v = random_inputs(1, 1, 70, 64, len_k=130, dtype=BF16)
    q, k = (2 * q).round(), (2 * k).round()
    out, _, _ = sm80[BF16].forward(q, k, v, 1e10)
    scores = q.double() @ k.double().mT
    best = (scores == scores.amax(-1, keepdim=True)).double()
    exact = best / best.sum(-1, keepdim=True) @ v.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(BF16).eps)


def test_rows_without_a_key(sm80, sm90):
    inputs = random_inputs(1, 1, 300, 64, len_k=40, dtype=BF16)
    for emulator in (sm80[BF16], sm90[BF16]):
        out, lse, _ = check(emulator, *map(poisoned, inputs), True, multiprocessors=1)
        assert torch.all(out[:, :, :260] == 0) and torch.all(lse[:, :, :260] == -math.inf)


@pytest.mark.parametrize("window_left, window_right, diagonal_offset", BANDS[:8:2])
def test_bands(sm80, sm90, window_left, window_right, diagonal_offset):
    inputs = random_inputs(1, 1, 140, 64, len_k=300, dtype=BF16)
    band = {
        "window_left": window_left,
        "window_right": window_right,
        "diagonal_offset": diagonal_offset,
    }
    check(sm80[BF16], *map(poisoned, inputs), **band)
    check(sm90[BF16], *map(poisoned, inputs), multiprocessors=1, **band)


@BOTH_MASKS
@pytest.mark.parametrize("head_dim, seed", [(64, 1), (64, 2), (128, 1)])
def test_results_do_not_depend_on_when_copies_and_products_happen(
    sm80, sm90, head_dim, seed, is_causal
):
    inputs = random_inputs(1, 2, 200, head_dim, len_k=400, dtype=BF16)
    for emulator in (sm80[BF16], sm90[BF16]):
        first = check(emulator, *map(poisoned, inputs), is_causal, multiprocessors=1)
        other = check(emulator, *map(poisoned, inputs), is_causal, multiprocessors=1, seed=seed)
        assert all(map(torch.equal, first[:2], other[:2]))


# -- whether the machine sees what is wrong -------------------------------------------------------

WRONG, STUCK, UNFINISHED = "out error", "for ever", "while copies or products are under way"
#: Of which architecture and head dim; an instruction, and what is put in its place; what is said.
FAULTS = {
    "copies_not_waited_for": ("sm80", 64, r"cp\.async\.wait_all;", "", UNFINISHED),
    "no_barriers": ("sm80", 64, r"bar\.sync\s+0;", "", WRONG),
    "V_not_transposed": ("sm80", 64, r"\.x4\.trans\.", ".x4.", WRONG),
    "rows_do_not_share_their_maximum": (
        *("sm80", 64, r"shfl\.sync\.bfly\.b32\s+(%r\d+)\|%p\d+, (%r\d+),.*;", r"mov.b32 \1, \2;"),
        WRONG,
    ),
    "warps_vote_apart": (
        *("sm80", 192, r"bar\.red\.or\.pred (%p\d+), 0, (%p\d+);"),
        r"bar.sync 0; vote.sync.any.pred \1, \2, -1;",
        f"{WRONG}|{STUCK}",
    ),
    "products_not_waited_for": ("sm90", 64, r"wgmma\.wait_group\.sync\.aligned 0;", "", UNFINISHED),
    "V_not_across_its_rows": (
        *("sm90", 64, r"(p,\s+1,\s+1,\s+)1;", r"\g<1>0;", f"of shared memory|{WRONG}"),
    ),
    "bytes_not_expected": ("sm90", 64, r"arrive\.expect_tx(.*\]), %r\d+;", r"arrive\1;", STUCK),
    # At a head dim of which all tiles have turns.
    "turns_not_passed_on": ("sm90", 192, r"bar\.arrive .*;", "", STUCK),
    "boxes_not_waited_for": ("sm90", 64, r"cp\.async\.bulk\.wait_group\.read \d;", "", UNFINISHED),
    "rows_of_O_swapped": (*("sm90", 64, r"(stmatrix.*\{)(%r\d+), (%r\d+),", r"\1\3, \2,", WRONG),),
    "nothing_released": ("sm90", 64, r"mbarrier\.arrive\.shared::cta\.b64 .*;", "", STUCK),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(sm80, sm90, name):
    arch, head_dim, pattern, replacement, says = FAULTS[name]
    emulator = (sm80 if arch == "sm80" else sm90)[BF16]
    changed = [re.subn(pattern, replacement, text) for text in emulator.ptx]
    assert sum(count for _, count in changed)
    wrong = PtxEmulator(emulator.path, emulator.arch, (text for text, _ in changed))
    inputs = random_inputs(1, 1, 200, head_dim, len_k=700, dtype=BF16)
    with pytest.raises(AssertionError, match=says):
        check(wrong, *map(poisoned, inputs), True, multiprocessors=1)


def test_what_is_not_known_is_refused():
    entry = (
        ".entry k(\n.param .align 8 .b8 p[8]\n)\n.maxntid 32, 1, 1\n{ .reg .b32 %r<3>; %s ret; }"
    )
    compile_kernel(parse(entry.replace("%s", "add.s32 %r1, %r2, 1;"))[0])
    for statement in ("popc.b32 %r1, %r2;", "add.sat.s32 %r1, %r2, 1;", "mov.u32 %r1, %clock;"):
        with pytest.raises(ValueError, match="not known here"):
            compile_kernel(parse(entry.replace("%s", statement))[0])
