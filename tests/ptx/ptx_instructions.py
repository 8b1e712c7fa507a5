"""What PTX instructions do (PTX ISA 9.0): those that nvcc takes for the kernels. Any other, and any
form of these that is not known here, raises ValueError."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from ptx_machine import (
    LANES,
    PARAM_BASE,
    SHARED_BASE,
    Fault,
    Jump,
    Lanes,
    MBarrier,
    Pending,
    Program,
    Warp,
)
from ptx_text import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Nothing,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

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


def compile_kernel(kernel: Kernel) -> Program:
    return Program(
        steps=[compile_instruction(kernel, one) for one in kernel.instructions],
        descriptions=[str(one) for one in kernel.instructions],
        whole_warp=[bool(re.search(r"\.sync\b|^bar\.", one.opcode)) for one in kernel.instructions],
        threads=kernel.threads,
        param_bytes=kernel.param_bytes,
        registers=[unwritten(KEPT[kind]) for kind in kernel.registers],
    )


def unwritten(dtype: Any) -> np.ndarray:
    """What a register holds before it is written: NaN, of any other type what stands out too."""
    if dtype == np.bool_:
        return ALL
    return np.full(LANES, -1, f"i{np.dtype(dtype).itemsize}").view(dtype)


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


# -- operands ------------------------------------------------------------------------------------


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


# -- where it goes on ----------------------------------------------------------------------------


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


# -- arithmetic ----------------------------------------------------------------------------------


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


# -- memory --------------------------------------------------------------------------------------


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


# -- copies that take their time -----------------------------------------------------------------


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
    assert isinstance(source, Address)
    to, of, barrier = (
        address_reader(target),
        address_reader(source, np.uint64),
        address_reader(arrival),
    )
    coordinates = [reader(one, np.int32) for one in source.coordinates]

    def step(warp: Warp, lanes: Lanes) -> None:
        lane, block = only_lane(lanes), warp.block
        place, arrives_at = int(to(warp)[lane]), int(barrier(warp)[lane])
        tensor = TensorMap(block.param(int(of(warp)[lane]), 128))
        at = [int(read(warp)[lane]) for read in coordinates]
        # 16-byte chunks are permuted by the address: by its bits 7 to 9, or 7 and 8.
        chunks = np.arange(place, place + tensor.box_bytes, 16)
        chunks ^= (chunks >> 7 & tensor.row_bytes // 16 - 1) << 4
        if place % 128:
            raise Fault("copies a box to where 128 bytes are not aligned")
        units, index = block.shared_in_units(16), block.shared_index(chunks, 16)
        units[index] = 0xFF  # not there yet
        block.mbarrier(arrives_at)

        def land() -> None:
            units[index] = tensor.box(block.grid.memory, at).reshape(-1, 16)
            block.complete(arrives_at, tensor.box_bytes)

        block.boxes.append(land)

    return step


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

    def box(self, memory: Any, at: list[int]) -> np.ndarray:
        """(rows, row_bytes), zeros where the tensor has nothing."""
        rows = np.zeros((self.rows, self.row_bytes), np.uint8)
        size = min(max(2 * (self.sizes[0] - at[0]), 0), self.row_bytes)
        for i, steps in enumerate(np.ndindex(*reversed(self.boxes[1:]))):
            place = [at[0], *(a + s for a, s in zip(at[1:], reversed(steps), strict=True))]
            if size and all(0 <= p < n for p, n in zip(place, self.sizes, strict=True)):
                address = self.data + sum(p * s for p, s in zip(place, self.strides, strict=True))
                rows[i, :size] = memory.read(address, size, 16)
        return rows


# -- products ------------------------------------------------------------------------------------


def a_matrix(words: list[np.ndarray], kind: str) -> np.ndarray:
    """(16, 16) of the four registers of each lane."""
    # (k / 8, row / 8, row % 8, k % 8)
    quarters = from_16_bits(np.stack(words).view(np.uint16), kind).reshape(2, 2, 8, 8)
    return quarters.transpose(1, 2, 0, 3).reshape(16, 16)


def product_of_warp(modifiers: list[str], operands: list[Operand]) -> Step | None:
    """mma.sync.m16n8k16."""
    kind = modifiers[-2]
    form = ["sync", "aligned", "m16n8k16", "row", "col", "f32", kind, kind, "f32"]
    if modifiers != form or kind not in ("f16", "bf16"):
        return None
    d, a, b, c = map(elements, operands)
    read_a, read_b = [reader(x, np.uint32) for x in a], [reader(x, np.uint32) for x in b]
    read_c, write_d = [reader(x, np.float32) for x in c], [writer(x) for x in d]

    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        rows = a_matrix([read(warp) for read in read_a], kind)
        words = np.stack([read(warp) for read in read_b])
        columns = from_16_bits(words.view(np.uint16), kind).reshape(2, 8, 8)  # (k / 8, n, k % 8)
        products = rows @ columns.transpose(0, 2, 1).reshape(16, 8)
        of_lanes = products.reshape(2, LANES, 2)  # (row / 8, lane, column % 2)
        for i, write in enumerate(write_d):
            write(warp, None, read_c[i](warp) + of_lanes[i // 2, :, i % 2])

    return step


class Descriptor:
    """Of a matrix in shared memory, as wgmma takes it: 64 bits."""

    def __init__(self, bits: int) -> None:
        self.start, self.leading, self.stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        # Rows of 128 or 64 bytes, whose chunks are permuted by bits 7 to 9, or 7 and 8.
        permuted = {1: 7, 2: 3}.get(bits >> 62)
        if permuted is None or bits >> 49 & 7:
            raise Fault(f"a descriptor of a kind that is not known here: {bits:#x}")
        self.permuted, self.row_bytes = permuted, 16 * (permuted + 1)

    def elements(self, warp: Warp, offsets: np.ndarray) -> np.ndarray:
        addresses = self.start + offsets
        addresses ^= (addresses >> 7 & self.permuted) << 4
        return warp.block.shared.view(np.uint16)[warp.block.shared_index(addresses, 2)]

    def along_rows(self, warp: Warp, rows: np.ndarray) -> np.ndarray:
        """(rows, 16), the 16 being side by side ("K-major")."""
        of_rows = rows // 8 * self.stride + rows % 8 * self.row_bytes
        return self.elements(warp, of_rows[:, None] + 2 * np.arange(16))

    def across_rows(self, warp: Warp, columns: np.ndarray) -> np.ndarray:
        """(columns, 16), the columns being side by side ("MN-major")."""
        of_strip, k = self.row_bytes // 2, np.arange(16)
        of_columns = columns // of_strip * self.leading + columns % of_strip * 2
        return self.elements(
            warp, of_columns[:, None] + k // 8 * self.stride + k % 8 * self.row_bytes
        )


def product_of_warpgroup(modifiers: list[str], operands: list[Operand]) -> Step | None:
    kind = ".".join(modifiers)
    if kind == "fence.sync.aligned":
        return lambda warp, lanes: take_whole_warp(lanes)
    if kind == "commit_group.sync.aligned":
        return close_group(lambda warp: warp.products)
    if kind == "wait_group.sync.aligned":
        return wait_for_groups(lambda warp: warp.products, number(operands[0]))
    form = re.fullmatch(r"mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2", kind)
    d, a, b, accumulate, *flags = operands
    # Signs of A and B, then, of what lies in shared memory, whether it lies across its rows.
    signs, across = [number(flag) for flag in flags[:2]], [number(flag) for flag in flags[2:]]
    if not form or signs != [1, 1] or across[:-1] not in ([], [0]):
        return None
    columns, element = np.arange(int(form[1])), form[2]
    read_d, write_d = [reader(x, np.float32) for x in elements(d)], [writer(x) for x in elements(d)]
    keeps, b_bits = reader(accumulate, np.bool_), reader(b, np.uint64)
    a_words = [reader(x, np.uint32) for x in elements(a)] if isinstance(a, Vector) else []
    a_bits = None if a_words else reader(a, np.uint64)

    def step(warp: Warp, lanes: Lanes) -> None:
        take_whole_warp(lanes)
        of_b = Descriptor(same_in_all(b_bits(warp), "a descriptor"))
        of_a = Descriptor(same_in_all(a_bits(warp), "a descriptor")) if a_bits else None
        adds = same_in_all(keeps(warp), "what becomes of the accumulator")
        my_rows = np.arange(16) + 16 * (warp.index % 4)

        def product() -> None:  # of the warp's 16 of the 64 rows
            if of_a:
                rows = from_16_bits(of_a.along_rows(warp, my_rows), element)
            else:
                rows = a_matrix([read(warp) for read in a_words], element)
            read_b = of_b.across_rows if across[-1] else of_b.along_rows
            products = rows @ from_16_bits(read_b(warp, columns), element).T
            # (row / 8, row % 8, column / 8, lane of the quad, column % 2)
            of_lanes = products.reshape(2, 8, -1, 4, 2)
            for i, write in enumerate(write_d):
                mine = of_lanes[i // 2 % 2, :, i // 4, :, i % 2].reshape(LANES)
                write(warp, None, read_d[i](warp) + mine if adds else mine)

        warp.products.issue(product)

    return step


# -- the others of the warp and of the block -----------------------------------------------------


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


def trap(modifiers: list[str], operands: list[Operand]) -> Step:
    def step(warp: Warp, lanes: Lanes) -> None:
        raise Fault("runs into a trap")

    return step


def registers_change_hands(modifiers: list[str], operands: list[Operand]) -> Step | None:
    known = modifiers[1:] == ["sync", "aligned", "u32"]
    return (lambda warp, lanes: take_whole_warp(lanes)) if known else None


def without_effect(form: str) -> Callable[..., Step | None]:
    """On a machine that does one thing after another."""

    def build(modifiers: list[str], operands: list[Operand]) -> Step | None:
        return (lambda warp, lanes: None) if ".".join(modifiers) == form else None

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
    "ld": load, "st": store, "cvta": to_address_space, "ldmatrix": load_matrix, "cp": copy,
    "mma": product_of_warp, "wgmma": product_of_warpgroup,
    "shfl": shuffle, "vote": vote, "bar": barrier, "mbarrier": mbarrier,
    "fence": without_effect("mbarrier_init.release.cluster"),
    "prefetch": without_effect("tensormap"), "setmaxnreg": registers_change_hands,
}  # fmt: skip
