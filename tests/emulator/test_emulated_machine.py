"""What the emulated machine allows and refuses, and what it counts, by programs of a few steps
(small_kernels.cpp). 64 threads, or more, each have a chunk of 16 bytes of the input and of the
output. Matrix products are kernels of their own (small_products.cpp)."""

from __future__ import annotations

import pytest
import torch
from emulator import EmulationError, Emulator

RACE = "with no barrier in between"
UNWRITTEN = "nobody has written"
UNFINISHED = "has not waited for"
NO_FENCE = "with no fence.proxy.async ahead"
STUCK = "every thread waits"
NOWHERE = "in no row of any tensor"
STILL_READ = "which a TMA store of warp 0 still reads"
STILL_ADDED = "which a TMA reduction of warp 0 still reads"

INIT_1 = "0: init 1; 0: fence_init; sync; "
INIT_ALL = "0: init 64; 0: fence_init; sync; "
LOAD = "0: arrive 1024; 0: load; "
STORE = "in; put_swizzled; fence_proxy; sync; 0: store; 0: commit; "
TWO_STORES = (
    "in; put_swizzled; put_second; fence_proxy; sync; "
    "0: store 4; 0: commit; 0: store_second -4; 0: commit; 0: wait_stores 1; "
)

BULK_LOAD = "0: arrive 1024; 0: bulk_load 0 1024; "

ZERO = "in; out; zero | "
SHARE = "zero_queue | share_blocks"
IN_TURN = "0: wait_turn 0; sync; add; publish; sync; 0: pass_turn; sync; "
BULK_ADD = "put_number 3; fence_proxy; sync; 0: bulk_add; 0: commit; "
BULK_IN_TURN = "put_number 3; fence_proxy; sync; 0: wait_turn 0; 0: bulk_add; 0: commit; "

