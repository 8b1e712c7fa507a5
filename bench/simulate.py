"""How busy an SM80 kernel keeps Hopper's tensor cores, from its machine code, without a GPU.

A multiprocessor has four partitions, among which the warps of its thread blocks are dealt out. This
plays one of them, with the warps that it has, through the step of the main loop: each warp issues
in order, no sooner than the stall counts and the barriers beside its instructions allow, which
ptxas writes there, and than the unit is free that the instruction needs. The other three are taken
to do the same meanwhile, so that an access to shared memory takes the time of four. cp.async is
taken to have arrived, and blocks start at random times. Blocks have a multiple of four warps, and
one barrier.

    python -m bench.tiles sm80 64,128,64,4,true         # says it of each tile

It is for ranking tiles; what is near enough to be a tie, and how near the truth it comes, is in
csrc/cute_fa2/README.md.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import statistics
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Cycles for which a warp's instruction takes its unit, of a partition. Measured on an H200:
#: mma.sync m16n8k16 at 627 TFLOP/s and 1980 MHz, ex2 at 4.2e12 a second, ldmatrix at 88% of the
#: 128 bytes a cycle that the partitions share. Not measured: 32 lanes of fp32, 16 of integers.
CYCLES = {"tensor": 6.83, "special": 8.0, "shared": 18.0, "word": 4.0, "fp32": 1.0, "integer": 2.0,
          "multiply": 2.0}  # fmt: skip
# Assumed, as is common for such chips: from the end of those cycles until the result is there, of
# the instructions whose consumers wait at a barrier; until operands have been read; from the last
# arrival at a block's barrier until its warps go on; how long shared memory's queue may hold up the
# warp (at random, from 0 on).
LATENCY = {"special": 23.0, "shared": 33.0, "word": 33.0}
OTHER_LATENCY = 25.0
OPERANDS_READ = 12.0
BLOCK_BARRIER = 25.0
QUEUE = 10.0
#: Products of one warp: 568 TFLOP/s with one on each partition.
PRODUCT_SPACING = 7.55

UNITS = (
    ("tensor", r"HMMA"),
    ("special", r"MUFU"),
    ("shared", r"LDSM|STSM|LDGSTS|(LDS|STS)\.(\w+\.)*128"),
    ("word", r"LDS|STS|SHFL"),
    ("multiply", r"IMAD"),
    ("fp32", r"FFMA|FADD|FMUL"),
    ("integer", r"V?[IF]MNMX|V?IADD|LOP|[IF]SETP|[IF]?SEL|PRMT|SHF\.|F2FP|PLOP|LEA|MOV\b|VOTE"
                r"|R2P|P2R|SGXT|IABS"),
)  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    text: str
    address: int
    stall: int  #: cycles until the warp issues the next one
    written: int  #: barrier that falls when the result is there; 7: none
    read: int  #: when the operands have been read
    waits: int  #: a bit for each barrier that must have fallen

    @property
    def opcode(self) -> str:
        return re.sub(r"^@!?U?P\w+ ", "", self.text).split()[0]

    @property
    def unit(self) -> str:
        found = (name for name, opcodes in UNITS if re.match(opcodes, self.opcode))
        return next(found, "")

    @property
    def target(self) -> int | None:
        found = re.search(r"BRA(?:\.U)? .*?\b0x([0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None

    @property
    def always_jumps(self) -> bool:
        """Or ends: it has no next instruction."""
        return self.opcode in ("BRA", "EXIT") and not re.search(r"@|BRA !?U?P\d", self.text)


def cuobjdump(file: Path, *arguments: str) -> str | None:
    """What cuobjdump says of a library; None where there is no cuobjdump."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin")  # with nvdisasm beside it
    path = f"{packaged}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/local/cuda/bin"
    program = shutil.which("cuobjdump", path=path)
    if not program or not shutil.which("nvdisasm", path=path):
        return None
    command = [program, *arguments, str(file)]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


def parse(text: str) -> list[Instruction]:
    """The instructions of one function, as `cuobjdump -sass` prints it. In the second of an
    instruction's two words are its stall count and its barriers."""
    lines = re.findall(
        r"/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;\s+/\* 0x\w+ \*/\s+/\* 0x(\w+) \*/", text
    )
    instructions = []
    for address, instruction, word in lines:
        control = int(word, 16) >> 41
        fields = control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
        instructions.append(Instruction(instruction, int(address, 16), *fields))
    return instructions


