"""Runs the forward kernels on the emulated machine, from torch tensors on the CPU."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
from support import poisoned
from torch import Tensor

_ERROR_BYTES = 4096


class EmulationError(AssertionError):
    """What a kernel did wrong: block, thread, address, and the places in the source."""


class BankCount(ctypes.Structure):
    """Wavefronts of accesses to shared memory without conflicts, and what conflicts add."""

    _fields_ = [("wavefronts", ctypes.c_int64), ("conflicts", ctypes.c_int64)]

    def __repr__(self) -> str:
        return f"{self.wavefronts} + {self.conflicts}"


#: To shared memory.
ACCESSES = ("load_matrix", "copy_async", "load", "store", "store_matrix")


class Counters(ctypes.Structure):
    """As in counters.h."""

    _fields_ = [
        *((name, BankCount) for name in ACCESSES),
        ("global_reads_16", ctypes.c_int64),
        ("global_reads", ctypes.c_int64),
        ("global_writes_16", ctypes.c_int64),
        ("global_writes", ctypes.c_int64),
        ("block_barriers", ctypes.c_int64),
        ("mma", ctypes.c_int64),
        ("box_bytes", ctypes.c_int64),
        ("box_bytes_out", ctypes.c_int64),
        ("products", ctypes.c_int64),
    ]

    def __repr__(self) -> str:
        return ", ".join(f"{name} {getattr(self, name)}" for name, _ in self._fields_)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 3),
    ]


class _Forward(ctypes.Structure):
    """As in forward.cpp."""

    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "out")),
        ("lse", ctypes.c_void_p),
        ("is_half", ctypes.c_int32),
        ("workers", ctypes.c_int32),
        ("softmax_scale", ctypes.c_double),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("diagonal_offset", ctypes.c_int64),
        ("arch", ctypes.c_int64),
        ("smem_limit", ctypes.c_int64),
        ("splits", ctypes.c_int64),
        ("capability_major", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("refuses_tensor_maps", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    ]


def _readable_rows(x: Tensor) -> Tensor:
    """As in torch_binding.cpp: x, or a copy with rows of whole 16-byte chunks."""
    strides = [s if size > 1 else 0 for s, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    aligned = x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in (*strides, x.shape[3]))
    if aligned and (x.shape[3] == 1 or x.stride(3) == 1):
        return x
    padded = -x.shape[3] % 8
    return poisoned(torch.nn.functional.pad(x, (0, padded)))


def _as_c(x: Tensor) -> _Tensor:
    strides = [s if size > 1 else 0 for s, size in zip(x.stride(), x.shape, strict=True)]
    return _Tensor(x.data_ptr(), (ctypes.c_int64 * 4)(*x.shape), (ctypes.c_int64 * 3)(*strides[:3]))


class Emulator:
    """The kernels of one library (build_emulator.py)."""

    def __init__(self, path: Path, workers: int | None = None, arch: int = 80) -> None:
        self.path = path
        self.arch = arch
        self.workers = workers or len(os.sched_getaffinity(0))  # blocks that run side by side
        self._library = ctypes.CDLL(str(path))
        self._library.describe_build.restype = ctypes.c_char_p

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        *,
        window_left: int = -1,
        window_right: int = -1,
        diagonal_offset: int = 0,
        smem_limit: int = 0,
        splits: int = 0,
        multiprocessors: int = 132,
        capability_major: int = 9,
        refuses_tensor_maps: bool = False,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor, Counters]:
        """Output, LSE, and what was counted. The tile is that of a device with `smem_limit` bytes
        of shared memory, the keys are in `splits` parts, or in as many as the launch chooses; the
        device has `multiprocessors`; threads take turns in an order that `seed` decides.
        """
        rows = [_readable_rows(x) for x in (q, k, v)]
        out = torch.full_like(rows[0], math.nan)
        if not q.is_contiguous():
            out = poisoned(out)
        lse = torch.full(q.shape[:3], math.nan)
        call = _Forward(
            *map(_as_c, (*rows, out)),
            lse.data_ptr(),
            q.dtype == torch.float16,
            self.workers,
            softmax_scale,
            window_left,
            window_right,
            diagonal_offset,
            self.arch,
            smem_limit,
            splits,
            capability_major,
            multiprocessors,
            refuses_tensor_maps,
            seed,
        )
        counters = self._call(self._library.emulate_forward, ctypes.byref(call))
        return out[..., : q.shape[3]], lse, counters

    def tiles(self) -> list[dict[str, Any]]:
        """The rows of the tile table."""
        tiles = json.loads(self._library.describe_build())["tiles"]
        return [tile for tile in tiles if tile["arch"] == f"sm{self.arch}"]

    def tile(
        self,
        head_dim: int,
        len_q: int = 2**30,
        len_k: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        heads_kv: int | None = None,
        is_banded: bool = False,
        is_triangle: bool | None = None,
        multiprocessors: int = 132,
    ) -> dict[str, Any]:
        """The row that serves heads of that many elements; of sm90 that of such a call, whose mask
        if it has one is by default a triangle, of sm80 the best."""
        bucket = min(size for row in self.tiles() if (size := row["head_dim"]) >= head_dim)
        rows = [row for row in self.tiles() if row["head_dim"] == bucket]
        if self.arch == 90:
            masks = "any", "banded" if is_banded else "full"
            shape = batch, heads, heads_kv or heads, len_q, len_k or len_q, bucket
            is_triangle = is_banded if is_triangle is None else is_triangle
            block_m = self._library.block_m_of_sm90(*shape, is_banded, is_triangle, multiprocessors)
            rows = [row for row in rows if row["block_m"] == block_m and row["mask"] in masks]
        return rows[0]

    def deal(
        self,
        batch: int,
        heads: int,
        heads_kv: int,
        len_q: int,
        len_k: int,
        head_dim: int,
        block_m: int,
        multiprocessors: int,
        *,
        window_left: int = -1,
        window_right: int = -1,
        l2_bytes: int = 50 << 20,
    ) -> Tensor:
        """The thread blocks' tiles and parts of tiles: rows of (block, first row, end of the rows,
        head, batch)."""
        tiles = math.ceil(len_q / block_m) * heads * batch
        dealt = torch.full((8 * tiles, 5), -1, dtype=torch.int32)  # room for parts, and to be wrong
        shape = batch, heads, heads_kv, len_q, len_k, head_dim
        count = self._library.deal(
            self.arch,
            *shape,
            window_left,
            window_right,
            block_m,
            multiprocessors,
            l2_bytes,
            ctypes.c_void_p(dealt.data_ptr()),
        )
        return dealt[:count]

    def splits(
        self,
        batch: int,
        heads: int,
        heads_kv: int,
        len_q: int,
        len_k: int,
        head_dim: int,
        multiprocessors: int = 132,
        *,
        smem_limit: int = 232448,
        window_left: int = -1,
        window_right: int = -1,
    ) -> tuple[int, int]:
        """Into how many parts the keys are split, and of how many keys; sm90 takes no account of
        `smem_limit`."""
        keys = ctypes.c_int32()
        shape = batch, heads, heads_kv, len_q, len_k, head_dim
        device = multiprocessors, smem_limit
        bands = window_left, window_right
        count = self._library.splits_of(self.arch, *shape, *bands, *device, ctypes.byref(keys))
        return count, keys.value

    def small(self, name: str, x: Tensor, seed: int = 0) -> tuple[Tensor, Counters]:
        """The output of the kernel of that name in small_kernels.cpp, and what was counted."""
        out = torch.zeros_like(x)
        arguments = name.encode(), x.data_ptr(), out.data_ptr(), seed
        types = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64
        typed = (to(value) for to, value in zip(types, arguments, strict=True))
        return out, self._call(self._library.emulate_small, *typed)

    def _call(self, function: Any, *arguments: Any) -> Counters:
        counters, error = Counters(), ctypes.create_string_buffer(_ERROR_BYTES)
        size = ctypes.c_size_t(_ERROR_BYTES)
        if function(*arguments, ctypes.byref(counters), error, size):
            raise EmulationError(self._with_places(error.value.decode()))
        return counters

    def _with_places(self, message: str) -> str:
        """Replaces addresses in the library by lines of the kernels' source."""
        return re.sub(r"\{(0x[0-9a-f]+)\}", lambda found: self._place(found[1]), message)

    @functools.lru_cache(maxsize=64)  # noqa: B019 (few, and as long-lived as the process)
    def _place(self, address: str) -> str:
        try:
            command = ["addr2line", "-i", "-e", str(self.path), address]
            lines = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
        except OSError:
            lines = []  # no binutils here
        for line in lines:  # from the innermost inlined function outwards
            found = re.search(
                r"(?:/cute_fa2/(?!.*variants/)|/(?=small_kernels))([\w/.]+:\d+)", line
            )
            if found:
                return found[1]
        return address
