"""Shows what the emulator says of each planted fault (faults.py).

python tests/emulator/planting.py            all of them, as a table
python tests/emulator/planting.py mask       those with this in their names
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path += [str(tests), str(tests.parent)]

import torch
from build_emulator import TESTED, build
from emulator import Emulator
from faults import BACKWARD, BACKWARD_SM90, FAULTS, PACKED, PACKED_SM90, SM80, SM90, Fault
from packed import CALLS, Call, check_sink
from support import poisoned, random_inputs, rising_inputs


def what_catches(library: Path, fault: Fault | None) -> str:
    """The first objection to the kernels with this fault; nothing if there is none."""
    sets = {"sm80": SM80, "sm90": SM90, "backward": BACKWARD, "backward of sm90": BACKWARD_SM90}
    sets |= {"packed": PACKED, "packed, sm90": PACKED_SM90}
    names = [name for name, faults in sets.items() if fault in faults] or list(sets)
    for name in names:
        # One CTA at a time, so that it is always the same objection that comes first.
        arch = 90 if name.endswith("sm90") else 80
        emulator = Emulator(library, arch, workers=1, multiprocessors=2)
        emulator.plant(FAULTS.index(fault) + 1 if fault else 0)
        try:
            kinds = {"backward": run_backward_cases, "packed": run_packed_cases}
            kinds.get(re.split(r"\W", name)[0], run_cases)(emulator)
        except AssertionError as error:  # of the machine, or of the comparison
            return f"{name}: {error}"
        finally:
            emulator.plant(0)
    return ""


def run_cases(emulator: Emulator) -> None:
    def check(heads, heads_kv, len_q, len_k, scale=None, inputs=random_inputs, **options):
        head_dim = options.pop("head_dim", 64)
        dtype = options.pop("dtype", torch.bfloat16)
        tensors = inputs(2, heads, len_q, head_dim, heads_kv=heads_kv, len_k=len_k, dtype=dtype)
        emulator.check(*map(poisoned, tensors), True, scale, **options)

    check(2, 1, 300, 500)  # tiles and key blocks enough for all stages
    check(2, 1, 300, 500, seed=1)
    check(6, 2, 5, 333)  # PackGQA
    check(3, 3, 200, 70)  # rows without a key
    check(1, 1, 70, 300, 4.0, rising_inputs)  # limits that rise below 0
    check(1, 1, 40, 300, 50.0)  # weights that overflow unless limits rise
    check(1, 1, 40, 300, 500.0)  # exact rows
    check(1, 1, 200, 200, multiprocessors=5)  # subtiles
    check(6, 2, 150, 333, splits=3)
    if emulator.arch == 80:
        for head_dim in (96, 192, 320):
            check(1, 1, 150, 200, head_dim=head_dim)
        check(2, 1, 150, 200, dtype=torch.float32)
    else:
        check(2, 1, 150, 200, head_dim=320)


def run_backward_cases(emulator: Emulator) -> None:
    def check(heads, heads_kv, len_q, len_k, head_dim=64, causal=True, **options):
        tensors = random_inputs(
            1, heads, len_q, head_dim, heads_kv=heads_kv, len_k=len_k, dtype=torch.bfloat16
        )
        emulator.check_backward(*map(poisoned, tensors), causal, has_dlse=True, **options)

    check(2, 1, 150, 200, head_splits=1)  # several blocks of queries and of keys
    if emulator.arch == 80:  # one stage; chunks
        check(2, 1, 150, 200, head_dim=192, smem_limit=101376, deterministic=True, seed=1)
        check(1, 1, 150, 200, head_dim=320)
    else:
        check(2, 1, 500, 500, head_dim=128, seed=1)
        check(2, 1, 150, 500, deterministic=True, seed=1)
        check(41, 41, 10, 200)  # heads in two groups
        check(2, 1, 250, 200, head_dim=128, causal=False)  # tiles begin at other rows
        for seed in range(3):  # a narrow window
            band = {"window_left": 64, "window_right": 64}
            check(1, 1, 700, 700, causal=False, seed=seed, **band)
        for seed in range(20):
            emulator.small("zero_queue | share_blocks", torch.zeros(64, 8, dtype=torch.int16), seed)
    check(3, 1, 100, 70, head_splits=2)  # one block of keys; rows without a key


def run_packed_cases(emulator: Emulator) -> None:
    check_sink(emulator, splits=3)
    for name in ("window-gaps", "padded-sink", "scored"):
        call = Call(**CALLS[name])
        call.check(emulator)
        call.check_backward(emulator)


def main(part: str) -> int:
    faults = [fault for fault in FAULTS if part in fault.name]
    library = build(TESTED)
    missed = 0
    for fault in faults:
        objection = what_catches(library, fault)
        missed += not re.search(fault.caught_by, objection)
        print(f"{fault.name}\n    {objection or 'NOT CAUGHT'}")
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return missed


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
