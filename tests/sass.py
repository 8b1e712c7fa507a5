"""The machine code of the built library, kernel by kernel, as nvdisasm prints it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flash_cute import ops

#: The members of the configurations in csrc/cute_fa2/tiles, of sm80's backward the first warp grid
#: alone. The numbers in a kernel's mangled name have the same order.
CONFIG = {
    ("sm80", "fwd"): (
        *("head_dim", "head_dim_v", "block_m", "block_n"),
        *("row_warps", "pipelined_qk", "column_warps", "q_in_registers"),
        *("chunk_stages", "k_columns", "v_keys", "v_columns"),
    ),
    ("sm80", "bwd"): ("head_dim", "head_dim_v", "block_m", "block_n", "stages", "warps"),
    # The backward above head dim 256, and in fp32.
    ("sm80", "large"): ("columns", "stages", "block_m", "chunk_columns", "chunk_rows"),
    ("sm90", "fwd"): (
        *("head_dim", "head_dim_v", "consumers", "block_n"),
        *("stages", "q_stages", "ping_pong", "column_groups"),
    ),
    ("sm90", "bwd"): ("head_dim", "head_dim_v", "consumers", "stages"),
    ("sm90", "dq"): ("head_dim", "head_dim_v", "consumers", "block_n", "k_stages", "v_stages"),
    ("sm90", "window"): ("head_dim",),
}
CONFIG["sm80", "fwd_fp32"] = CONFIG["sm80", "fwd"]
CONFIG["sm80", "bwd_fp32"] = CONFIG["sm80", "bwd"]
CONFIG["sm80", "large_fp32"] = CONFIG["sm80", "large"]
#: The op of a kernel's configuration. Behind that of sm90: whether the kernel is for split-KV. In
#: the end the kind of mask.
MANGLED = re.compile(
    r"sm[89]0\d+(?:Fwd|LargeFwd|Bwd|Dkv|Dq|Window|LargeBwd)Kernel\S*?"
    r"(Fwd|Large|Bwd|Dq|Window)(?:Bwd)?ConfigSm[89]0E"
    r"((?:L[ib]\d+E)+)(?:tlNS_8WarpGridELi(\d)ELi(\d)EE)?(?:EELb(1)E)?"
    r"\S*?(?:MaskKind|Gradient)E(\d)"
)
#: As MaskKind numbers them.
MASKS = ("full", "banded", "packed", "scored")
#: An instruction, without its predicate.
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(.*?)\s*;", re.MULTILINE)


def run(program: str, *arguments: str | Path, folder: str | None = None) -> str:
    """What cuobjdump or nvdisasm prints; skips the test where there is none."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin")
    path = os.pathsep.join([str(packaged), os.environ["PATH"], "/usr/local/cuda/bin"])
    found = shutil.which(program, path=path)
    if not found:
        pytest.skip(f"needs {program}: the PyPI package nvidia-cuda-{program}")
    command = [found, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@functools.cache
def cuobjdump(*arguments: str) -> str:
    """What cuobjdump says of the library."""
    return run("cuobjdump", *arguments, ops.LIBRARY)


def functions(cubin: Path) -> list[tuple[str, str]]:
    """Each function's name, and its instructions, one a line."""
    pieces = re.split(r"^\.text\.(\S+):$", run("nvdisasm", "-raw", "-c", "-ndf", cubin), flags=re.M)
    return [
        (name, "\n".join(INSTRUCTION.findall(text)))
        for name, text in zip(pieces[1::2], pieces[2::2], strict=True)
    ]


@functools.cache
def functions_by_code() -> dict[str, list[tuple[str, str]]]:
    """Those of the library for each chip ("sm_80"). All cores disassemble: it takes long."""
    found: dict[str, list[tuple[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        run("cuobjdump", "-xelf", "all", ops.LIBRARY, folder=folder)
        cubins = sorted(Path(folder).glob("*.cubin"))
        for cubin, its_functions in zip(cubins, pool.map(functions, cubins), strict=True):
            found.setdefault(cubin.suffixes[-2][1:], []).extend(its_functions)
    return found


@dataclass(frozen=True)
class Kernel:
    """A kernel with a tile, on one chip."""

    name: str
    arch: str
    config: dict[str, int]
    is_split_kv: bool
    mask: str
    text: str
    op: str = "fwd"

    @property
    def tile(self) -> tuple[int, ...]:
        return _tile(self.arch, self.op, self.config)

    @functools.cached_property
    def opcodes(self) -> Counter[str]:
        """How often each instruction stands in it, without modifiers."""
        return Counter(re.findall(r"^\w+", self.text, re.MULTILINE))

    @functools.cached_property
    def names(self) -> str:
        """Those instructions, with modifiers, once each."""
        return "\n".join(set(re.findall(r"^\S+", self.text, re.MULTILINE)))

    def __repr__(self) -> str:
        return self.name


def op_of(entry: dict[str, Any]) -> str:
    """Of an entry of the tile table: its op, but "large" of the backward above head dim 256, and
    "large_fp32" of such kernels of fp32."""
    op = str(entry["op"])
    return op.replace("bwd", "large") if "columns" in entry else op


def tile_of(entry: dict[str, Any]) -> tuple[int, ...]:
    """Of an entry of the tile table what `Kernel.tile` has of a kernel."""
    arch, op = entry["arch"], op_of(entry)
    if op.startswith("fwd") and arch == "sm80":
        row_warps = entry["warps"] // entry["column_warps"]
        is_chunked = entry["k_columns"] > 0
        entry = {**entry, "row_warps": row_warps, "chunk_stages": is_chunked * entry["stages"]}
        entry["pipelined_qk"] = 0 if is_chunked else entry["stages"] - 1
    consumers = entry["block_m"] // 64 if op == "fwd" else entry["warps"] // 4 - 1
    return _tile(arch, op, {**entry, "consumers": consumers})


def _tile(arch: str, op: str, config: dict[str, Any]) -> tuple[int, ...]:
    return tuple(config[key] for key in CONFIG[arch, op])


@functools.cache
def kernels(code: str, op: str = "fwd") -> list[Kernel]:
    """An op's kernels in the machine code for a chip ("sm_80"), those with a tile."""
    arch = "sm90" if code == "sm_90a" else "sm80"
    found = []
    for name, text in functions_by_code()[code]:
        mangled = MANGLED.search(name)
        fp32 = "_fp32" if "Fp32FwdTraits" in name or "DTypeE2E" in name else ""
        if mangled and mangled[1].lower() + fp32 == op:
            numbers = [int(number) for number in re.findall(r"L[ib](\d+)E", mangled[2])]
            if mangled[3]:
                numbers.append(int(mangled[3]) * int(mangled[4]))
            config = dict(zip(CONFIG[arch, op], numbers, strict=True))
            is_split_kv = op == "fwd" and mangled[5] is not None  # else: it reads a bias
            mask = "any" if op.startswith("large") else MASKS[int(mangled[6])]
            found.append(Kernel(name, arch, config, is_split_kv, mask, text, op))
    return found


def usage(*arguments: str) -> dict[str, dict[str, int]]:
    """Of each function REG, STACK, LOCAL and so on."""
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d\])?:(\d+)", line)}
        for name, line in re.findall(r"Function (\S+):\n(.*)", cuobjdump("-res-usage", *arguments))
    }