#: Programs, and whose input a thread puts out: that of its own index with some bits flipped.
ALLOWED = {
    # Barriers.
    "in; put; sync; get 32; out": 32,
    "in; put; vote 17; vote 99; get 32; out": 32,
    "in; put; sync_named 1 64; get 32; out": 32,
    "in; put; sync_warp; get 1; out": 1,
    "in; put; w0: arrive_named 1 64; w1: arrive_named 2 64; "
    "w0: sync_named 2 64; w1: sync_named 1 64; get 32; out": 32,
    INIT_ALL + "in; put; arrive; wait 0; get 32; out": 32,
    INIT_ALL + "in; put; arrive; ask 0; wait_if_not 0; get 32; out": 32,
    INIT_1 + "wait 1; in; out": 0,  # the phase before the first is over
    # cp.async.
    "copy; wait_copies 0; sync; get 32; out": 32,
    "copy; wait_copies 0; get; out": 0,
    "copy; copy_second; wait_copies 1; get; out": 0,
    # TMA.
    INIT_1 + LOAD + "wait 0; get_swizzled; out": 0,
    INIT_1 + BULK_LOAD + "wait 0; get 32; out": 32,
    STORE + "0: wait_stores": 0,
    STORE + "0: wait_stores; sync; put_swizzled": 0,
    "in; put_swizzled; fence_proxy; sync; 0: store 4; 0: store -4; 0: commit; 0: wait_stores": 32,
    TWO_STORES + "0: put_swizzled; 0: wait_stores": 32,
    # stmatrix, setmaxnreg.
    "stmatrix; sync_warp; get; out": 0,
    "w0: dealloc 248; w1: alloc 256; in; out": 0,
    # Sums, alone and in turn.
    ZERO + "add; add | w1: expect 0": 0,
    ZERO + IN_TURN + "0: wait_turn 1; sync; add | w1: expect 0": 0,
    ZERO + "count; 0: wait_turn 64": 0,
    ZERO + "add_4 | expect_4": 0,
    ZERO + "0: wait_turn 0; sync; add_4; publish; sync; 0: pass_turn | expect_4": 0,
    # By TMA. They arrive when that has been waited for, or as the CTA ends.
    ZERO + BULK_ADD + "0: wait_complete | expect 3": 0,
    ZERO + BULK_ADD + "0: bulk_add; 0: commit; 0: wait_complete; sync; put_number 4 | expect 6": 0,
    ZERO + BULK_ADD + "0: wait_stores; sync; put_number 4 | expect 3": 0,
    ZERO + "put_number 3; fence_proxy; sync; odd: bulk_add; odd: commit; odd: wait_stores; "
    "sync; put_number 4; fence_proxy; sync; 9: bulk_add; 9: commit; 9: wait_complete "
    "| expect 100": 0,
    ZERO + BULK_IN_TURN + "0: wait_complete; 0: publish; 0: pass_turn | expect 3": 0,
    SHARE: 0,
}
REFUSED = {
    # Races.
    "in; put; sync_warp; get 32; out": f"{RACE}|{UNWRITTEN}",
    "in; put; w0: sync_named 1 32; w1: sync_named 2 32; get 32; out": f"{RACE}|{UNWRITTEN}",
    "in; put; get 1; out": f"{RACE}|{UNWRITTEN}",
    "in; put; sync; get 32; put; out": RACE,
    "in; put_pair; out": RACE,
    "in; put; arrive_named 1 64; get 32; out": f"{RACE}|{UNWRITTEN}",
    INIT_ALL + "in; put; arrive; wait 1; get 32; out": f"{RACE}|{UNWRITTEN}",
    INIT_1 + "ask 1; wait_if_not 0": "for over, which is under way",
    # Memory.
    "get; out": UNWRITTEN,
    "get_beyond; out": "beyond the CTA's",
    "in 1; out": NOWHERE,
    "read_nowhere; out": NOWHERE,
    "in; out 1": NOWHERE,
    "in; write_in; out": "writes 16 bytes at .* of the input in",
    "in; out; read_out": "of the output out.*, which is not to be read",
    "in; out_pair": "has been written already",
    "in; not 17: out": "nobody has written byte 272 of out",
    # cp.async.
    "copy; sync; get; out": UNFINISHED,
    "copy; wait_copies 0; get 1; out": f"{RACE}|{UNFINISHED}|{UNWRITTEN}",
    "copy_second; copy; wait_copies 1; get; out": UNFINISHED,
    "in; put; sync; get 32; out; copy": f"{RACE}|{UNFINISHED}",
    "copy_next 64": NOWHERE,
    "copy_misaligned": "not aligned",
    # Warps and barriers.
    "odd: shuffle; ballot; in; out": "while other lanes of its warp are at",
    "w0: vote 0; w1: sync; in; out": "votes? at barrier 0, where others do",
    "not 17: sync; in; out": f"{STUCK} or is done .1 are., thread",
    "w0: sync_named 1 32; w1: sync_named 1 64; in; out": f"where others wait for|{STUCK}",
    "w0: arrive_named 1 64; sync_named 1 64; in; out": f"comes to barrier 1 again|{STUCK}",
    # mbarriers.
    "arrive; in; out": "nobody has initialised",
    "0: init 64; sync_warp; arrive; in; out": "nobody has initialised|no barrier in",
    INIT_ALL + "in; put; arrive; ask 0; get 32; out": f"{RACE}|{UNWRITTEN}",
    INIT_1 + "0: arrive 16; 0: arrive": "whose phase has had its 1 arrivals",
    INIT_ALL + "arrive 16; wait 0": f"{STUCK} .* lacks 0 of 64 arrivals and 1024 bytes",
    # TMA loads.
    INIT_1 + LOAD + "sync; get_swizzled; out": f"{RACE}|{UNFINISHED}",
    INIT_1 + "in; put; out; " + LOAD + "wait 0": RACE,
    "0: init 1; sync; " + LOAD: "to TMA, with no fence",
    # Without a map.
    INIT_1 + BULK_LOAD + "sync; get; out": f"{RACE}|{UNFINISHED}",
    INIT_1 + BULK_LOAD + "not 9: wait 0; get; out": f"{RACE}|{UNFINISHED}|{UNWRITTEN}",
    INIT_1 + "in; put; out; " + BULK_LOAD + "wait 0": RACE,
    INIT_1 + "in; out; " + BULK_LOAD + "0: put; wait 0": UNFINISHED,
    INIT_1 + "in; out; 0: arrive 1024; 0: bulk_load 0 1008; wait 0": "lacks .* and 16 bytes",
    INIT_1 + "0: arrive 1024; 0: bulk_load 1 1024": NOWHERE,
    INIT_1 + "0: arrive 16; 0: bulk_load_odd 8": "copies 16 bytes from .* not aligned",
    INIT_1 + "0: arrive 16; 0: bulk_load_odd 0": "not whole chunks of shared memory",
    INIT_1 + "0: arrive 1024; 0: bulk_load 0 1016": "not whole chunks of shared memory",
    "0: init 1; sync; " + BULK_LOAD: "to TMA, with no fence",
    # TMA stores.
    "in; put_swizzled; sync; 0: store; 0: commit; 0: wait_stores": NO_FENCE,
    "in; put_swizzled; sync; fence_proxy; 0: store; 0: commit; 0: wait_stores": NO_FENCE,
    "fence_proxy; in; put_swizzled; sync; 0: store; 0: commit; 0: wait_stores": NO_FENCE,
    "in; put_swizzled; fence_proxy; 0: store; 0: commit; 0: wait_stores": f"{RACE}|{UNWRITTEN}",
    "0: store; 0: commit; 0: wait_stores": UNWRITTEN,
    STORE + "0: store; 0: commit; 0: wait_stores": "has been written already",
    "in; put_swizzled; fence_proxy; sync; 0: store_to_in": "stores 128 bytes at .* of the input in",
    "0: store_odd": "not aligned to 128 bytes",
    STORE: "ends without having waited for its TMA store",
    "in; put_swizzled; fence_proxy; sync; 0: store; 0: wait_stores": "without having committed its",
    STORE + "0: put_swizzled": STILL_READ,
    STORE + "sync; 0: wait_stores; odd: put_swizzled": (
        f"which a TMA store of warp 0 (still reads|has read .* {RACE})"
    ),
    TWO_STORES + "0: put_second": STILL_READ,
    # setmaxnreg.
    "alloc 256; in; out": f"{STUCK} .* for registers",
    # Sums and turns.
    "in; out | add; zero": "adds .* which no launch before has written",
    ZERO + "add; sync; w0: expect 2": "to which this launch adds",
    ZERO + "expect 0; sync; add": "which this launch reads",
    ZERO + "add; zero": "has been written already",
    ZERO + "zero": "has been written already",
    ZERO + "0: wait_turn 1": "turn 1 of a counter at 0: a turn that never comes",
    ZERO + "0: pass_turn": "passes a turn that its CTA has not waited for",
    ZERO + "0: wait_turn 0; add": "with no barrier in between|begins a turn after thread",
    ZERO + "0: wait_turn 0; sync; add; sync; 0: pass_turn": "has not published its sums",
    ZERO + "0: wait_turn 0; sync; add; publish; 0: pass_turn": (
        "has not published its sums|with no barrier in between|adds to a sum after its CTA's turn"
    ),
    ZERO + IN_TURN + "add": "adds to a sum after its CTA's turn",
    ZERO + "0: add_4 1": "adds to 16 bytes at .* not aligned",
    ZERO + "63: add_4 4": NOWHERE,
    "in; out | 0: add_4; zero": "adds to 16 bytes at .* which no launch before has written",
    ZERO + IN_TURN + "add_4": "adds to a sum after its CTA's turn",
    # By TMA.
    ZERO + "put_number 3; sync; 0: bulk_add; 0: commit; 0: wait_stores": NO_FENCE,
    ZERO + "put_number 3; sync; fence_proxy; 0: bulk_add; 0: commit; 0: wait_stores": NO_FENCE,
    ZERO + "put_number 3; fence_proxy; 0: bulk_add; 0: commit; 0: wait_stores": (
        f"{RACE}|{UNWRITTEN}"
    ),
    ZERO + "0: bulk_add; 0: commit; 0: wait_stores": UNWRITTEN,
    ZERO + BULK_ADD + "0: put_number 4": STILL_ADDED,
    ZERO + BULK_ADD + "sync; 0: wait_stores; 9: put_number 4": (
        f"which a TMA reduction of warp 0 (still reads|has read .* {RACE})"
    ),
    ZERO + BULK_ADD + "0: bulk_add; 0: commit; 0: wait_stores 1; 0: put_number 4": STILL_ADDED,
    ZERO + BULK_ADD: "ends without having waited for its TMA reduction",
    ZERO + "put_number 3; fence_proxy; sync; 0: bulk_add; 0: wait_complete": (
        "ends without having committed its TMA reduction"
    ),
    ZERO + BULK_ADD + "sync; w0: expect 3": "to which this launch adds",
    ZERO + "w0: expect 0; " + BULK_ADD: "adds .* which this launch reads",
    "in; out | 1: put_number 3; " + BULK_ADD: "adds .* which no launch before has written",
    ZERO + "put_number 3; fence_proxy; sync; 0: bulk_add 4": NOWHERE,
    ZERO + "put_number 3; fence_proxy; sync; 0: bulk_add 1 16": "adds .* not aligned",
    ZERO + "put_number 3; fence_proxy; sync; 0: bulk_add 0 24": "adds 24 bytes .* not whole chunks",
    # Whoever has not waited for its sums to arrive has nothing to publish.
    ZERO + BULK_IN_TURN + "0: publish; 0: pass_turn": "has not waited for its sums",
    ZERO + BULK_IN_TURN + "0: wait_stores; 0: publish; 0: pass_turn": "has not waited for its sums",
    ZERO + BULK_IN_TURN + "0: wait_complete; 0: pass_turn": "has not published its sums",
    ZERO + BULK_IN_TURN + "0: publish; 0: wait_complete; 0: pass_turn": (
        "has not published its sums"
    ),
    ZERO + BULK_ADD + "0: wait_turn 0": "begins a turn after thread 0 has added",
    ZERO + IN_TURN + BULK_ADD: "adds to a sum after its CTA's turn",
}
SEEDS = pytest.mark.parametrize("seed", range(5))


