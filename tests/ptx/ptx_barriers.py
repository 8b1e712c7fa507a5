"""What lanes, warps and the block's threads do with each other: shuffles, votes, barriers."""

from __future__ import annotations

import numpy as np
from ptx_machine import LANES, Fault, Lanes, MBarrier, Warp
from ptx_operands import (
    ALL,
    Step,
    address_reader,
    constant,
    only_lane,
    reader,
    same_in_all,
    take_whole_warp,
    writer,
)
from ptx_text import Nothing, Operand, Pair


def shuffle(modifiers: list[str], operands: list[Operand]) -> Step | None:
    if modifiers not in (["sync", "bfly", "b32"], ["sync", "idx", "b32"]):
        return None
    target, source, by, clamp, members = operands
    first, second = target if isinstance(target, Pair) else (target, Nothing())
    read, distance, write = reader(source, np.uint32), reader(by, np.uint32), writer(first)
    write_second, exclusive = writer(second), modifiers[1] == "bfly"
    bound, mask = reader(clamp, np.uint32), reader(members, np.uint32)

    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        if (mask(warp) != 2**32 - 1).any() or (bound(warp) != 31).any():
            raise Fault("shuffles among some lanes alone")
        lane = warp.lanes ^ distance(warp) if exclusive else distance(warp) % LANES
        write(warp, None, read(warp)[lane])
        write_second(warp, None, ALL)

    return step


def vote(modifiers: list[str], operands: list[Operand]) -> Step | None:
    target, source, members = operands
    write, read, mask = writer(target), reader(source, np.bool_), reader(members, np.uint32)

    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        if (mask(warp) != 2**32 - 1).any():
            raise Fault("votes among some lanes alone")
        write(warp, None, np.full(LANES, read(warp).any()))

    return step if modifiers == ["sync", "any", "pred"] else None


def warp_barrier(members: Operand) -> Step:
    mask = reader(members, np.uint32)

    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        if (mask(warp) != 2**32 - 1).any():
            raise Fault("a barrier of some lanes alone")

    return step


def barrier(modifiers: list[str], operands: list[Operand]) -> Step | None:
    kind = ".".join(modifiers)
    if kind == "warp.sync":
        return warp_barrier(*operands)
    if kind not in ("sync", "arrive", "red.or.pred"):
        return None
    write, vote_of = writer(Nothing()), constant(0, np.dtype(np.bool_))
    if kind == "red.or.pred":
        result, *operands, vote = operands
        write, vote_of = writer(result), reader(vote, np.bool_)
    which, *counts = (reader(operand, np.uint32) for operand in operands)

    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        threads = warp.block.grid.program.threads
        if counts:
            threads = same_in_all(counts[0](warp), "the threads at a barrier")

        def hear(any_vote: bool) -> None:
            write(warp, None, np.full(LANES, any_vote))

        n, vote = same_in_all(which(warp), "a barrier"), bool(vote_of(warp).any())
        warp.block.meet(n, threads, warp, None if kind == "arrive" else hear, vote)

    return step


def mbarrier(modifiers: list[str], operands: list[Operand]) -> Step | None:
    kind = ".".join(modifiers)
    if kind == "init.shared::cta.b64":
        at, count = address_reader(operands[0]), reader(operands[1], np.uint32)

        def init(warp: Warp, lanes: Lanes) -> None:
            lane, block = only_lane(lanes), warp.block
            address, expected = int(at(warp)[lane]), int(count(warp)[lane])
            block.shared_index(at(warp)[lane : lane + 1], 8)
            if address in block.mbarriers:
                raise Fault("begins a barrier again")
            block.mbarriers[address] = MBarrier(expected, expected)

        return init
    if kind in ("arrive.shared::cta.b64", "arrive.expect_tx.shared::cta.b64"):
        _state, place, *rest = operands
        if len(rest) != ("expect_tx" in kind):
            return None
        at, come = address_reader(place), reader(rest[0], np.uint32) if rest else None

        def arrive(warp: Warp, lanes: Lanes) -> None:
            for lane in np.flatnonzero(ALL if lanes is None else lanes):
                warp.block.arrive(int(at(warp)[lane]), int(come(warp)[lane]) if come else 0)

        return arrive
    if kind == "try_wait.parity.shared::cta.b64":
        target, place, parity, *_time = operands
        write, at, which = writer(target), address_reader(place), reader(parity, np.uint32)

        def try_wait(warp: Warp, lanes: Lanes) -> None:
            active = ALL if lanes is None else lanes
            is_over = np.zeros(LANES, bool)
            for lane in np.flatnonzero(active):
                phase = warp.block.mbarrier(int(at(warp)[lane])).phase
                is_over[lane] = phase != which(warp)[lane]
            write(warp, lanes, is_over)
            warp.asked_in_vain = not is_over[active].all()

        return try_wait
    return None


def registers_change_hands(modifiers: list[str], operands: list[Operand]) -> Step | None:
    known = modifiers[1:] == ["sync", "aligned", "u32"]
    return (lambda warp, lanes: take_whole_warp(lanes)) if known else None
