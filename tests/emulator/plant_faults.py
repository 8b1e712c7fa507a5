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
from build_emulator import BUILD, ROOT, SOURCES, Library, build, write
from cases import check
from emulator import EmulationError, Emulator
from support import poisoned, random_inputs

MAINLOOP = "sm80/fwd_mainloop.h"
EPILOGUE = "sm80/fwd_epilogue.h"
TRAITS = "sm80/traits.h"
COPY = "common/copy.h"
MASK = "common/mask.h"
SOFTMAX = "common/online_softmax.h"

# What catches a fault, as regular expressions.
RACE = "with no barrier in between"
UNFINISHED = "has not waited for"
BOUNDS = "in no row of any tensor"
WRONG = "out error"  # or the LSE's
CONFLICTS = "bank conflicts"


@dataclass(frozen=True)
class Fault:
    name: str
    caught_by: str
    edits: Sequence[tuple[str, str, str]]  # file, text that stands there once, what takes its place
    head_dim: int = 64

    @property
    def library(self) -> Library:
        folder = f"{BUILD}/faults/{self.name.replace(' ', '_')}"
        return Library(
            name=folder.removeprefix(f"{BUILD}/"),
            sources=f"{folder}/cute_fa2",
            head_dims=(self.head_dim,),
            dtypes=("bf16",),
        )

    def plant(self) -> Library:
        """Writes the copy with the fault in it."""
        edited = {file for file, _, _ in self.edits}
        for source in sorted((ROOT / SOURCES).rglob("*")):
            if source.suffix not in (".h", ".cpp"):
                continue
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
        RACE,
        [
            (
                MAINLOOP,
                "platform::sync_block();\n      if constexpr (Traits::kStages == 1) {",
                "if constexpr (Traits::kStages == 1) {",
            )
        ],
    ),
    Fault(
        "barrier removed before V is read",
        f"{RACE}|{UNFINISHED}",
        [(MAINLOOP, "platform::sync_block();\n        if (n_block", "if (n_block")],
        head_dim=96,
    ),
    Fault(
        "barrier removed before O takes the space of Q",
        RACE,
        [(EPILOGUE, "platform::sync_block();  // all warps", "// all warps")],
    ),
    Fault(
        "barrier removed before O is read",
        RACE,
        [(EPILOGUE, "platform::sync_block();                       // O is", "// O is")],
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
                "load_keys(n_block - 1);\n        load_values",
                "keys_values.load_keys(n_block - 1, sK(n_block));\n        load_values",
            )
        ],
    ),
    Fault(
        "causal edge off by one",
        WRONG,
        [(MASK, "key >= row_end", "key > row_end")],
    ),
    Fault(
        "first masked block left unmasked",
        WRONG,
        [
            (
                MASK,
                "cute::max(0, end(row_begin)) / block_n",
                "cute::max(0, end(row_begin)) / block_n + 1",
            )
        ],
    ),
    Fault(
        "output not rescaled",
        WRONG,
        [(SOFTMAX, "out(r, c) *= rescale;", "out(r, c) *= 1.f;")],
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
        [(COPY, "get<0>(at(0, r, c)) < rows &&", "get<0>(at(0, r, c)) <= rows &&")],
    ),
    Fault(
        "load predicate off by one column",
        BOUNDS,
        [(COPY, "get<1>(at(0, r, c)) < head_dim_;", "get<1>(at(0, r, c)) <= head_dim_;")],
    ),
    Fault(
        "LSE in base 2",
        WRONG,
        [(SOFTMAX, "platform::log2(sum)) * kLn2;", "platform::log2(sum)) * (0.f * kLn2 + 1.f);")],
    ),
    # CuTe fills fragments with zeros of its own accord: to leave `clear` out alone is no fault.
    Fault(
        "S not initialised",
        WRONG,
        [
            (
                MAINLOOP,
                "clear(tSrS);",
                "float unset[size(tSrS)];\n"
                "      for (int i = 0; i < size(tSrS); ++i) tSrS(i) = unset[i];",
            )
        ],
    ),
    Fault(
        "S not cleared between blocks",
        WRONG,
        [
            (
                MAINLOOP,
                "auto step = [&]",
                "auto tSrS = partition_fragment_C(mma, ShapeS{});\n    auto step = [&]",
            ),
            (
                MAINLOOP,
                "auto tSrS = partition_fragment_C(mma, ShapeS{});  // (4, MMA_M, N / 8)\n"
                "      clear(tSrS);",
                "",
            ),
        ],
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
        [(EPILOGUE, "get<0>(at(0, r, c)) < rows_q &&", "get<0>(at(0, r, c)) <= rows_q &&")],
    ),
    Fault(
        "store past the last row of the LSE",
        BOUNDS,
        [(EPILOGUE, "if (row < rows_q) lse_of_head", "if (row <= rows_q) lse_of_head")],
    ),
    Fault(
        "maximum of half a row",
        WRONG,
        [(SOFTMAX, ", 2));", ", 0));")],
    ),
    Fault(
        "barrier that half of the warps skip",
        f"{RACE}|every thread waits",
        [
            (
                EPILOGUE,
                "platform::sync_block();  // all warps",
                "if (thread < Traits::kThreads / 2) platform::sync_block();  // all warps",
            )
        ],
    ),
]


def what_catches(emulator: Emulator, head_dim: int) -> str:
    """The first objection to the kernels of this library; nothing if there is none."""
    ragged = head_dim - 24
    for seed, (len_q, len_k, columns, is_causal, scale) in enumerate(
        [
            (40, 40, head_dim, True, None),
            (150, 200, head_dim, False, 2.0),
            (150, 200, ragged, True, None),
            (150, 40, head_dim, True, -0.1),
        ]
    ):
        inputs = random_inputs(1, 2, len_q, columns, len_k=len_k, dtype=torch.bfloat16)
        try:
            _, _, counters = check(emulator, *map(poisoned, inputs), is_causal, scale, seed=seed)
        except EmulationError as error:
            return str(error)
        except AssertionError as error:
            return str(error)
        if counters.load_matrix.conflicts:
            return f"bank conflicts of ldmatrix: {counters.load_matrix}"
    return ""


def main(part: str) -> int:
    faults = [fault for fault in FAULTS if part in fault.name]
    libraries = build(*(fault.plant() for fault in faults))
    missed = 0
    for fault, library in zip(faults, libraries, strict=True):
        objection = what_catches(Emulator(library), fault.head_dim)
        missed += not re.search(fault.caught_by, objection)
        print(f"{fault.name}\n    {objection or 'NOT CAUGHT'}")
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return missed


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
