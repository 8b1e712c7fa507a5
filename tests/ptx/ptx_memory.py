"""Loads, stores, and copies that take their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ptx_arithmetic import elementwise
from ptx_machine import LANES, Fault, GlobalMemory, Lanes, Pending, Warp
from ptx_operands import (
    ALL,
    KEPT,
    TYPES,
    Step,
    address_reader,
    elements,
    number,
    only_lane,
    reader,
    take_whole_warp,
    writer,
)
from ptx_text import Address, Operand, Register


def parse_access(modifiers: list[str], operand: Operand) -> tuple[str, np.dtype[Any]] | None:
    """The space and the type of a load or a store, if they are known here."""
    space, *rest = modifiers
    expected = {1: [], 2: ["v2"], 4: ["v4"]}[len(elements(operand))]
    expected = ["wb", *expected] if rest[:1] == ["wb"] else expected  # the default, spelled out
    good = space in ("param", "shared", "global") and rest[:-1] == expected
    return (space, np.dtype(TYPES[rest[-1]])) if good else None


def width_of(address: Operand) -> Any:
    assert isinstance(address, Address)
    return KEPT[address.base.type] if isinstance(address.base, Register) else np.uint64


def load(modifiers: list[str], operands: list[Operand]) -> Step | None:
    target, source = operands
    access = parse_access(modifiers, target)
    if access is None:
        return None
    space, dtype = access
    writes, at = [writer(one) for one in elements(target)], address_reader(source, width_of(source))
    size = dtype.itemsize * len(writes)

    def step(warp: Warp, lanes: Lanes) -> None:
        active = ALL if lanes is None else lanes
        data = np.zeros((LANES, size), np.uint8)
        where = at(warp)[active]
        if space == "shared":
            units = warp.block.shared_in_units(size)
            data[active] = units[warp.block.shared_index(where, size)]
        elif space == "global":
            memory = warp.block.grid.memory
            data[active] = [memory.read(int(address), size, size) for address in where]
        else:
            data[active] = [warp.block.param(int(address), size) for address in where]
        for i, write in enumerate(writes):
            write(warp, lanes, data.view(dtype)[:, i].copy())

    return step


def store(modifiers: list[str], operands: list[Operand]) -> Step | None:
    target, source = operands
    access = parse_access(modifiers, source)
    if access is None or access[0] == "param":
        return None
    space, dtype = access
    reads, at = (
        [reader(one, dtype) for one in elements(source)],
        address_reader(target, width_of(target)),
    )
    size = dtype.itemsize * len(reads)

    def step(warp: Warp, lanes: Lanes) -> None:
        active = ALL if lanes is None else lanes
        data = np.stack([read(warp) for read in reads], 1).view(np.uint8)[active]
        where = at(warp)[active]
        if space == "shared":
            units = warp.block.shared_in_units(size)
            units[warp.block.shared_index(where, size)] = data
        else:
            for address, chunk in zip(where, data, strict=True):
                warp.block.grid.memory.write(int(address), chunk)

    return step


def to_address_space(modifiers: list[str], operands: list[Operand]) -> Step | None:
    """Addresses are the same in the spaces as outside."""
    known = modifiers in (["to", "global", "u64"], ["param", "u64"])
    return elementwise(lambda x: x, np.uint64, operands) if known else None


def load_matrix(modifiers: list[str], operands: list[Operand]) -> Step | None:
    """Four matrices of 8 rows of 16 bytes, whose addresses the lanes give, eight each."""
    rest = [one for one in modifiers if one != "trans"]
    if rest != ["sync", "aligned", "x4", "m8n8", "shared", "b16"]:
        return None
    target, source = operands
    writes, at = [writer(one) for one in elements(target)], address_reader(source)

    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        rows = warp.block.shared_in_units(16)[warp.block.shared_index(at(warp), 16)]
        matrices = rows.view(np.uint16).reshape(4, 8, 8)
        if "trans" in modifiers:
            matrices = matrices.transpose(0, 2, 1)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(4, LANES)
        for write, word in zip(writes, words, strict=True):
            write(warp, None, word)

    return step


def store_matrix(modifiers: list[str], operands: list[Operand]) -> Step | None:
    """The opposite."""
    if modifiers != ["sync", "aligned", "x4", "m8n8", "shared", "b16"]:
        return None
    target, source = operands
    at, reads = address_reader(target), [reader(one, np.uint32) for one in elements(source)]

    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        rows = np.stack([read(warp) for read in reads]).view(np.uint8).reshape(LANES, 16)
        warp.block.shared_in_units(16)[warp.block.shared_index(at(warp), 16)] = rows

    return step


# -- copies that take their time ------------------------------------------------------------------


def close_group(pending_of: Callable[[Warp], Pending]) -> Step:
    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        pending_of(warp).close_group()

    return step


def wait_for_groups(pending_of: Callable[[Warp], Pending], in_flight: int) -> Step:
    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        pending_of(warp).wait(in_flight)

    return step


def copy(modifiers: list[str], operands: list[Operand]) -> Step | None:
    kind = ".".join(modifiers)
    if kind == "async.commit_group":
        return close_group(lambda warp: warp.copies)
    if kind == "async.wait_group":
        return wait_for_groups(lambda warp: warp.copies, number(operands[0]))
    if kind == "async.wait_all":  # those of the open group too

        def wait_all(warp: Warp, lanes: Lanes) -> None:
            take_whole_warp(lanes)
            warp.copies.close_group()
            warp.copies.wait(0)

        return wait_all
    if kind.removesuffix(".L2::128B") == "async.cg.shared.global":
        return copy_chunks(operands)
    if kind == "async.bulk.commit_group":
        return lambda warp, lanes: warp.boxes[only_lane(lanes)].close_group()
    if kind == "async.bulk.wait_group.read":
        groups = number(operands[0])
        return lambda warp, lanes: warp.boxes[only_lane(lanes)].wait(groups)
    if kind == "async.bulk.tensor.5d.global.shared::cta.bulk_group":
        return store_box(operands)
    box = "async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
    return copy_box(operands) if kind.removesuffix(".L2::cache_hint") == box else None


def copy_chunks(operands: list[Operand]) -> Step | None:
    """16 bytes a lane from global to shared memory, or 16 zeros."""
    target, source, size, existing = operands
    if number(size) != 16:
        return None
    to, of = address_reader(target), address_reader(source, np.uint64)
    bytes_that_exist = reader(existing, np.uint32)

    def step(warp: Warp, lanes: Lanes) -> None:
        block = warp.block
        active = np.flatnonzero(ALL if lanes is None else lanes)
        units, index = block.shared_in_units(16), block.shared_index(to(warp)[active], 16)
        exists, addresses = bytes_that_exist(warp)[active], of(warp)[active]
        chunks = np.zeros((len(active), 16), np.uint8)
        for i, address in enumerate(addresses):
            if exists[i] == 16:
                chunks[i] = block.grid.memory.read(int(address), 16, 16)
            elif exists[i]:
                raise Fault(f"copies {exists[i]} bytes of 16")
        units[index] = 0xFF  # not there yet

        def land() -> None:
            units[index] = chunks

        warp.copies.issue(land)

    return step


def copy_box(operands: list[Operand]) -> Step | None:
    """A box of a tensor to shared memory by the copy engine, which an mbarrier is told of."""
    target, source, arrival, *_hint = operands
    box_of, barrier = box_reader(source, target), address_reader(arrival)

    def step(warp: Warp, lanes: Lanes) -> None:
        lane, block = only_lane(lanes), warp.block
        tensor, at, index = box_of(warp, lane)
        arrives_at, units = int(barrier(warp)[lane]), block.shared_in_units(16)
        units[index] = 0xFF  # not there yet
        block.mbarrier(arrives_at)

        def land() -> None:
            units[index] = tensor.read(block.grid.memory, at).reshape(-1, 16)
            block.complete(arrives_at, tensor.box_bytes)

        block.boxes.append(land)

    return step


def store_box(operands: list[Operand]) -> Step | None:
    """A box of a tensor from shared memory by the copy engine, for which its lane waits."""
    box_of = box_reader(*operands)

    def step(warp: Warp, lanes: Lanes) -> None:
        lane, block = only_lane(lanes), warp.block
        tensor, at, index = box_of(warp, lane)

        def leave() -> None:
            rows = block.shared_in_units(16)[index].reshape(tensor.rows, tensor.row_bytes)
            tensor.write(block.grid.memory, at, rows)

        warp.boxes[lane].issue(leave)

    return step


def box_reader(
    tensor: Operand, shared: Operand
) -> Callable[[Warp, int], tuple[TensorMap, list[int], np.ndarray]]:
    """What a lane names: a tensor, where in it the box begins, and the box's chunks of 16 bytes in
    shared memory."""
    assert isinstance(tensor, Address)
    of, place_of = address_reader(tensor, np.uint64), address_reader(shared)
    coordinates = [reader(one, np.int32) for one in tensor.coordinates]

    def read(warp: Warp, lane: int) -> tuple[TensorMap, list[int], np.ndarray]:
        block, place = warp.block, int(place_of(warp)[lane])
        map_of = TensorMap(block.param(int(of(warp)[lane]), 128))
        if place % 128:
            raise Fault("names a box in shared memory that is not aligned to 128 bytes")
        # Chunks are permuted by the address: by its bits 7 to 9, or 7 and 8.
        chunks = np.arange(place, place + map_of.box_bytes, 16)
        chunks ^= (chunks >> 7 & map_of.row_bytes // 16 - 1) << 4
        at = [int(coordinate(warp)[lane]) for coordinate in coordinates]
        return map_of, at, block.shared_index(chunks, 16)

    return read


class TensorMap:
    """As tests/emulator/tensor_copy.h keeps it in the 128 bytes of a CUtensorMap."""

    FIELDS = np.dtype(
        [("mark", "u8"), ("data", "u8"), ("strides", "i8", 5), ("sizes", "u4", 5),
         ("boxes", "i2", 5), ("row_bytes", "i2")]
    )  # fmt: skip
    MARK = 0x70616D20726F736E

    def __init__(self, data: np.ndarray) -> None:
        fields = np.frombuffer(data.tobytes(), self.FIELDS, 1)[0]
        if fields["mark"] != self.MARK:
            raise Fault("there is no tensor map")
        self.data, self.row_bytes = int(fields["data"]), int(fields["row_bytes"])
        self.strides, self.sizes, self.boxes = (
            [int(x) for x in fields[name]] for name in ("strides", "sizes", "boxes")
        )
        self.rows = int(np.prod(self.boxes[1:]))
        self.box_bytes = self.rows * self.row_bytes

    def existing_rows(self, at: list[int]) -> Iterator[tuple[int, int, int]]:
        """Of a box: the row, its address, and how many bytes of it the tensor has."""
        size = min(max(2 * (self.sizes[0] - at[0]), 0), self.row_bytes)
        for i, steps in enumerate(np.ndindex(*reversed(self.boxes[1:]))):
            place = [at[0], *(a + s for a, s in zip(at[1:], reversed(steps), strict=True))]
            if size and all(0 <= p < n for p, n in zip(place, self.sizes, strict=True)):
                offsets = (p * s for p, s in zip(place, self.strides, strict=True))
                yield i, self.data + sum(offsets), size

    def read(self, memory: GlobalMemory, at: list[int]) -> np.ndarray:
        """A box, (rows, row_bytes): zeros where the tensor has nothing."""
        rows = np.zeros((self.rows, self.row_bytes), np.uint8)
        for i, address, size in self.existing_rows(at):
            rows[i, :size] = memory.read(address, size, 16)
        return rows

    def write(self, memory: GlobalMemory, at: list[int], rows: np.ndarray) -> None:
        """A box, of which what the tensor has no place for is left out."""
        for i, address, size in self.existing_rows(at):
            for column in range(0, size, 16):  # all that rows are aligned to
                memory.write(address + column, rows[i, column : min(column + 16, size)])
