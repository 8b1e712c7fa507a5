"""The kernels in PTX, as the library has it or as nvcc compiles it for the library, and the machine
that runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support import cuobjdump

import build_library
from flash_cute import ops
from toolchain import BuildError

sys.path.append(str(Path(__file__).resolve().parent.parent / "emulator"))

import build_emulator

if TYPE_CHECKING:
    from ptx_emulator import PtxEmulator  # needs numpy

#: Whose launches are ours.
LIBRARIES = {
    "sm80": dict.fromkeys(build_emulator.SM90, build_emulator.SM80),
    "sm90": build_emulator.SM90,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="session")
def sm80() -> dict[torch.dtype, PtxEmulator]:
    return emulators("sm80")


@pytest.fixture(scope="session")
def sm90() -> dict[torch.dtype, PtxEmulator]:
    return emulators("sm90")


def emulators(arch: str) -> dict[torch.dtype, PtxEmulator]:
    from ptx_emulator import PtxEmulator

    if reason := build_emulator.why_not():
        pytest.skip(reason)
    built = ops.build_info()
    wanted = {"sm80": "compute_80", "sm90": build_library.variants.SM90_CODE}[arch]
    if (
        set(built["head_dims"]) != set(build_library.variants.ALL_HEAD_DIMS)
        or wanted not in built["archs"]
    ):
        pytest.skip(f"the library was built without some of the kernels of {arch}")
    build_emulator.build(*dict.fromkeys(LIBRARIES[arch].values()))
    return {
        DTYPES[name]: PtxEmulator(
            build_library.ROOT / library.path,
            library.arch,
            # What combines parts of the keys is among those of sm80.
            [*shipped(), *(compiled(name, library.head_dims) if arch == "sm90" else [])],
        )
        for name, library in LIBRARIES[arch].items()
    }


def shipped() -> list[str]:
    """What the library has for chips to come: the SM80 kernels."""
    return [cuobjdump("-ptx")]


def compiled(dtype: str, head_dims: Sequence[int]) -> list[str]:
    """The SM90 kernels, of which the library has machine code alone."""
    targets = [
        f"{build_library.BUILD}/fwd_sm90_hdim{head_dim}_{dtype}_{kind}.ptx"
        for head_dim in head_dims
        for kind in build_library.variants.SM90_KINDS
    ]
    try:
        build_library.find_tools()
    except BuildError as error:
        pytest.skip(str(error))
    with build_library.one_build():
        ninja_file, _ = build_library.write_ninja()
        rules = Path(build_library.ROOT, ninja_file).read_text()
        if not all(f"build {target}:" in rules for target in targets):
            pytest.skip("FLASH_CUTE_HEAD_DIMS or FLASH_CUTE_ARCHS leaves out some of these kernels")
        build_library.build(ninja_file, *targets)
        return [Path(build_library.ROOT, target).read_text() for target in targets]
