"""What the emulated machine allows and refuses, by small kernels (small_kernels.cpp), and what it
counts."""

from __future__ import annotations

import pytest
import torch
from emulator import EmulationError

RACE = "with no barrier in between"
UNFINISHED = "has not waited for"
NO_FENCE = "with no fence.proxy.async ahead"
NOWHERE = "in no row of any tensor"

ALLOWED = {  # the lane or thread whose input each thread puts out: its own with some bits flipped
    "a barrier orders threads": 32,
    "a barrier with a vote orders threads": 32,
    "a named barrier orders threads": 32,
    "a warp's barrier orders its lanes": 1,
    "a copy that is waited for, and a barrier": 32,
    "a copy that is waited for is there for its thread": 0,
    "a wait for all groups but the newest": 0,
    "warps that arrive at one barrier and wait at another": 32,
    "a barrier in shared memory orders threads": 32,
    "the phase before the first is over": 0,
    "a box that is waited for": 0,
    "a box that is stored": 0,
    "boxes that reach beyond the output": 32,
    "a write to where a box has been read": 0,
    "a write once all boxes but the newest have been read": 32,
    "matrices that are stored": 0,
    "registers that change hands": 0,
}
REFUSED = {
    "a warp's barrier does not order other warps": f"{RACE}|nobody has written",
    "a named barrier of each warp does not order the other": f"{RACE}|nobody has written",
    "read after write without a barrier": f"{RACE}|nobody has written",
    "write after read without a barrier": RACE,
    "write after write without a barrier": RACE,
    "read of what nobody has written": "nobody has written",
    "read beyond shared memory": "beyond the block's",
    "a copy that is not waited for": UNFINISHED,
    "a copy that is waited for without a barrier": f"{RACE}|{UNFINISHED}|nobody has written",
    "a wait for an older group": UNFINISHED,
    "a copy to where others read": f"{RACE}|{UNFINISHED}",
    "a copy from beyond the input": NOWHERE,
    "read beyond the input": NOWHERE,
    "misaligned read of the input": "not aligned",
    "read from nowhere": NOWHERE,
    "write beyond the output": NOWHERE,
    "write to the input": "writes 16 bytes at .* of the input in",
    "read of the output": "of the output out.*, which is not to be read",
    "two writes of the same output": "has been written already",
    "an output left out": "nobody has written byte 272 of out",
    "lanes of a warp part ways": "while other lanes of its warp are at",
    "a barrier at which some threads vote": "votes? at barrier 0, where others do",
    "a barrier that some threads skip": "every thread waits or is done .1 are., thread",
    "threads expected differ at a barrier": "where others wait for|every thread waits",
    "who arrives without waiting knows nothing of the others": f"{RACE}|nobody has written",
    "two arrivals at a named barrier": "comes to barrier 1 again|every thread waits",
    "a wait for the phase before": f"{RACE}|nobody has written",
    "a barrier in shared memory that nobody initialised": "nobody has initialised",
    "a barrier in shared memory, used before it is there": "nobody has initialised|no barrier in",
    "an arrival too many": "whose phase has had its 1 arrivals",
    "bytes that never come": "every thread waits .* lacks 0 of 64 arrivals and 1024 bytes",
    "a box that is not waited for": f"{RACE}|{UNFINISHED}",
    "a box to where others read": RACE,
    "a box whose barrier the copy engine does not know": "has not been told",
    "a box stored without a fence": NO_FENCE,
    "a box stored with a fence behind the barrier": NO_FENCE,
    "a box stored with a fence ahead of the writes": NO_FENCE,
    "a box stored without a barrier": f"{RACE}|nobody has written",
    "a box stored of what nobody has written": "nobody has written",
    "a box stored twice": "has been written already",
    "a box stored to the input": "stores 128 bytes at .* of the input in",
    "a box stored from an odd place": "not aligned to 128 bytes",
    "a box that is stored and not waited for": "ends without having waited for its box",
    "a box that is stored and not committed": "ends without having committed its box",
    "a write to where a box is read": "which a box of warp 0 still reads",
    "a write to where a box has been read, without a barrier": (
        f"which a box of warp 0 (still reads|has read .* {RACE})"
    ),
    "a write to where the newest box is read": "which a box of warp 0 still reads",
    "registers that nobody gives back": "every thread waits .* for registers",
}
SEEDS = pytest.mark.parametrize("seed", range(5))


def some_input() -> torch.Tensor:
    return torch.arange(64 * 8, dtype=torch.int16).view(64, 8)


@SEEDS
@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(emulator, name, seed):
    x = some_input()
    out, _ = emulator.small(name, x, seed)
    assert torch.equal(out, x[torch.arange(64) ^ ALLOWED[name]])


@SEEDS
@pytest.mark.parametrize("name", REFUSED)
def test_refused(emulator, name, seed):
    with pytest.raises(EmulationError, match=REFUSED[name]):
        emulator.small(name, some_input(), seed)


def test_a_copy_that_is_switched_off_brings_zeros(emulator):
    x = some_input()
    out, _ = emulator.small("a copy from beyond the input, switched off", x)
    assert torch.equal(out[:63], x[1:]) and torch.all(out[63] == 0)


@pytest.mark.parametrize(
    "name, access, wavefronts, conflicts",
    [
        ("stores of neighbouring words", "store", 2, 0),
        ("stores of a column of words", "store", 2, 62),
        ("matrices stored to neighbouring rows", "store_matrix", 8, 0),
        ("matrices stored to the same banks", "store_matrix", 8, 56),
    ],
)
def test_bank_conflicts(emulator, name, access, wavefronts, conflicts):
    _, counters = emulator.small(name, some_input())
    count = getattr(counters, access)
    assert (count.wavefronts, count.conflicts) == (wavefronts, conflicts)
    assert (counters.global_reads_16, counters.global_writes_16) == (64, 64)


def test_bytes_of_boxes(emulator):
    _, of_load = emulator.small("a box that is waited for", some_input())
    _, of_stores = emulator.small("boxes that reach beyond the output", some_input())
    assert (of_load.box_bytes, of_load.box_bytes_out) == (1024, 0)
    assert (of_stores.box_bytes, of_stores.box_bytes_out) == (0, 1024)
