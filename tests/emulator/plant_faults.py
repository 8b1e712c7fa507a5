"""Plants faults in copies of the kernels, one at a time, and shows what the emulator says of each.

python tests/emulator/plant_faults.py            all of them, as a table
python tests/emulator/plant_faults.py causal     those with this in their names
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path += [str(tests), str(tests.parent)]

import torch
from build_emulator import build
from cases import check
from emulator import EmulationError, Emulator
from faults_sm80 import SM80_FAULTS
from faults_sm90 import SM90_FAULTS
from faults_sm90_epilogue import SM90_EPILOGUE_FAULTS
from support import poisoned, random_inputs, rising_inputs

FAULTS = [*SM80_FAULTS, *SM90_FAULTS, *SM90_EPILOGUE_FAULTS]


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
            (rising_inputs, 1, 1, 70, 300, head_dim, False, 4.0),
            (random_inputs, 1, 1, 40, 300, head_dim, False, 50.0),
            (random_inputs, 1, 1, 70, 120, head_dim, True, None),
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
    causal = {"is_causal": True}
    window = {"window_left": 150, "window_right": 0, "diagonal_offset": 200}
    for seed, (inputs_of, heads, heads_kv, len_q, len_k, scale, mask) in enumerate(
        [
            (random_inputs, 2, 1, 300, 500, None, causal),
            (random_inputs, 3, 3, 200, 70, None, causal),
            (random_inputs, 4, 1, 20, 300, None, causal),
            (random_inputs, 40, 1, 3, 70, None, causal),
            (random_inputs, 4, 2, 129, 193, None, causal),
            (random_inputs, 1, 1, 50, 500, 3.0, causal),
            (random_inputs, 1, 1, 300, 500, None, window),
            (rising_inputs, 1, 1, 70, 300, 4.0, causal),
            (random_inputs, 1, 1, 200, 200, None, {**causal, "multiprocessors": 5}),  # in parts
            *([(random_inputs, 2, 1, 300, 500, None, causal)] * 12),
        ]
    ):
        inputs = inputs_of(
            2, heads, len_q, head_dim, heads_kv=heads_kv, len_k=len_k, dtype=torch.bfloat16
        )
        try:
            options = {"multiprocessors": 2, "softmax_scale": scale, "seed": seed, **mask}
            check(emulator, *map(poisoned, inputs), **options)
        except AssertionError as error:  # of the machine, or of the comparison
            return str(error)
    for len_q, splits in ((150, 2), (5, 4)):
        inputs = random_inputs(2, 6, len_q, head_dim, heads_kv=2, len_k=333, dtype=torch.bfloat16)
        try:
            check(emulator, *map(poisoned, inputs), True, splits=splits, multiprocessors=2)
        except AssertionError as error:
            return "" if "left out of the build" in str(error) else str(error)
    return ""


def main(part: str) -> int:
    faults = [fault for fault in FAULTS if part in fault.name]
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
