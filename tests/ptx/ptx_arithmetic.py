"""Instructions that compute, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ptx_machine import LANES, Lanes, Warp
from ptx_operands import TYPES, Step, reader, writer
from ptx_text import Operand, Vector


def elementwise(function: Callable[..., np.ndarray], dtype: Any, operands: list[Operand]) -> Step:
    write, reads = writer(operands[0]), [reader(source, dtype) for source in operands[1:]]
    return lambda warp, lanes: write(warp, lanes, function(*(read(warp) for read in reads)))


def simple(function: Callable[..., np.ndarray]) -> Callable[..., Step | None]:
    def build(modifiers: list[str], operands: list[Operand]) -> Step | None:
        *rest, kind = modifiers
        if rest and (rest, kind) != (["rn"], "f32"):
            return None
        return elementwise(function, TYPES[kind], operands)

    return build


def least_or_greatest(of_integers: Any, of_floats: Any) -> Callable[..., Step | None]:
    def build(modifiers: list[str], operands: list[Operand]) -> Step:
        (kind,) = modifiers
        return elementwise(of_floats if kind == "f32" else of_integers, TYPES[kind], operands)

    return build


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def multiply(modifiers: list[str], operands: list[Operand]) -> Step | None:
    """mul, mad and fma."""
    *mode, kind = modifiers
    dtype = np.dtype(TYPES[kind])
    if dtype == np.float32:
        function = fused if len(operands) == 4 else np.multiply
        return elementwise(function, dtype, operands) if mode in ([], ["rn"]) else None
    wide = np.dtype(f"{dtype.kind}{min(8, 2 * dtype.itemsize)}")
    if mode == ["lo"]:
        return elementwise(lambda a, b, *c: sum(c, a * b), dtype, operands)
    if mode == ["hi"] and dtype.itemsize == 4 and len(operands) == 3:
        return elementwise(
            lambda a, b: (a.astype(wide) * b.astype(wide) >> 32).astype(dtype), dtype, operands
        )
    if mode == ["wide"] and len(operands) == 3:
        return elementwise(lambda a, b: a.astype(wide) * b.astype(wide), dtype, operands)
    return None


def divide(modifiers: list[str], operands: list[Operand]) -> Step | None:
    def integers(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # towards zero
        wide_a, wide_b = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
        quotient = np.abs(wide_a) // np.abs(wide_b)
        return np.where((wide_a < 0) ^ (wide_b < 0), -quotient, quotient).astype(a.dtype)

    if modifiers in (["s32"], ["u32"]):
        return elementwise(integers, TYPES[modifiers[0]], operands)
    return elementwise(np.divide, np.float32, operands) if modifiers == ["rn", "f32"] else None


def shift(function: Callable[..., np.ndarray]) -> Callable[..., Step]:
    def build(modifiers: list[str], operands: list[Operand]) -> Step:
        (kind,) = modifiers
        dtype, (target, source, by) = np.dtype(TYPES[kind]), operands
        write, read, distance = writer(target), reader(source, dtype), reader(by, np.uint32)
        most = 8 * dtype.itemsize - 1

        def step(warp: Warp, lanes: Lanes) -> None:
            n = distance(warp)
            shifted = function(read(warp), np.minimum(n, most).astype(dtype))
            if dtype.kind == "u":  # signs stay, others are gone
                shifted = np.where(n > most, dtype.type(0), shifted)
            write(warp, lanes, shifted)

        return step

    return build


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def special(function: Callable[..., np.ndarray]) -> Callable[..., Step]:
    """Correctly rounded, which the hardware's approximations are not."""

    def build(modifiers: list[str], operands: list[Operand]) -> Step:
        flushed = flush if "ftz" in modifiers else (lambda x: x)
        return elementwise(
            lambda x: flushed(function(flushed(x).astype(np.float64)).astype(np.float32)),
            np.float32,
            operands,
        )

    return build


COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
    "geu": lambda a, b: ~np.less(a, b),  # of floats: or one of them is NaN
}  # fmt: skip


def compare(modifiers: list[str], operands: list[Operand]) -> Step | None:
    how, kind = modifiers[0], modifiers[-1]
    if len(modifiers) != 2 or len(operands) != 3 or (how, kind) == ("ne", "f32"):
        return None
    if how == "geu" and kind != "f32":
        return None
    return elementwise(COMPARISONS[how], TYPES[kind], operands)


def select(modifiers: list[str], operands: list[Operand]) -> Step:
    (kind,) = modifiers
    target, a, b, which = operands
    write, read_a, read_b = writer(target), reader(a, TYPES[kind]), reader(b, TYPES[kind])
    choose = reader(which, np.bool_)
    return lambda warp, lanes: write(
        warp, lanes, np.where(choose(warp), read_a(warp), read_b(warp))
    )


def move(modifiers: list[str], operands: list[Operand]) -> Step:
    (kind,) = modifiers
    target, source = operands
    dtype = np.dtype(TYPES[kind])
    if isinstance(source, Vector):  # its elements become one value
        part, write = np.dtype(f"u{dtype.itemsize // len(source.elements)}"), writer(target)
        reads = [reader(element, part) for element in source.elements]
        return lambda warp, lanes: write(
            warp, lanes, np.stack([read(warp) for read in reads], 1).view(dtype)[:, 0]
        )
    if isinstance(target, Vector):
        part, read = np.dtype(f"u{dtype.itemsize // len(target.elements)}"), reader(source, dtype)
        writes = [writer(element) for element in target.elements]

        def step(warp: Warp, lanes: Lanes) -> None:
            parts = np.ascontiguousarray(read(warp)).view(part).reshape(LANES, -1)
            for i, write in enumerate(writes):
                write(warp, lanes, parts[:, i].copy())

        return step
    return elementwise(lambda x: x, dtype, operands)


def to_16_bits(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    to_even = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(x), 0x7FFF, to_even >> np.uint32(16)).astype(np.uint16)


def from_16_bits(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return x.view(np.float16).astype(np.float32)
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def convert(modifiers: list[str], operands: list[Operand]) -> Step | None:
    *rounding, to, of = modifiers
    target, *sources = operands
    write = writer(target)
    if of == "f32" and rounding == ["rn"] and to in ("f16", "bf16", "f16x2", "bf16x2"):
        reads = [reader(source, np.float32) for source in reversed(sources)]  # the lower half last
        half = to.removesuffix("x2")

        def narrow(warp: Warp, lanes: Lanes) -> None:
            halves = np.stack([to_16_bits(read(warp), half) for read in reads], 1)
            write(warp, lanes, halves.view(f"u{2 * len(reads)}")[:, 0])

        return narrow
    if to == "f32" and of in ("f16", "bf16") and not rounding:
        read = reader(sources[0], np.uint16)
        return lambda warp, lanes: write(warp, lanes, from_16_bits(read(warp), of))
    if of not in TYPES or to not in TYPES or rounding != (["rn"] if to == "f32" else []):
        return None
    return elementwise(lambda x: x.astype(TYPES[to]), TYPES[of], operands) if of != "f32" else None
