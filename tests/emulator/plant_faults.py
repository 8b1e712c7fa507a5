"""Plants faults in copies of the kernels, one at a time, and shows what the emulator says of each.

python tests/emulator/plant_faults.py            all of them, as a table
python tests/emulator/plant_faults.py causal     those with this in their names
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path += [str(tests), str(tests.parent)]

import torch
from build_emulator import BUILD, ROOT, SOURCES, SPLITS, Library, build, write
from cases import check
from emulator import EmulationError, Emulator
from support import poisoned, random_inputs, rising_inputs

MAINLOOP = "sm80/fwd_mainloop.h"
EPILOGUE = "sm80/fwd_epilogue.h"
TRAITS = "sm80/traits.h"
HOLDERS = "sm80/row_holders.h"
COPY = "common/copy.h"
MASK = "common/mask.h"
TILE = "common/tile.h"
ORDER = "common/tile_order.h"
SEQUENCE = "common/sequence.h"
COMBINE = "common/combine_kernel.h"
SOFTMAX = "common/online_softmax.h"
SM90_KERNEL = "sm90/fwd_kernel.h"
SM90_MAINLOOP = "sm90/fwd_mainloop.h"
SM90_EPILOGUE = "sm90/fwd_epilogue.h"
SM90_TRAITS = "sm90/traits.h"
SM90_MAP = "sm90/tensor_map.h"

# What catches a fault, as regular expressions.
RACE = "with no barrier in between"
UNWRITTEN = "which nobody has written"
UNFINISHED = "has not waited for"
BOUNDS = "in no row of any tensor"
WRONG = "out error"  # or the LSE's
CONFLICTS = "bank conflicts"
IN_USE = "which a product of warp .* (still reads|has read)"
STUCK = "every thread waits"


@dataclass(frozen=True)
class Fault:
    name: str
    caught_by: str
    # Header in sm80/, sm90/ or common/, text that stands there once, what takes its place.
    edits: Sequence[tuple[str, str, str]]
    head_dim: int = 64
    arch: int = 80

    @property
    def library(self) -> Library:
        folder = f"{BUILD}/faults/{self.name.replace(' ', '_')}"
        return Library(
            name=folder.removeprefix(f"{BUILD}/"),
            sources=f"{folder}/cute_fa2",
            arch=self.arch,
            head_dims=(self.head_dim,),
            dtypes=("bf16",),
            masks=("banded",),
            combines=any(file == COMBINE for file, _, _ in self.edits),
        )

    def emulator(self, path: Path) -> Emulator:
        """Of one block at a time, so that it is the same objection each time that comes first."""
        return Emulator(path, workers=1, arch=self.arch)

    def plant(self) -> Library:
        """Writes the copy with the fault in it."""
        edited = {file for file, _, _ in self.edits}
        for source in sorted([*(ROOT / SOURCES).rglob("*.h"), ROOT / SOURCES / SPLITS]):
            name = source.relative_to(ROOT / SOURCES).as_posix()
            text = source.read_text()
            for file, old, new in self.edits:
                if file != name:
                    continue
                if text.count(old) != 1:
                    raise LookupError(
                        f"{self.name!r} cannot be planted: {file} has {text.count(old)} times "
                        f"{old!r}; bring plant_faults.py up to date"
                    )
                text = text.replace(old, new)
                edited.discard(file)
            write(f"{self.library.sources}/{name}", text)
        if edited:
            raise LookupError(f"{self.name!r} cannot be planted: there is no {edited}")
        return self.library


FAULTS = [
    Fault(
        "barrier removed before K is read",
        f"{RACE}|{UNWRITTEN}|{UNFINISHED}",
        [
            (
                MAINLOOP,
                "platform::sync_block();\n      if constexpr (!kScoresAhead) {",
                "if constexpr (!kScoresAhead) {",
            )
        ],
    ),
    Fault(
        "barrier removed before V is read",
        f"{RACE}|{UNFINISHED}",
        [(MAINLOOP, "platform::sync_block();\n          load_next_keys", "load_next_keys")],
        head_dim=96,
    ),
    Fault(
        "barrier removed before the first block is read",
        f"{RACE}|{UNWRITTEN}|{UNFINISHED}",
        [(MAINLOOP, "platform::sync_block();  // Q and K", "// Q and K")],
    ),
    Fault(
        "first block not waited for",
        UNFINISHED,
        [
            (
                MAINLOOP,
                "platform::wait_copies<kScoresAhead ? 1 : 0>",
                "platform::wait_copies<kScoresAhead ? 2 : 0>",
            )
        ],
    ),
    Fault(
        "rises of the next block missed",
        WRONG,
        [
            (
                MAINLOOP,
                "may_rise = softmax.may_rise(as_matrix(tSrS_all));",
                "may_rise = false;",
            )
        ],
    ),
    Fault(
        "barrier removed before O is read",
        RACE,
        [(EPILOGUE, "platform::sync_block();  // O is", "// O is")],
    ),
    Fault(
        "wait for the wrong group",
        UNFINISHED,
        [
            (
                MAINLOOP,
                "platform::wait_copies<0>();\n      platform::sync_block();",
                "platform::wait_copies<1>();\n      platform::sync_block();",
            )
        ],
    ),
    Fault(
        "next block loaded into the stage in use",
        UNFINISHED,
        [
            (
                MAINLOOP,
                "load_keys(n_block - 2, true_type{});",
                "keys_values.template load_keys<true>(n_block - 2, sK(n_block - 1));",
            )
        ],
    ),
    Fault(
        "last block taken for whole",
        BOUNDS,
        [
            (
                MAINLOOP,
                "load_values(last_block, false_type{});",
                "load_values(last_block, true_type{});",
            )
        ],
    ),
    Fault(
        "causal edge off by one",
        WRONG,
        [(MASK, "offsets(r, c)) >= row_end", "offsets(r, c)) > row_end")],
    ),
    Fault(
        "first masked block left unmasked",
        WRONG,
        [
            (
                MASK,
                "return end(row_origin) < key_origin + keys ||",
                "return end(row_origin) < key_origin ||",
            )
        ],
    ),
    Fault(
        "output not rescaled",
        WRONG,
        [(SOFTMAX, "out(r, c) *= rescale_[kSkippedRows + r];", "out(r, c) *= 1.f;")],
    ),
    Fault(
        "swizzle dropped where O is read",
        WRONG,
        [
            (
                EPILOGUE,
                "thread_copy.partition_S(sO)",
                "thread_copy.partition_S(make_tensor(make_smem_ptr(smem.o), "
                "Layout<ShapeO, Stride<Int<Traits::kHeadDimV>, _1>>{}))",
            )
        ],
    ),
    Fault(
        "swizzle dropped everywhere",
        CONFLICTS,
        [(TRAITS, "cute::Swizzle<kStrip == 64 ? 3 : 2, 3, 3>", "cute::Swizzle<0, 3, 3>")],
    ),
    Fault(
        "load predicate off by one row",
        BOUNDS,
        [(COPY, "get<0>(beside(0, r, c)) < rows_left", "get<0>(beside(0, r, c)) <= rows_left")],
    ),
    Fault(
        "load predicate off by one column",
        BOUNDS,
        [(COPY, "(beside(0, r, c)) < columns_left", "(beside(0, r, c)) <= columns_left")],
    ),
    Fault(
        "LSE in base 2",
        WRONG,
        [(SOFTMAX, "log2(row.sum)) * kLn2;", "log2(row.sum)) * (0.f * kLn2 + 1.f);")],
    ),
    # CuTe fills fragments with zeros of its own accord: to leave `clear` out alone is no fault.
    Fault(
        "S not initialised",
        WRONG,
        [
            (
                MAINLOOP,
                "clear(tSrS_all);",
                "float unset[size(tSrS_all)];\n"
                "      for (int i = 0; i < size(tSrS_all); ++i) tSrS_all(i) = unset[i];",
            )
        ],
    ),
    Fault(
        "S not cleared between blocks",
        WRONG,
        [(MAINLOOP, "clear(next);", "")],
    ),
    Fault(
        "V not transposed",
        WRONG,
        [
            (
                TRAITS,
                "SmemLayoutV{}, cute::Layout<ShapeVt, ",
                "SmemLayoutV{}, cute::Layout<ShapeV, ",
            ),
            (
                TRAITS,
                "cute::Stride<cute::Int<kBlockN>, cute::_1>>{}));",
                "cute::Stride<cute::_1, cute::Int<kBlockN>>>{}));",
            ),
            (TRAITS, "platform::LoadMatrixTransposed", "platform::LoadMatrix"),
        ],
    ),
    Fault(
        "store past the last row of O",
        BOUNDS,
        [
            (
                EPILOGUE,
                "if (exists && column < params.head_dim) {\n              copy(gmem",
                "if (column < params.head_dim) {\n              copy(gmem",
            )
        ],
    ),
    Fault(
        "store past the last row of the LSE",
        "written already",  # it is the first row of the head behind
        [(EPILOGUE, "exists(row, len_q)) visit", "exists(row, len_q + 1)) visit")],
    ),
    Fault(
        "load past the last row of Q",
        BOUNDS,
        [(COPY, ".with(exists && column", ".with(column")],
    ),
    Fault(
        "row of a head that is not there",
        BOUNDS,
        [(TILE, "exists(row + i * kStep, len_q)", "query(row + i * kStep) < len_q")],
    ),
    Fault(
        "rows one after the other",
        f"{WRONG}|written already",
        [(TILE, "address += kStep * view.stride_row", "address += view.stride_row")],
    ),
    Fault(
        "rows that see keys skipped",
        WRONG,
        [(MAINLOOP, "mask.end(row0 + kMmaRows - 1)", "mask.end(row0)")],
    ),
    Fault(
        "no block left for the rows that were skipped",
        f"{BOUNDS}|behind a negative number",  # a block before the first
        [(MAINLOOP, "n_block * kBlockN && has_next(n_block);", "n_block * kBlockN;")],
    ),
    Fault(
        "O is taken for empty",
        WRONG,
        [
            (
                MAINLOOP,
                "mask.end(end - 1) > (n_block + 1) * kBlockN",
                "mask.end(end - 1) > (n_block + 2) * kBlockN",
            )
        ],
    ),
    Fault(
        "rows without keys are left as they are",
        WRONG,
        [(SOFTMAX, "platform::any_in_warp(has_keyless)", "false")],
    ),
    Fault(
        "log-sum-exp of another row",
        WRONG,
        [(SOFTMAX, "result.limit = r == row ? limit_[r] : result.limit;", "")],
    ),
    Fault(
        "sections that begin with the same head",
        "written already",
        [(ORDER, "first_section_.divisor + section *", "section *")],
    ),
    Fault(
        "row taken for a query",
        WRONG,
        [(MASK, "query_rows_.query(row) + band_end_", "row + band_end_")],
    ),
    Fault(
        "maximum of half a row",
        WRONG,
        [(SOFTMAX, ", 2));", ", 0));")],
    ),
    Fault(
        "scores below zero compared by their bits",
        WRONG,
        [(SOFTMAX, " || limit < 0.f;", ";")],
    ),
    Fault(
        "rises of later blocks missed",
        WRONG,
        [(SOFTMAX, "greatest > std::bit_cast<int>(limit) ||", "")],
    ),
    Fault(
        "barrier removed before P of other warps is read",
        f"{RACE}|{UNWRITTEN}",
        [(MAINLOOP, "platform::sync_block();  // P is there", "// P is there")],
        head_dim=192,
    ),
    Fault(
        "warps that share rows vote apart",
        f"{RACE}|{UNWRITTEN}|{UNFINISHED}",
        [
            (
                HOLDERS,
                "return platform::sync_block_or(predicate);",
                "platform::sync_block();\n    return platform::any_in_warp(predicate);",
            )
        ],
        head_dim=192,
    ),
    Fault(
        "vote of shared rows that is no barrier",
        f"{RACE}|{UNFINISHED}",
        [(HOLDERS, "platform::sync_block_or(predicate)", "platform::any_in_warp(predicate)")],
        head_dim=192,
    ),
    Fault(
        "words of other warps read before they are there",
        f"{RACE}|{UNWRITTEN}",
        [(HOLDERS, "platform::sync_block();  // the words", "// the words")],
        head_dim=192,
    ),
    Fault(
        "maximum of one warp of a shared row",
        WRONG,
        [(HOLDERS, "reduce(rows, [](float a, float b) { return fmaxf(a, b); });", "")],
        head_dim=192,
    ),
    Fault(
        "sum of one warp of a shared row",
        WRONG,
        [(HOLDERS, "reduce(rows, [](float a, float b) { return a + b; });", "")],
        head_dim=192,
    ),
    Fault(
        "barrier that half of the warps skip",
        f"{RACE}|every thread waits",
        [
            (
                EPILOGUE,
                "platform::sync_block();  // O is",
                "if (thread < Traits::kThreads / 2) platform::sync_block();  // O is",
            )
        ],
    ),
    # Of keys in parts.
    Fault(
        "parts that begin with the first key",
        WRONG,
        [(SEQUENCE, "key_begin(split * params.splits.keys)", "key_begin(0)")],
    ),
    Fault(
        "parts that end with the last key",
        WRONG,
        [(SEQUENCE, "key_begin + params.splits.keys)", "params.len_k)")],
    ),
    Fault(
        "parts in one place",
        "written already",
        [(EPILOGUE, "tile.batch += tile.split * params.batch;", "")],
    ),
    Fault(
        "part stored past the last row",
        f"{BOUNDS}|written already",
        [(EPILOGUE, "exists = query_rows.exists(row, len_q);", "exists = true;")],
    ),
    Fault(
        "parts that weigh what they weigh alone",
        WRONG,
        [(COMBINE, "row.sum * reference.rescale(row.limit, limit)", "row.sum")],
    ),
    Fault(
        "part left out",
        WRONG,
        [(COMBINE, "int split = first; split <", "int split = first + 1; split <")],
    ),
    Fault(
        "weights of parts read before they are there",
        f"{RACE}|{UNWRITTEN}",
        [
            (
                COMBINE,
                "platform::sync_block();  // the weights",
                "// the weights",
            )
        ],
    ),
    Fault(
        "combined before all is there",
        f"{RACE}|{UNWRITTEN}",
        [
            (
                COMBINE,
                "platform::sync_block();  // all sums",
                "// all sums",
            )
        ],
    ),
]


def of_sm90(
    name: str,
    caught_by: str,
    file: str,
    old: str,
    new: str,
    *more: tuple[str, str, str],
    head_dim: int = 64,
) -> Fault:
    return Fault(f"sm90 {name}", caught_by, [(file, old, new), *more], head_dim, 90)


SM90_FAULTS = [
    of_sm90(
        "K not waited for",
        f"{RACE}|{UNFINISHED}",
        SM90_MAINLOOP,
        "skip_blocks(work.skipped);\n"
        "      smem_.k_full[k_.stage].wait(k_.parity);  // K has arrived",
        "skip_blocks(work.skipped);",
    ),
    of_sm90(
        "V not waited for",
        f"{RACE}|{UNFINISHED}",
        SM90_MAINLOOP,
        "smem_.v_full[v_.stage].wait(v_.parity);             // V has arrived",
        "",
    ),
    of_sm90(
        "Q not waited for",
        f"{RACE}|{UNFINISHED}|{UNWRITTEN}",
        SM90_MAINLOOP,
        "smem_.q_full[q_.stage][index_].wait(q_.parity);  // Q has arrived",
        "",
    ),
    of_sm90(
        "K released before it is read",
        IN_USE,
        SM90_MAINLOOP,
        "hopper::wait_products<kInFlight>();",
        "release(smem_.k_empty[k_.stage]); hopper::wait_products<kInFlight>();",
        (
            SM90_MAINLOOP,
            "warpgroup_fence_operand(tSrS);\n      release_keys();",
            "warpgroup_fence_operand(tSrS);\n      k_.advance();",
        ),
    ),
    of_sm90(
        "Q never released",
        STUCK,
        SM90_MAINLOOP,
        "release(smem_.q_empty[q_.stage][index_]);",
        "",
    ),
    of_sm90(
        "one warp does not say that it is done with Q",
        f"{RACE}|{UNFINISHED}|{IN_USE}",
        SM90_MAINLOOP,
        "smem.q_empty[stage][i].init(kWarps);",
        "smem.q_empty[stage][i].init(kWarps - 1);",
    ),
    of_sm90(
        "empty K expected of one consumer alone",
        f"{IN_USE}|{RACE}|{UNFINISHED}|has had its",
        SM90_MAINLOOP,
        "smem.k_empty[stage].init(kConsumers * kWarps);",
        "smem.k_empty[stage].init(kWarps);",
    ),
    of_sm90(
        "producer waits for the wrong parity",
        f"{STUCK}|{IN_USE}",
        SM90_MAINLOOP,
        "empty[ring.stage].wait(ring.parity ^ 1);",
        "empty[ring.stage].wait(ring.parity);",
    ),
    of_sm90(
        "parity does not turn",
        f"{STUCK}|{RACE}|{UNFINISHED}|{IN_USE}|has had its",
        SM90_MAINLOOP,
        "parity ^= 1;",
        "",
    ),
    of_sm90(
        "fewer bytes expected than come",
        f"{RACE}|{UNFINISHED}|{STUCK}",
        SM90_MAINLOOP,
        "arrive_and_expect(sizeof stages[0]);",
        "arrive_and_expect(sizeof stages[0] / 2);",
    ),
    of_sm90(
        "scores read before they are there",
        UNFINISHED,
        SM90_MAINLOOP,
        "wait_for_scores<1>(tSrS);",
        "wait_for_scores<2>(tSrS);",
    ),
    of_sm90(
        "first scores read before they are there",
        UNFINISHED,
        SM90_MAINLOOP,
        "wait_for_scores<0>(tSrS);",
        "wait_for_scores<1>(tSrS);",
    ),
    of_sm90(
        "P written while the product reads it",
        UNFINISHED,
        SM90_MAINLOOP,
        "softmax.weigh(scores);",
        "softmax.weigh(scores);\n        convert_to_words<Element>(tSrS, words);",
    ),
    of_sm90(
        "product issued without a fence",
        "no wgmma.fence",
        SM90_MAINLOOP,
        "warpgroup_fence_operand(tSrP);\n      hopper::begin_products();",
        "warpgroup_fence_operand(tSrP);",
    ),
    of_sm90(
        "scores added to those of the block before",
        WRONG,
        SM90_MAINLOOP,
        "GMMA::ScaleOut::Zero",
        "GMMA::ScaleOut::One",
    ),
    of_sm90(
        "turn not passed",
        STUCK,
        SM90_MAINLOOP,
        "multiply_values(tSrP, tOrO);\n        pass_turn();",
        "multiply_values(tSrP, tOrO);",
    ),
    of_sm90(
        "V of a skipped block kept",
        f"{STUCK}|{RACE}|{UNFINISHED}|{WRONG}",
        SM90_MAINLOOP,
        "hand_back(smem_.v_full[v_.stage], smem_.v_empty[v_.stage], v_);",
        "",
    ),
    of_sm90(
        "lanes do not look at a skipped stage together",
        STUCK,
        SM90_MAINLOOP,
        "hopper::sync_warp();\n      release(empty);",
        "release(empty);",
        head_dim=96,
    ),
    of_sm90(
        "fewer bytes of Q expected than come",
        f"{RACE}|{UNFINISHED}|{STUCK}",
        SM90_MAINLOOP,
        "arrive_and_expect(sizeof smem_.q[0][0]);",
        "arrive_and_expect(sizeof smem_.q[0][0] / 2);",
    ),
    of_sm90(
        "tile told before the consumer is done with the one before",
        RACE,
        SM90_MAINLOOP,
        "smem_.q_empty[q_.stage][consumer].wait(q_.parity ^ 1);",
        "smem_.tile[q_.stage][consumer] = index;\n"
        "      smem_.q_empty[q_.stage][consumer].wait(q_.parity ^ 1);",
    ),
    of_sm90(
        "tile told after Q may have arrived",
        f"{RACE}|{UNWRITTEN}",
        SM90_MAINLOOP,
        "        announce(i, index);\n"
        "        smem_.q_full[q_.stage][i].arrive_and_expect(sizeof smem_.q[0][0]);",
        "        smem_.q_empty[q_.stage][i].wait(q_.parity ^ 1);\n"
        "        smem_.q_full[q_.stage][i].arrive_and_expect(sizeof smem_.q[0][0]);\n"
        "        announce(i, index);",
    ),
    of_sm90(
        "consumers not told of the end",
        STUCK,
        SM90_MAINLOOP,
        "smem_.q_full[q_.stage][i].arrive();",
        "",
    ),
    of_sm90(
        "turn of a skipped block not passed",
        STUCK,
        SM90_MAINLOOP,
        "wait_turn();\n        pass_turn();",
        "wait_turn();",
    ),
    of_sm90(
        "Q of a consumer without rows kept",
        STUCK,
        SM90_MAINLOOP,
        "        release_queries();\n      }\n    }",
        "      }\n    }",
    ),
    of_sm90(
        "O read before it is there",
        UNFINISHED,
        SM90_MAINLOOP,
        "multiply_values(tSrP, tOrO);\n      hopper::wait_products<0>();",
        "multiply_values(tSrP, tOrO);",
    ),
    of_sm90(
        "statistics of the tile before kept",
        WRONG,
        SM90_MAINLOOP,
        "softmax.start();",
        "",
    ),
    of_sm90(
        "O not rescaled",
        WRONG,
        SM90_MAINLOOP,
        "if (rises && is_multiplying) softmax.rescale(out);",
        "",
    ),
    of_sm90(
        "barriers not published",
        "has not been told",
        SM90_KERNEL,
        "hopper::publish_barriers();",
        "",
    ),
    of_sm90(
        "barriers used before they are there",
        "which nobody has initialised|initialised with no barrier",
        SM90_KERNEL,
        "platform::sync_block();",
        "",
    ),
    of_sm90(
        "map with another swizzle",
        "refused a tensor map",
        SM90_MAP,
        "strip == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B",
        "strip == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B",
    ),
    of_sm90(
        "layout with another swizzle",
        WRONG,
        SM90_TRAITS,
        "std::conditional_t<kStrip == 64,",
        "std::conditional_t<kStrip != 64,",
    ),
    of_sm90(
        "strips of V taken for keys",
        WRONG,
        SM90_TRAITS,
        "cute::Step<cute::_2, cute::_1>{}",
        "cute::Step<cute::_1, cute::_2>{}",
        head_dim=128,
    ),
    of_sm90(
        "lanes of a quad swapped",
        WRONG,
        SM90_EPILOGUE,
        "exchange(words[1], words[3], lane & 2, 2);",
        "exchange(words[3], words[1], lane & 2, 2);",
    ),
    of_sm90(
        "rows past the last written",
        BOUNDS,
        SM90_EPILOGUE,
        "const bool exists = arguments.query_rows.exists(row, len_q)",
        "const bool exists = arguments.query_rows.exists(row, len_q + 1)",
    ),
    of_sm90(
        "batches taken for heads",
        f"{WRONG}|{BOUNDS}",
        SM90_MAP,
        "{view.stride_head * group, heads / group, 1},\n"
        "                                   {view.stride_batch, batch, 1}",
        "{view.stride_batch, batch, 1},\n"
        "                                   {view.stride_head * group, heads / group, 1}",
    ),
]


def what_catches(emulator: Emulator, head_dim: int) -> str:
    """The first objection to the kernels of this library; nothing if there is none."""
    if emulator.arch == 90:
        return what_catches_sm90(emulator, head_dim)
    ragged = head_dim - 24
    for seed, (inputs_of, heads, heads_kv, len_q, len_k, columns, is_causal, scale) in enumerate(
        [
            (random_inputs, 2, 2, 40, 40, head_dim, True, None),
            (random_inputs, 2, 2, 150, 200, head_dim, False, 2.0),
            (random_inputs, 2, 2, 150, 200, ragged, True, None),
            (random_inputs, 2, 2, 150, 40, head_dim, True, -0.1),
            (random_inputs, 3, 1, 30, 40, head_dim, True, None),
            (rising_inputs, 1, 1, 40, 300, head_dim, False, 4.0),
            (random_inputs, 1, 1, 40, 300, head_dim, False, 50.0),
        ]
    ):
        inputs = inputs_of(
            1, heads, len_q, columns, heads_kv=heads_kv, len_k=len_k, dtype=torch.bfloat16
        )
        try:
            _, _, counters = check(emulator, *map(poisoned, inputs), is_causal, scale, seed=seed)
        except EmulationError as error:
            return str(error)
        except AssertionError as error:
            return str(error)
        if counters.load_matrix.conflicts:
            return f"bank conflicts of ldmatrix: {counters.load_matrix}"
    # Keys in parts: a row for each query, and rows of heads that share them.
    for len_q, splits in ((150, 2), (5, 4)):
        inputs = random_inputs(2, 6, len_q, head_dim, heads_kv=2, len_k=333, dtype=torch.bfloat16)
        try:
            check(emulator, *map(poisoned, inputs), True, splits=splits)
        except AssertionError as error:
            return str(error)
    return ""


def what_catches_sm90(emulator: Emulator, head_dim: int) -> str:
    # Several tiles for each of few blocks, so that the rings go round; the first case in many
    # orders of threads, as what goes wrong may depend on that.
    for seed, (heads, heads_kv, len_q, len_k, scale) in enumerate(
        [
            (2, 1, 300, 500, None),
            (3, 3, 200, 70, None),
            (4, 1, 20, 300, None),
            (4, 2, 129, 193, None),
            (1, 1, 50, 500, 3.0),
            *([(2, 1, 300, 500, None)] * 12),
        ]
    ):
        q, k, v = random_inputs(
            2, heads, len_q, head_dim, heads_kv=heads_kv, len_k=len_k, dtype=torch.bfloat16
        )
        try:
            check(emulator, *map(poisoned, (q, k, v)), True, scale, multiprocessors=2, seed=seed)
        except AssertionError as error:  # of the machine, or of the comparison
            return str(error)
    return ""


def main(part: str) -> int:
    faults = [fault for fault in [*FAULTS, *SM90_FAULTS] if part in fault.name]
    libraries = build(*(fault.plant() for fault in faults))
    missed = 0
    for fault, library in zip(faults, libraries, strict=True):
        objection = what_catches(fault.emulator(library), fault.head_dim)
        missed += not re.search(fault.caught_by, objection)
        print(f"{fault.name}\n    {objection or 'NOT CAUGHT'}")
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return missed


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
