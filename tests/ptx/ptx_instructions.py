"""The PTX instructions (PTX ISA 9.0) that nvcc takes for the kernels, as steps of the machine. Any
other, and any form of these that is not known here, raises ValueError."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from ptx_arithmetic import (
    compare,
    convert,
    divide,
    least_or_greatest,
    move,
    multiply,
    select,
    shift,
    simple,
    special,
)
from ptx_barriers import barrier, mbarrier, registers_change_hands, shuffle, vote
from ptx_machine import Fault, Jump, Lanes, Program, Warp
from ptx_memory import copy, load, load_matrix, store, store_matrix, to_address_space
from ptx_operands import ALL, KEPT, Step, unwritten
from ptx_products import product_of_warp, product_of_warpgroup
from ptx_text import Instruction, Kernel, Operand, Symbol


def compile_kernel(kernel: Kernel) -> Program:
    return Program(
        steps=[compile_instruction(kernel, one) for one in kernel.instructions],
        descriptions=[str(one) for one in kernel.instructions],
        whole_warp=[bool(re.search(r"\.sync\b|^bar\.", one.opcode)) for one in kernel.instructions],
        threads=kernel.threads,
        param_bytes=kernel.param_bytes,
        registers=[unwritten(KEPT[kind]) for kind in kernel.registers],
    )


def compile_instruction(kernel: Kernel, one: Instruction) -> Step:
    name, *modifiers = one.opcode.split(".")
    if name == "bra":
        return branch(kernel, one)
    try:
        step = BUILDERS[name](modifiers, one.operands)
    except KeyError:  # the instruction, a type, a comparison
        step = None
    if step is None:
        raise ValueError(f"not known here: {one}")
    if one.guard is None:
        return step
    guard, negated, guarded = one.guard.index, one.guard_negated, step

    def guarded_step(warp: Warp, lanes: Lanes) -> Jump | None:
        holds = warp.registers[guard] ^ negated
        if lanes is not None:
            holds = holds & lanes
        return guarded(warp, None if holds.all() else holds) if holds.any() else None

    return guarded_step


def branch(kernel: Kernel, one: Instruction) -> Step:
    (label,) = one.operands
    assert isinstance(label, Symbol)
    target = kernel.labels[label.name]
    if one.guard is None:
        return lambda warp, lanes: lambda place, mask: [(target, mask)]
    guard, negated = one.guard.index, one.guard_negated

    def step(warp: Warp, lanes: Lanes) -> Jump | None:
        takes = warp.registers[guard] ^ negated
        if lanes is not None:
            takes = takes & lanes
        if not takes.any():
            return None

        def jump(place: int, mask: np.ndarray) -> list[tuple[int, np.ndarray]]:
            stays = mask & ~takes
            return [(target, takes), (place + 1, stays)] if stays.any() else [(target, takes)]

        return jump

    return step


def leave(modifiers: list[str], operands: list[Operand]) -> Step:
    def step(warp: Warp, lanes: Lanes) -> Jump:
        def jump(place: int, mask: np.ndarray) -> list[tuple[int, np.ndarray]]:
            stays = mask & ~(ALL if lanes is None else lanes)
            return [(place + 1, stays)] if stays.any() else []

        return jump

    return step


def trap(modifiers: list[str], operands: list[Operand]) -> Step:
    def step(warp: Warp, lanes: Lanes) -> None:
        raise Fault("runs into a trap")

    return step


def without_effect(*forms: str) -> Callable[..., Step | None]:
    """On a machine that does one thing after another."""

    def build(modifiers: list[str], operands: list[Operand]) -> Step | None:
        return (lambda warp, lanes: None) if ".".join(modifiers) in forms else None

    return build


BUILDERS: dict[str, Callable[[list[str], list[Operand]], Step | None]] = {
    "ret": leave, "exit": leave, "trap": trap,
    "add": simple(np.add), "sub": simple(np.subtract), "neg": simple(np.negative),
    "and": simple(np.bitwise_and), "or": simple(np.bitwise_or), "xor": simple(np.bitwise_xor),
    "not": simple(np.bitwise_not), "mul": multiply, "mad": multiply, "fma": multiply, "div": divide,
    "shl": shift(np.left_shift), "shr": shift(np.right_shift),
    "min": least_or_greatest(np.minimum, np.fmin), "max": least_or_greatest(np.maximum, np.fmax),
    "ex2": special(np.exp2), "lg2": special(np.log2), "rcp": special(np.reciprocal),
    "setp": compare, "selp": select, "mov": move, "cvt": convert,
    "ld": load, "st": store, "cvta": to_address_space, "ldmatrix": load_matrix,
    "stmatrix": store_matrix, "cp": copy,
    "mma": product_of_warp, "wgmma": product_of_warpgroup,
    "shfl": shuffle, "vote": vote, "bar": barrier, "mbarrier": mbarrier,
    "fence": without_effect("mbarrier_init.release.cluster", "proxy.async.shared::cta"),
    "prefetch": without_effect("tensormap"), "setmaxnreg": registers_change_hands,
}  # fmt: skip
