"""PTX as nvcc writes it: the kernels of a text, their registers, and their instructions with the
operands told apart. What is not understood raises ValueError."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Register(NamedTuple):
    index: int  # in Kernel.registers
    type: str  # as declared: pred, b16, b32, f32 or b64


class Immediate(NamedTuple):
    bits: int  # of an integer two's complement in 64 bits, of a float IEEE-754 single


class Symbol(NamedTuple):
    name: str  # of a label, a variable, a parameter or a special register


class Address(NamedTuple):
    base: Operand
    offset: int
    coordinates: tuple[Operand, ...] = ()  # of a box of a tensor


class Pair(NamedTuple):  # a|b
    first: Operand
    second: Operand


class Vector(NamedTuple):  # {a, b}
    elements: tuple[Operand, ...]


class Nothing(NamedTuple):  # _
    pass


Operand = Register | Immediate | Symbol | Address | Pair | Vector | Nothing


@dataclass
class Instruction:
    opcode: str
    operands: list[Operand]
    guard: Register | None
    guard_negated: bool
    line: int

    def __str__(self) -> str:
        return f"{self.opcode} in line {self.line}"


@dataclass
class Kernel:
    name: str  # mangled
    param_bytes: int
    threads: int  # of a block
    registers: list[str] = field(default_factory=list)  # their types
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # to the index of an instruction


def parse(text: str, is_wanted: Callable[[str], bool] = lambda name: True) -> list[Kernel]:
    """The kernels whose mangled names are wanted."""
    text = re.sub(r"//.*", "", text)
    entry = r"\.entry (\w+)\(\s*\.param \.align \d+ \.b8 \w+\[(\d+)\]\s*\)([^{]*)\{"
    kernels = []
    for found in re.finditer(entry, text):
        if not is_wanted(found[1]):
            continue
        threads = re.search(r"\.maxntid (\d+)", found[3])
        if not threads:
            raise ValueError(f"{found[1]} does not say how many threads it has")
        kernel = Kernel(found[1], int(found[2]), int(threads[1]))
        _Body(kernel).parse(text, found.end())
        kernels.append(kernel)
    return kernels


class _Body:
    """What stands between a kernel's braces. Inline assembly has scopes of its own, with registers
    and labels."""

    # A brace, a label, or all up to a semicolon, in which there may be vectors.
    STATEMENT = re.compile(r"\s*(?:([{}])|([$%\w]+):(?!:)|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);)")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.scopes: list[dict[str, Register | str]] = [{}]

    def parse(self, text: str, at: int) -> None:
        statements: list[tuple[int, str]] = []  # with their lines
        depth, line = 1, text.count("\n", 0, at) + 1
        while depth:
            found = self.STATEMENT.match(text, at)
            if not found:
                raise ValueError(f"no statement: {text[at : at + 80]!r}")
            brace, label, statement = found.groups()
            line += text.count("\n", at, found.end())
            statements.append((line, brace or (f"{label}:" if label else statement.strip())))
            depth += {"{": 1, "}": -1}.get(brace, 0)
            at = found.end()
        for i, (line, statement) in enumerate(statements):
            if statement == "{":
                self.scopes.append(self.labels_of_scope(statements, i))
            elif statement == "}":
                self.scopes.pop()
            elif statement.endswith(":"):
                self.kernel.labels[str(self.find(statement[:-1]))] = len(self.kernel.instructions)
            elif statement.startswith(".reg"):
                self.declare(statement)
            elif not statement.startswith((".pragma", ".loc")):
                self.instruction(line, statement)

    @staticmethod
    def labels_of_scope(statements: list[tuple[int, str]], begin: int) -> dict[str, Register | str]:
        """Ahead of their uses, under names that no other scope has."""
        names: dict[str, Register | str] = {}
        depth = 0
        for _, statement in statements[begin:]:
            depth += {"{": 1, "}": -1}.get(statement, 0)
            if depth == 0:
                break
            if depth == 1 and statement.endswith(":"):
                names[statement[:-1]] = f"{statement[:-1]}@{begin}"
        return names

    def find(self, name: str) -> Register | str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def declare(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        for name in split(names):
            many = re.fullmatch(r"([%\w]+)<(\d+)>", name)
            for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                self.scopes[-1][one] = Register(len(self.kernel.registers), kind[1:])
                self.kernel.registers.append(kind[1:])

    def instruction(self, line: int, statement: str) -> None:
        found = re.fullmatch(r"(?:@(!?)(\S+)\s+)?(\S+)\s*(.*)", statement, re.DOTALL)
        if not found:
            raise ValueError(f"no instruction: {statement!r}")
        guard = self.find(found[2]) if found[2] else None
        operands = [self.operand(text) for text in split(found[4])]
        assert guard is None or isinstance(guard, Register)
        self.kernel.instructions.append(
            Instruction(found[3].rstrip("."), operands, guard, bool(found[1]), line)
        )

    def operand(self, text: str) -> Operand:
        if text == "_":
            return Nothing()
        if text[0] == "{":
            return Vector(tuple(map(self.operand, split(text[1:-1]))))
        if text[0] == "[":
            base, *coordinates = split(text[1:-1])
            found = re.fullmatch(r"([^+]+)(?:\+(-?\d+))?", base)
            if not found or len(coordinates) > 1:
                raise ValueError(f"no address: {text}")
            of_box = split(coordinates[0][1:-1]) if coordinates else []
            return Address(
                self.operand(found[1]), int(found[2] or 0), tuple(map(self.operand, of_box))
            )
        if "|" in text:
            return Pair(*map(self.operand, text.split("|")))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", text):
            return Immediate(int(text, 0) % 2**64)
        known = self.find(text)
        return known if isinstance(known, Register) else Symbol(known)


def split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts
