"""Runs the kernels on the emulated machine, from torch tensors on the CPU."""

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

from flash_cute import reference, tolerance

_ERROR_BYTES = 4096


class EmulationError(AssertionError):
    """What a kernel did wrong: CTA, thread, address, and the places in the source."""


class BankCount(ctypes.Structure):
    """Wavefronts of accesses to shared memory without conflicts, and what conflicts add."""

    _fields_ = [("wavefronts", ctypes.c_int64), ("conflicts", ctypes.c_int64)]

    def __repr__(self) -> str:
        return f"{self.wavefronts} + {self.conflicts}"


class Counters(ctypes.Structure):
    """As in counters.h."""

    _fields_ = [
        ("load_matrix", BankCount),
        ("copy_async", BankCount),
        ("load", BankCount),
        ("store", BankCount),
        ("store_matrix", BankCount),
        ("global_reads_16", ctypes.c_int64),
        ("global_reads", ctypes.c_int64),
        ("global_writes_16", ctypes.c_int64),
        ("global_writes", ctypes.c_int64),
        ("global_reductions_16", ctypes.c_int64),
        ("global_reductions", ctypes.c_int64),
        ("cta_barriers", ctypes.c_int64),
        ("mma", ctypes.c_int64),
        ("tma_load_bytes", ctypes.c_int64),
        ("tma_store_bytes", ctypes.c_int64),
        ("tma_reduce_bytes", ctypes.c_int64),
        ("wgmma", ctypes.c_int64),
    ]

    def bank_conflicts(self) -> int:
        counts = (getattr(self, name) for name, _ in self._fields_)
        return sum(count.conflicts for count in counts if isinstance(count, BankCount))

    def __repr__(self) -> str:
        return ", ".join(f"{name} {getattr(self, name)}" for name, _ in self._fields_)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 3),
        ("element_bytes", ctypes.c_int64),
    ]


#: As DType (host/params.h) numbers them.
_DTYPES = torch.float16, torch.bfloat16, torch.float32
#: What tells the sequences of a call.
_SEQUENCES = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "key_start"


class _Call(ctypes.Structure):
    """As in call.h."""

    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "out", "lse")),
        *((name, _Tensor) for name in (*_SEQUENCES, "sink", "slopes", "bias")),
        ("softcap", ctypes.c_double),
        ("sequences", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("workers", ctypes.c_int32),
        ("softmax_scale", ctypes.c_double),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("diagonal_offset", ctypes.c_int64),
        ("tuning", ctypes.c_char_p),
        ("multiprocessors", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    ]


class _Forward(_Call):
    """As in forward.cpp."""

    _fields_ = [("refuses_tensor_maps", ctypes.c_int32)]


class _Backward(_Call):
    """As in backward.cpp."""

    _fields_ = [
        *((name, _Tensor) for name in ("dout", "dlse", "dq", "dk", "dv", "dsink", "dbias")),
        ("deterministic", ctypes.c_int32),
    ]


class _Product(ctypes.Structure):
    """As in small_products.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "d")),
        *((name, ctypes.c_int32) for name in ("size", "a_is_mn", "b_is_mn", "narrow", "depth")),
        *((name, ctypes.c_int32) for name in ("shift", "is_fenced", "overwritten", "row", "k")),
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
    sizes = (ctypes.c_int64 * 4)(*x.shape), (ctypes.c_int64 * 3)(*strides[:3])
    return _Tensor(x.data_ptr(), *sizes, x.element_size())


def _numbers(x: Tensor | None) -> _Tensor:
    """One dimension, which kernels read as it is."""
    return _Tensor() if x is None else _as_c(x[None, None, None])


#: Lengths and places of sequences, int32: the names of _SEQUENCES that are there.
Sequences = dict[str, Tensor]


#: Changes of scores, as of the op: softcap, alibi_slopes, bias.
Changes = dict[str, Any]


def _as_table(
    sequences: Sequences | None, sink: Tensor | None, changes: Changes | None
) -> tuple[Any, ...]:
    table = [_numbers((sequences or {}).get(name)) for name in _SEQUENCES]
    count = 0
    for name, x in (sequences or {}).items():
        count = len(x) - name.startswith("cu_")
    changes = changes or {}
    slopes, bias = changes.get("alibi_slopes"), changes.get("bias")
    if slopes is not None:
        slopes = slopes.view(1, 1, -1, slopes.shape[-1])
    of_scores = (_Tensor() if x is None else _as_c(x) for x in (slopes, bias))
    return *table, _numbers(sink), *of_scores, changes.get("softcap", 0.0), count


def _like(x: Tensor, rows: Tensor, head_dim: int | None = None) -> Tensor:
    """A result in the shape of `rows`, which was made of x; or with another head dim."""
    result = rows.new_full((*rows.shape[:3], head_dim or rows.shape[3]), math.nan)
    return result if x.is_contiguous() else poisoned(result)


def _poisoned_rows(x: Tensor) -> Tensor:
    """As `poisoned`, of a number for each row."""
    return poisoned(x[..., None])[..., 0]


def _split_band(is_causal: bool, options: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The window among the options, and the others."""
    names = "window_left", "window_right", "diagonal_offset"
    band = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    return {**band, "window_right": 0} if is_causal else band, others


class Emulator:
    """The kernels of a library (build_emulator.py). `arch` 0 leaves the choice to the plan;
    `defaults` are arguments of `forward` where a call names none."""

    def __init__(
        self, path: Path, arch: int = 0, *, workers: int | None = None, **defaults: int
    ) -> None:
        self.path = path
        self.arch = arch
        self.workers = workers or len(os.sched_getaffinity(0))  # CTAs that run side by side
        self.defaults = defaults
        self._library = ctypes.CDLL(str(path))
        self._library.describe_plan.restype = ctypes.c_char_p

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        *,
        window_left: int = -1,
        window_right: int = -1,
        diagonal_offset: int | None = None,
        refuses_tensor_maps: bool = False,
        sequences: Sequences | None = None,
        sink: Tensor | None = None,
        changes: Changes | None = None,
        seed: int = 0,
        **options: int,
    ) -> tuple[Tensor, Tensor, Counters]:
        """Output, LSE, and what was counted. `options` are `multiprocessors` of the device (132 by
        default), and the overrides that the op takes; threads take turns in an order that `seed`
        decides."""
        rows = [_readable_rows(x) for x in (q, k, v)]
        out = _like(q, rows[0], rows[2].shape[3])
        lse = torch.full((*q.shape[:3], 1), math.nan)
        band = window_left, window_right, diagonal_offset
        table = _as_table(sequences, sink, changes)
        shared = self._shared((*rows, out, lse), table, softmax_scale, band, seed, options)
        call = _Forward(*shared, refuses_tensor_maps)
        counters = self._call(self._library.emulate_forward, ctypes.byref(call))
        return out[..., : v.shape[3]], lse[..., 0], counters

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
        *,
        dlse: Tensor | None = None,
        window_left: int = -1,
        window_right: int = -1,
        diagonal_offset: int | None = None,
        deterministic: bool = False,
        sequences: Sequences | None = None,
        sink: Tensor | None = None,
        changes: Changes | None = None,
        seed: int = 0,
        **options: int,
    ) -> tuple[tuple[Tensor, ...], Counters]:
        """(dq, dk, dv, then dsink and dbias if there are sink and bias), and what was counted.
        `seed` decides in which order CTAs start too, so that sums come in another order; 0 leaves
        them in theirs."""
        rows = [_readable_rows(x) for x in (q, k, v, out, dout)]
        gradients = [_like(x, its_rows) for x, its_rows in zip((q, k, v), rows, strict=False)]
        band = window_left, window_right, diagonal_offset
        table = _as_table(sequences, sink, changes)
        shared = self._shared(
            (*rows[:4], lse[..., None]), table, softmax_scale, band, seed, options
        )
        c_dlse = _Tensor() if dlse is None else _as_c(dlse[..., None])
        dsink = None if sink is None else torch.full_like(sink, math.nan)
        bias = (changes or {}).get("bias")
        dbias = None if bias is None else torch.full_like(bias, math.nan)
        c_dbias = _Tensor() if dbias is None else _as_c(dbias)
        c_gradients = (*map(_as_c, gradients), _numbers(dsink), c_dbias)
        call = _Backward(*shared, _as_c(rows[4]), c_dlse, *c_gradients, deterministic)
        counters = self._call(self._library.emulate_backward, ctypes.byref(call))
        others = (x for x in (dsink, dbias) if x is not None)
        of_qkv = (dx[..., : x.shape[3]] for dx, x in zip(gradients, (q, k, v), strict=True))
        return (*of_qkv, *others), counters

    def check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        **options: int,
    ) -> tuple[Tensor, Tensor, Counters]:
        """Runs the kernel, which must break no rule of the emulated machine. Compares the result
        with the exact one, as tests on a GPU do."""
        band, options = _split_band(is_causal, options)
        scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
        out, lse, counters = self.forward(q, k, v, scale, **band, **options)
        result = tolerance.compare(out, lse, q, k, v, False, scale, **band)
        assert result.passed, str(result)
        return out, lse, counters

    def check_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        *,
        has_dlse: bool = False,
        **options: int,
    ) -> tuple[tuple[Tensor, ...], Counters]:
        """As `check`, of the gradients of random dout and, if asked for, dlse. The latter is NaN
        where a row sees no key."""
        band, options = _split_band(is_causal, options)
        scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
        generator = torch.Generator().manual_seed(1)
        out, lse = reference.attention(q, k, v, False, scale, **band)
        dout = torch.randn(out.shape, generator=generator).to(q.dtype)
        dlse = torch.randn(lse.shape, generator=generator) if has_dlse else None
        if dlse is not None:
            dlse = _poisoned_rows(dlse.masked_fill(lse == -math.inf, math.nan))
        given = poisoned(dout), q, k, v, poisoned(out.to(q.dtype)), _poisoned_rows(lse.float())
        gradients, counters = self.backward(*given, scale, dlse=dlse, **band, **options)
        result = tolerance.compare_gradients(
            gradients, dout, q, k, v, False, scale, dlse=dlse, **band
        )
        assert result.passed, str(result)
        return gradients, counters

    def _shared(
        self,
        tensors: tuple[Tensor, ...],
        table: tuple[Any, ...],
        softmax_scale: float,
        band: tuple[int, int, int | None],
        seed: int,
        options: dict[str, int],
    ) -> tuple[Any, ...]:
        """The fields of `_Call`."""
        q, k = tensors[:2]
        options = {"multiprocessors": 132, **self.defaults, **options}
        multiprocessors = options.pop("multiprocessors")
        overrides = {"arch": self.arch, **options}
        return (
            *map(_as_c, tensors),
            *table,
            _DTYPES.index(q.dtype),
            self.workers,
            softmax_scale,
            *band[:2],
            k.shape[2] - q.shape[2] if band[2] is None else band[2],
            ",".join(f"{name}={value}" for name, value in overrides.items()).encode(),
            multiprocessors,
            seed,
        )

    def plant(self, fault: int) -> None:
        """Switches on a fault of a library that has some (planting.py); 0: none."""
        self._library.plant(fault)

    def plan(self, **request: int) -> dict[str, Any]:
        """The plan of a call of these sizes, as the op `plan` describes it."""
        request = {**self.defaults, **request}
        tuning = {n: request.pop(n) for n in ("smem_limit", "splits") if n in request}
        texts = (
            ",".join(f"{name}={value}" for name, value in numbers.items()).encode()
            for numbers in (request, {"arch": self.arch, **tuning})
        )
        plan: dict[str, Any] = json.loads(self._library.describe_plan(*texts))
        return plan

    def schedule(self, block_m: int, **request: int) -> Tensor:
        """What CTAs work on: rows of (CTA, first row, end of the rows, head, batch)."""
        names = "batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim"
        request = {"window_left": -1, "window_right": -1, **request}
        numbers = [request[name] for name in (*names, "window_left", "window_right")]
        device = request["multiprocessors"], request["l2_bytes"]
        tiles = math.ceil(request["len_q"] / block_m) * request["heads_q"] * request["batch"]
        # Room for subtiles, and to be wrong.
        scheduled = torch.full((8 * tiles, 5), -1, dtype=torch.int32)
        pointer = ctypes.c_void_p(scheduled.data_ptr())
        count = self._library.schedule(self.arch, *numbers, block_m, *device, pointer)
        return scheduled[:count]

    def small(self, program: str, x: Tensor, seed: int = 0) -> tuple[Tensor, Counters]:
        """The output of a program of small_kernels.cpp, and what was counted."""
        out = torch.zeros_like(x)
        data = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        arguments = program.encode(), len(x), *data, ctypes.c_uint64(seed)
        return out, self._call(self._library.emulate_small, *arguments)

    def product(
        self,
        a: Tensor,
        b: Tensor,
        a_is_mn: bool = False,
        b_is_mn: bool = False,
        *,
        seed: int = 0,
        **options: int,
    ) -> tuple[Tensor, Counters]:
        """A B^T by wgmma (small_products.cpp), of (64 or 128, 64), and what was counted."""
        d = torch.full((len(a), len(b)), math.nan)
        defaults = {"depth": a.shape[1], "is_fenced": 1, "overwritten": -1}
        product = _Product(
            *(x.data_ptr() for x in (a, b, d)),
            size=len(a) // 128,
            a_is_mn=a_is_mn,
            b_is_mn=b_is_mn,
            **{**defaults, **options},
        )
        arguments = ctypes.byref(product), ctypes.c_uint64(seed)
        return d, self._call(self._library.emulate_product, *arguments)

    def _call(self, function: Any, *arguments: Any) -> Counters:
        counters, error = Counters(), ctypes.create_string_buffer(_ERROR_BYTES)
        size = ctypes.c_size_t(_ERROR_BYTES)
        if function(*arguments, ctypes.byref(counters), error, size):
            raise EmulationError(self._with_places(error.value.decode()))
        return counters

    def _with_places(self, message: str) -> str:
        """Replaces addresses in the library by lines of the kernels' source."""
        return re.sub(r"\{(0x[0-9a-f]+)\}", lambda found: _place(self.path, found[1]), message)


@functools.cache
def _place(library: Path, address: str) -> str:
    try:
        command = ["addr2line", "-i", "-e", str(library), address]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
    except OSError:
        lines = []  # no binutils here
    for line in lines:  # from the innermost inlined function outwards
        found = re.search(r"(?:/cute_fa2/(?!.*variants/)|/(?=small_))([\w/.]+:\d+)", line)
        if found:
            return found[1]
    return address