@pytest.fixture
def machine(library) -> Emulator:
    return Emulator(library)


def some_input(threads: int = 64) -> torch.Tensor:
    return torch.arange(threads * 8, dtype=torch.int16).view(threads, 8)


@SEEDS
@pytest.mark.parametrize("program", ALLOWED)
def test_allowed(machine, program, seed):
    x = some_input()
    out, _ = machine.small(program, x, seed)
    assert torch.equal(out, x[torch.arange(64) ^ ALLOWED[program]])


@SEEDS
@pytest.mark.parametrize("program", REFUSED)
def test_refused(machine, program, seed):
    with pytest.raises(EmulationError, match=REFUSED[program]):
        machine.small(program, some_input(), seed)


def test_a_copy_that_is_switched_off_brings_zeros(machine):
    x = some_input()
    out, _ = machine.small("copy_next 63; wait_copies 0; get; out", x)
    assert torch.equal(out[:63], x[1:]) and torch.all(out[63] == 0)


@pytest.mark.parametrize(
    "step, access, wavefronts, conflicts",
    [
        ("put_word_row", "store", 2, 0),
        ("put_word_column", "store", 2, 62),
        ("stmatrix", "store_matrix", 8, 0),
        ("stmatrix_column", "store_matrix", 8, 56),
    ],
)
def test_bank_conflicts(machine, step, access, wavefronts, conflicts):
    _, counters = machine.small(f"{step}; in; out", some_input())
    count = getattr(counters, access)
    assert (count.wavefronts, count.conflicts) == (wavefronts, conflicts)
    assert counters.global_writes_16 == 64


