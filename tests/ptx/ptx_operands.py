"""What an instruction reads and writes: arrays of a value for each of a warp's 32 lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ptx_machine import LANES, PARAM_BASE, SHARED_BASE, Fault, Jump, Lanes, Warp
from ptx_text import Address, Immediate, Nothing, Operand, Register, Symbol, Vector

Step = Callable[[Warp, Lanes], Jump | None]
Read = Callable[[Warp], np.ndarray]
Write = Callable[[Warp, Lanes, np.ndarray], None]

#: What a register of a declared type is kept as, and what an instruction's type sees in it.
KEPT = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "f32": np.float32, "b64": np.uint64}
TYPES = {
    **KEPT,
    "b8": np.uint8, "u8": np.uint8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32,
    "s32": np.int32, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip
ALL = np.ones(LANES, bool)


def unwritten(dtype: Any) -> np.ndarray:
    """What a register holds before it is written: NaN, of any other type what stands out too."""
    if dtype == np.bool_:
        return ALL
    return np.full(LANES, -1, f"i{np.dtype(dtype).itemsize}").view(dtype)


def reader(operand: Operand, dtype: Any) -> Read:
    """Its values in the 32 lanes; of a register that is wider, the lower part."""
    dtype = np.dtype(dtype)
    if isinstance(operand, Register):
        index, kept = operand.index, np.dtype(KEPT[operand.type])
        if kept == dtype:
            return lambda warp: warp.registers[index]
        parts = kept.itemsize // dtype.itemsize
        if parts == 0:
            raise ValueError(f"a register of {kept} read as {dtype}")
        return lambda warp: warp.registers[index].view(dtype)[::parts]
    if isinstance(operand, Immediate):
        return constant(operand.bits, dtype)
    if isinstance(operand, Symbol):
        if operand.name == "%tid.x":
            return lambda warp: warp.threads.view(dtype)
        if operand.name == "%ctaid.x":
            return lambda warp: np.full(LANES, warp.block.index, dtype)
        if operand.name.endswith("4smemE"):
            return constant(SHARED_BASE, dtype)
        if operand.name.endswith("_param_0"):
            return constant(PARAM_BASE, dtype)
    raise ValueError(f"not known here: the operand {operand}")


def constant(bits: int, dtype: np.dtype[Any]) -> Read:
    if dtype == np.bool_:
        value = np.full(LANES, bits != 0)
    else:
        size = dtype.itemsize
        value = np.full(LANES, bits % 2 ** (8 * size), np.dtype(f"u{size}")).view(dtype)
    return lambda warp: value


def address_reader(operand: Operand, dtype: Any = np.uint32) -> Read:
    assert isinstance(operand, Address)
    base = reader(operand.base, dtype)
    offset = np.array(operand.offset, np.int64).astype(dtype)
    return (lambda warp: base(warp) + offset) if operand.offset else base


def writer(operand: Operand) -> Write:
    """Into a wider register integers are extended, by their sign if they have one."""
    if isinstance(operand, Nothing):
        return lambda warp, lanes, value: None
    assert isinstance(operand, Register)
    index, kept = operand.index, np.dtype(KEPT[operand.type])

    def write(warp: Warp, lanes: Lanes, value: np.ndarray) -> None:
        if value.dtype.itemsize != kept.itemsize:
            value = value.astype(np.dtype(f"{value.dtype.kind}{kept.itemsize}"))
        if value.dtype != kept:
            value = value.view(kept)
        if lanes is not None:
            value = np.where(lanes, value, warp.registers[index])
        warp.registers[index] = value

    return write


def elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def number(operand: Operand) -> int:
    assert isinstance(operand, Immediate)
    return operand.bits


def same_in_all(values: np.ndarray, what: str) -> int:
    if (values != values[0]).any():
        raise Fault(f"{what} differs within a warp")
    return int(values[0])


def only_lane(lanes: Lanes) -> int:
    """The lane that executes what one thread is to do."""
    active = np.flatnonzero(ALL if lanes is None else lanes)
    if len(active) != 1:
        raise Fault(f"done by {len(active)} lanes")
    return int(active[0])


def take_whole_warp(lanes: Lanes) -> None:
    if lanes is not None:
        raise Fault(f"done by some lanes of a warp alone: {np.flatnonzero(lanes)}")