def usual_step(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Once round the loop that has most products: by the way that passes most of them, then most
    copies, then the fewest instructions. What that leaves out, masks and maxima that rise, is rare.
    """
    index = {x.address: i for i, x in enumerate(instructions)}
    loops = [
        shortest_way(instructions, index, index[x.target], i)
        for i, x in enumerate(instructions)
        if x.target is not None and index.get(x.target, i + 1) <= i
    ]

    def products(way: Sequence[Instruction]) -> int:
        return sum(x.unit == "tensor" for x in way)

    way = max(loops, key=lambda way: (products(way), -len(way)), default=[])
    if not products(way):
        raise ValueError("no loop has products")
    return way


def shortest_way(
    instructions: Sequence[Instruction], index: Mapping[int, int], begin: int, end: int
) -> list[Instruction]:
    """From `begin` to `end` without jumps back; empty where `end` is not reached so."""
    # From each instruction on to the end: (-products, -copies, instructions), and what follows.
    best: dict[int, tuple[tuple[int, int, int], int | None]] = {}
    for i in range(end, begin - 1, -1):
        x = instructions[i]
        follow = [] if x.always_jumps else [i + 1]
        if x.target is not None and i < index.get(x.target, 0) <= end:
            follow.append(index[x.target])
        rest = min(((best[j][0], j) for j in follow if j in best), default=((0, 0, 0), None))
        if i == end or rest[1] is not None:
            own = -(x.unit == "tensor"), -x.opcode.startswith("LDGSTS"), 1
            products, copies, count = (a + b for a, b in zip(own, rest[0], strict=True))
            best[i] = (products, copies, count), rest[1]
    way = []
    at: int | None = begin if begin in best else None
    while at is not None:
        way.append(instructions[at])
        at = best[at][1]
    return way


class Partition:
    """`blocks` thread blocks with `warps` warps each here, which go round `step`. Of several that
    could issue it is the one that has waited longest; with every second seed, the one that issued
    in the cycle before."""

    def __init__(self, step: Sequence[Instruction], blocks: int, warps: int, seed: int) -> None:
        self.step = [(x, x.unit) for x in step]
        self.random = random.Random(seed)
        self.is_greedy = seed % 2 == 1
        self.count = blocks * warps
        self.block_of = [w // warps for w in range(self.count)]
        self.at = [0] * self.count
        self.rounds = [0] * self.count
        starts = [self.random.uniform(0, 3 * len(step)) for _ in range(blocks)]
        self.ready = [starts[block] for block in self.block_of]
        self.barriers = [[0.0] * 6 for _ in range(self.count)]
        self.next_product = [0.0] * self.count
        self.free = dict.fromkeys(CYCLES, 0.0)
        self.waiting: set[int] = set()  # at a barrier of their block
        self.busy = self.now = 0.0
        self.issued = [-1.0] * self.count  # when last

    def share_of_products(self, first: int = 4, rounds: int = 12) -> float:
        """Of the time from when each warp has gone round `first` times, `rounds` times more."""
        self.run(first)
        begin, self.busy = self.now, 0.0
        self.run(first + rounds)
        return self.busy / (self.now - begin)

    def run(self, rounds: int) -> None:
        while min(self.rounds) < rounds:
            soonest = float("inf")
            for warp in self.in_order():
                at = self.may_issue(warp)
                if at <= self.now:
                    self.issue(warp, self.now)
                    self.issued[warp], soonest = self.now, self.now + 1
                    break
                soonest = min(soonest, at)
            self.now = soonest

    def in_order(self) -> list[int]:
        def key(warp: int) -> float:
            goes_on = self.is_greedy and self.issued[warp] == self.now - 1
            return -1.0 if goes_on else self.issued[warp]

        return sorted((w for w in range(self.count) if w not in self.waiting), key=key)

    def may_issue(self, warp: int) -> float:
        x, unit = self.step[self.at[warp]]
        at = self.ready[warp]
        if unit:
            at = max(at, self.free["shared" if unit == "word" else unit])
        if unit == "tensor":
            at = max(at, self.next_product[warp])
        fallen = (t for i, t in enumerate(self.barriers[warp]) if x.waits >> i & 1)
        return max([at, *fallen])

    def issue(self, warp: int, now: float) -> None:
        x, unit = self.step[self.at[warp]]
        taken = 0.0
        if unit:
            taken = CYCLES[unit]
            self.free["shared" if unit == "word" else unit] = now + taken
        if unit == "tensor":
            self.busy += taken
            self.next_product[warp] = now + PRODUCT_SPACING
        pending = self.barriers[warp]
        if x.written < 6:
            done = now + taken + LATENCY.get(unit, OTHER_LATENCY)
            pending[x.written] = max(pending[x.written], done)
        if x.read < 6:
            pending[x.read] = max(pending[x.read], now + taken + OPERANDS_READ)
        self.ready[warp] = now + max(1, x.stall)
        if unit == "shared":  # banks and queues are not always free
            self.ready[warp] += self.random.uniform(0, QUEUE)
        if x.opcode.startswith("BAR."):
            self.meet(warp, now)
        self.at[warp] += 1
        if self.at[warp] == len(self.step):
            self.at[warp] = 0
            self.rounds[warp] += 1

    def meet(self, warp: int, now: float) -> None:
        block = [w for w in range(self.count) if self.block_of[w] == self.block_of[warp]]
        self.waiting.add(warp)
        if self.waiting.issuperset(block):
            self.waiting.difference_update(block)
            for w in block:
                self.ready[w] = now + BLOCK_BARRIER


def share_of_products(
    step: Sequence[Instruction], blocks: int, threads: int = 128, runs: int = 10
) -> float:
    """The share of the time in which the tensor cores of a multiprocessor with `blocks` blocks of
    `threads` threads are busy: the mean of `runs` simulations that begin differently."""
    partition_warps, rest = divmod(threads, 128)
    if rest:
        raise ValueError(f"{threads} threads are no multiple of 128")
    partitions = (Partition(step, blocks, partition_warps, seed) for seed in range(runs))
    return statistics.mean(partition.share_of_products() for partition in partitions)


def functions(text: str) -> dict[str, str]:
    """What `cuobjdump -sass` prints of each function of a library, by the mangled names."""
    return {part.split()[0]: part for part in text.split("Function : ")[1:]}


def sm80_kernels(text: str) -> dict[str, list[Instruction]]:
    """Those in what `cuobjdump -sass` prints of a library, by their mangled names."""
    found = functions(text).items()
    return {name: parse(part) for name, part in found if "4sm809FwdKernel" in name}


def blocks_on_multiprocessor(threads: int, registers: int, smem_bytes: int) -> int:
    """How many fit one of Hopper's: 65,536 registers, 228 KB of which 1 KB a block is taken."""
    by_registers = 65536 // (-(-registers // 8) * 8 * threads)
    return min(by_registers, 228 * 1024 // (smem_bytes + 1024), 2048 // threads)