def test_bytes_of_tma(machine):
    _, load = machine.small(INIT_1 + LOAD + "wait 0; get_swizzled; out", some_input())
    _, store = machine.small(STORE + "0: wait_stores", some_input())
    assert (load.tma_load_bytes, load.tma_store_bytes) == (1024, 0)
    assert (store.tma_load_bytes, store.tma_store_bytes) == (0, 1024)


@SEEDS
def test_three_warpgroups_meet(machine, seed):
    x = some_input(384)
    out, _ = machine.small("in; put; sync_named 1 384; get_next 128; out", x, seed)
    assert torch.equal(out, x.roll(-128, 0))
    # Two go on at once; the third waits for them.
    program = "in; out; put; g0: arrive_named 1 384; g1: arrive_named 1 384; g2: sync_named 1 384; "
    machine.small(program + "g2: get_next 128; g2: get_next 256", x, seed)
    with pytest.raises(EmulationError, match=f"{RACE}|{UNWRITTEN}"):
        machine.small(program + "g0: get_next 256", x, seed)
    with pytest.raises(EmulationError, match=STUCK):
        machine.small("in; out; not g1: sync_named 1 384", x, seed)


def test_counts_of_bulk_copies(machine):
    _, load = machine.small(INIT_1 + BULK_LOAD + "wait 0; get; out", some_input())
    assert (load.tma_load_bytes, load.global_reads_16) == (1024, 0)
    _, add = machine.small(ZERO + BULK_ADD + "0: wait_complete; add_4; add", some_input())
    assert (add.tma_reduce_bytes, add.tma_store_bytes) == (256, 0)
    assert (add.global_reductions_16, add.global_reductions) == (64, 64)


def operands(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of which fp32 has the exact products."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (rows, 64), generator=generator).half() for _ in range(2))
    return a, b


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("b_is_mn", [False, True])
@pytest.mark.parametrize("a_is_mn", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
class TestProducts:
    """Of operands that lie along k or along their rows, in strips of 64 elements or 32."""

    def test_result(self, machine, rows, a_is_mn, b_is_mn, narrow):
        a, b = operands(rows)
        for depth in (16, 64):
            d, counters = machine.product(a, b, a_is_mn, b_is_mn, narrow=narrow, depth=depth)
            assert torch.equal(d, a[:, :depth].float() @ b[:, :depth].float().T)
            assert counters.wgmma == 4 * rows // 64 * depth // 16

    def test_what_is_read(self, machine, rows, a_is_mn, b_is_mn, narrow):
        """Each element, by the warps that multiply it, and no other."""
        a, b = operands(rows)

        def overwrite(operand: int, row: int, k: int) -> torch.Tensor:
            place = {"overwritten": operand, "row": row, "k": k, "narrow": narrow, "depth": 32}
            return machine.product(a, b, a_is_mn, b_is_mn, **place)[0]

        for row in range(3, rows, 8):
            k = row % 32
            with pytest.raises(EmulationError, match=f"wgmma of warp {row % 64 // 16} still reads"):
                overwrite(0, row, k)
            with pytest.raises(EmulationError, match="wgmma of warp 0 still reads"):
                overwrite(1, row, k)
            for operand in (0, 1):
                d = overwrite(operand, row, 32 + k)
                assert torch.equal(d, a[:, :32].float() @ b[:, :32].float().T)

    def test_fence(self, machine, rows, a_is_mn, b_is_mn, narrow):
        with pytest.raises(EmulationError, match=NO_FENCE):
            machine.product(*operands(rows), a_is_mn, b_is_mn, narrow=narrow, is_fenced=0)

    def test_operands_that_the_pattern_does_not_fit(self, machine, rows, a_is_mn, b_is_mn, narrow):
        for shift in (8, 64) if narrow else (8, 64, 256):
            with pytest.raises(EmulationError, match="layout that is not emulated"):
                machine.product(*operands(rows), a_is_mn, b_is_mn, narrow=narrow, shift=shift)
