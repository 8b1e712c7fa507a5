"""The machine that runs PTX: blocks of warps of 32 lanes that take turns, shared memory, barriers,
and copies and products that happen at some time between their issue and the wait for them.

It shows what nvcc has made of the kernels: their numbers, accesses, barriers and waits. Races
between plain accesses it does not look for: that is what the emulated machine is for, which runs
the same sources (tests/emulator).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

LANES = 32
#: Addresses in their spaces. Dynamic shared memory begins behind the system's KB.
SHARED_BASE = 1024
PARAM_BASE = 0x4000_0000

#: The lanes that execute an instruction; None: all of the warp.
Lanes = np.ndarray | None
Action = Callable[[], None]
#: Told, when all have come to a barrier, whether any of them voted for.
Hear = Callable[[bool], None]
#: For lanes at a place: where each goes, as (place, lanes).
Jump = Callable[[int, np.ndarray], list[tuple[int, np.ndarray]]]


class Fault(AssertionError):
    """What a kernel did wrong."""


class GlobalMemory(Protocol):
    def read(self, address: int, size: int, alignment: int) -> np.ndarray: ...
    def write(self, address: int, data: np.ndarray) -> None: ...


@dataclass
class Program:
    """A kernel, each of whose steps is a function of a warp and lanes: it returns None to go on, a
    jump, or no places at all for the end."""

    steps: list[Callable[[Warp, Lanes], Jump | None]]
    descriptions: list[str]
    whole_warp: list[bool]  # whether the step takes all lanes together
    threads: int
    param_bytes: int
    registers: list[np.ndarray]  # as they are at the beginning


@dataclass
class Grid:
    program: Program
    shared_bytes: int
    params: np.ndarray
    memory: GlobalMemory
    seed: int

    def run(self, blocks: int) -> None:
        with np.errstate(all="ignore"):
            for index in range(blocks):
                Block(self, index).run()


@dataclass
class MBarrier:
    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0


@dataclass
class NamedBarrier:
    expected: int = 0
    arrived: int = 0
    any_vote: bool = False
    waiting: list[tuple[Warp, Hear]] = field(default_factory=list)


class Pending:
    """Actions that a warp has issued, in groups that it waits for; the last is still open. They
    happen in their order, at the latest in the wait for them, at the earliest at once."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.groups: list[list[Action]] = [[]]

    def issue(self, action: Action) -> None:
        self.groups[-1].append(action)
        if self.dice.random() < 0.3:
            for group in self.groups:
                self.happen(group)

    def close_group(self) -> None:
        self.groups.append([])

    def wait(self, groups_in_flight: int) -> None:
        while len(self.groups) - 1 > groups_in_flight:
            self.happen(self.groups.pop(0))

    @staticmethod
    def happen(group: list[Action]) -> None:
        for action in group:
            action()
        group.clear()


class Warp:
    def __init__(self, block: Block, index: int) -> None:
        self.block = block
        self.index = index
        self.lanes = np.arange(LANES, dtype=np.uint32)
        self.threads = self.lanes + np.uint32(LANES * index)
        self.registers = list(block.grid.program.registers)
        # Lanes that are at the same place go together: (place, lanes), the lowest place first.
        self.groups: list[tuple[int, np.ndarray]] = [(0, np.ones(LANES, bool))]
        self.at_barrier = False
        self.asked_in_vain = False
        self.copies = Pending(block.dice)
        self.products = Pending(block.dice)
        # Boxes that lanes store: of those alone that do.
        self.boxes: dict[int, Pending] = defaultdict(lambda: Pending(block.dice))

    def run(self, budget: int) -> bool:
        """Up to about `budget` instructions; False if it then has to wait for an mbarrier. Lanes
        with the lowest place run first: so those that part meet again behind a branch."""
        program, groups = self.block.grid.program, self.groups
        self.asked_in_vain = False
        while groups and budget > 0 and not self.at_barrier and not self.asked_in_vain:
            # An instruction of the whole warp waits for all its lanes.
            runnable = (
                i
                for i, (at, _) in enumerate(groups)
                if len(groups) == 1 or not program.whole_warp[at]
            )
            chosen = next(runnable, None)
            if chosen is None:
                raise Fault("lanes of a warp wait for each other")
            place, mask = groups.pop(chosen)
            elsewhere = {other for other, _ in groups}
            lanes = None if mask.all() else mask
            while True:
                try:
                    jump = program.steps[place](self, lanes)
                except Fault as fault:
                    raise Fault(
                        f"warp {self.index}, {program.descriptions[place]}: {fault}"
                    ) from fault
                budget -= 1
                if jump is not None:
                    for target, who in jump(place, mask):
                        self.put(target, who)
                    break
                place += 1
                met = place in elsewhere or (elsewhere and program.whole_warp[place])
                if met or budget <= 0 or self.at_barrier or self.asked_in_vain:
                    self.put(place, mask)
                    break
        return not self.asked_in_vain

    def has_not_waited(self) -> bool:
        """For what it has issued; for boxes, not even where they have been stored by chance."""
        pending = (self.copies, self.products, *self.boxes.values())
        return any(any(one.groups) for one in pending) or any(
            len(boxes.groups) > 1 for boxes in self.boxes.values()
        )

    def put(self, place: int, lanes: np.ndarray) -> None:
        for i, (other, who) in enumerate(self.groups):
            if other == place:
                self.groups[i] = (place, who | lanes)
                return
            if other > place:
                self.groups.insert(i, (place, lanes))
                return
        self.groups.append((place, lanes))


