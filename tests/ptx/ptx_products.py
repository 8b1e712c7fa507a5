"""Matrix products, of a warp and of a warpgroup."""

from __future__ import annotations

import re

import numpy as np
from ptx_arithmetic import from_16_bits
from ptx_machine import LANES, Fault, Lanes, Warp
from ptx_memory import close_group, wait_for_groups
from ptx_operands import Step, elements, number, reader, same_in_all, take_whole_warp, writer
from ptx_text import Operand, Vector


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
