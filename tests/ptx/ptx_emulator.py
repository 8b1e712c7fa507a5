"""The forward, launched by the project's own code, on the machine that runs PTX."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from emulator import Counters, EmulationError, Emulator
from ptx_instructions import compile_kernel
from ptx_machine import Fault, Grid, Program
from ptx_text import parse


class PtxEmulator(Emulator):
    """The launches of an emulated library (tests/emulator), with kernels out of PTX."""

    def __init__(self, path: Path, arch: int, ptx: Iterable[str]) -> None:
        super().__init__(path, arch=arch)
        self.ptx = list(ptx)
        runner = ctypes.CFUNCTYPE(
            ctypes.c_bool, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int,
            ctypes.c_void_p, ctypes.c_int,
        )  # fmt: skip
        self._runner, self._no_runner = runner(self._run), runner()
        self._memory = _GlobalMemory(self._library)
        self._error: BaseException | None = None
        self._seed = 0
        self._programs: dict[str, Program] = {}

    def _call(self, function: Any, *arguments: Any) -> Counters:
        self._error = None
        self._seed = arguments[0]._obj.seed
        self._library.set_runner(self._runner)
        try:
            return super()._call(function, *arguments)
        except EmulationError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._library.set_runner(self._no_runner)

    def _run(
        self, name: bytes, blocks: int, threads: int, shared: int, params: int, param_bytes: int
    ) -> bool:
        try:
            program = self._program(name.decode())
            if (threads, param_bytes) != (program.threads, program.param_bytes):
                raise Fault(f"launched with {threads} threads, {param_bytes} bytes of parameters")
            data = np.frombuffer(ctypes.string_at(params, param_bytes), np.uint8)
            Grid(program, shared, data, self._memory, self._seed).run(blocks)
        except BaseException as error:  # which cannot pass through C++
            self._error = error
        return self._error is None

    def _program(self, type_name: str) -> Program:
        """The kernel `flash_cute_kernel<Kernel>`, by the mangled name of the type Kernel."""
        if type_name in self._programs:
            return self._programs[type_name]
        # Such as 4sm809FwdKernel and 13CombineKernel, with their template arguments.
        found = re.search(r"(4sm\d\d)?\d+[A-Z]\w+Kernel.*", _unnumbered(type_name))
        assert found, type_name
        wanted = found[0].rstrip("E")

        def is_wanted(name: str) -> bool:
            return wanted in _unnumbered(name)

        kernels = [kernel for text in self.ptx for kernel in parse(text, is_wanted)]
        if len(kernels) != 1:
            raise LookupError(f"{len(kernels)} kernels of the type {type_name}")
        self._programs[type_name] = compile_kernel(kernels[0])
        return self._programs[type_name]


def _unnumbered(mangled: str) -> str:
    """Without the numbers of what a name repeats, which depend on what stands ahead; and without
    `false`, which g++ leaves out at the end of a struct and nvcc does not."""
    return re.sub(r"Lb0E", "", re.sub(r"S\d*_", "S_", mangled))


class _GlobalMemory:
    """The session's tensors in an emulated library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._check_read, self._check_write = library.check_global_read, library.check_global_write
        for check, more in ((self._check_read, (ctypes.c_int,)), (self._check_write, ())):
            check.argtypes = (ctypes.c_void_p, ctypes.c_int, *more)
            check.restype = ctypes.c_char_p

    def read(self, address: int, size: int, alignment: int) -> np.ndarray:
        wrong = self._check_read(address, size, alignment)
        if wrong:
            raise Fault(f"reads {size} bytes at {address:#x}, {wrong.decode()}")
        return np.frombuffer(ctypes.string_at(address, size), np.uint8)

    def write(self, address: int, data: np.ndarray) -> None:
        wrong = self._check_write(address, data.size)
        if wrong:
            raise Fault(f"writes {data.size} bytes at {address:#x}, {wrong.decode()}")
        ctypes.memmove(address, data.tobytes(), data.size)