class Block:
    def __init__(self, grid: Grid, index: int) -> None:
        self.grid = grid
        self.index = index
        self.dice = random.Random(grid.seed * 1_000_003 + index)
        self.shared = np.full(grid.shared_bytes, 0xFF, np.uint8)  # NaN, as what is not there yet
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers: dict[int, NamedBarrier] = defaultdict(NamedBarrier)
        self.boxes: list[Action] = []  # on their way to shared memory
        self.in_vain: set[Warp] = set()  # who has asked since the last change of an mbarrier
        self.warps = [Warp(self, i) for i in range(grid.program.threads // LANES)]

    def run(self) -> None:
        try:
            self.take_turns()
        except Fault as fault:
            raise Fault(f"block {self.index}, {fault}") from fault

    def take_turns(self) -> None:
        while alive := [warp for warp in self.warps if warp.groups]:
            ready = [warp for warp in alive if not warp.at_barrier and warp not in self.in_vain]
            if self.boxes and (not ready or self.dice.random() < 0.3):
                self.boxes.pop(self.dice.randrange(len(self.boxes)))()
            elif ready:
                warp = self.dice.choice(ready)
                if not warp.run(self.dice.randrange(1, 400)):
                    self.in_vain.add(warp)
            else:
                descriptions = self.grid.program.descriptions
                # Lanes at a barrier have its place behind them.
                places = {w.index: descriptions[w.groups[0][0] - w.at_barrier] for w in alive}
                raise Fault(f"warps wait for ever: {places}")
        if self.boxes or any(warp.has_not_waited() for warp in self.warps):
            raise Fault("the end comes while copies or products are under way")

    # -- memory ----------------------------------------------------------------------------------

    def shared_index(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Of shared memory in units of `size` bytes."""
        offsets = addresses.astype(np.int64) - SHARED_BASE
        if (offsets < 0).any() or (offsets + size > len(self.shared)).any():
            raise Fault(f"{size} bytes at {offsets} of {len(self.shared)} bytes of shared memory")
        if (offsets % size).any():
            raise Fault(f"{size} bytes at {offsets} of shared memory: not aligned")
        return offsets // size

    def shared_in_units(self, size: int) -> np.ndarray:
        return self.shared[: len(self.shared) // size * size].reshape(-1, size)

    def param(self, address: int, size: int) -> np.ndarray:
        offset = address - PARAM_BASE
        if not 0 <= offset <= len(self.grid.params) - size:
            raise Fault(f"{size} bytes at {offset} of {len(self.grid.params)} bytes of parameters")
        if offset % size:
            raise Fault(f"{size} bytes at {offset} of the parameters: not aligned")
        return self.grid.params[offset : offset + size]

    # -- barriers --------------------------------------------------------------------------------

    def meet(
        self, number: int, threads: int, warp: Warp, hear: Hear | None, vote: bool = False
    ) -> None:
        """A warp at a barrier of `threads` threads, which are whole warps; it waits if it is to
        hear."""
        if not 0 <= number < 16:
            raise Fault(f"there is no barrier {number}")
        barrier = self.barriers[number]
        if barrier.arrived and barrier.expected != threads:
            raise Fault(f"{threads} threads at a barrier of {barrier.expected}")
        barrier.expected = threads
        barrier.arrived += LANES
        barrier.any_vote |= vote
        if hear:
            warp.at_barrier = True
            barrier.waiting.append((warp, hear))
        if barrier.arrived > threads:
            raise Fault(f"more than {threads} threads at barrier {number}")
        if barrier.arrived == threads:
            for other, hear_of_other in barrier.waiting:
                other.at_barrier = False
                hear_of_other(barrier.any_vote)
            self.barriers[number] = NamedBarrier()

    def mbarrier(self, address: int) -> MBarrier:
        if address not in self.mbarriers:
            raise Fault(f"there is no barrier at {address - SHARED_BASE}")
        return self.mbarriers[address]

    def arrive(self, address: int, bytes_to_come: int) -> None:
        barrier = self.mbarrier(address)
        if barrier.pending == 0:
            raise Fault("more arrivals than the barrier waits for")
        barrier.pending -= 1
        self.complete(address, -bytes_to_come)

    def complete(self, address: int, bytes_there: int) -> None:
        barrier = self.mbarrier(address)
        barrier.bytes -= bytes_there
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.pending = barrier.expected
            barrier.phase ^= 1
        self.in_vain.clear()
