"""The emulated kernels, built once a session where they can be."""

from __future__ import annotations

import build_emulator
import pytest
import torch
from emulator import Emulator


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    skip_unless_possible()
    return Emulator(build_emulator.build(build_emulator.Library())[0])


@pytest.fixture(scope="session")
def hopper() -> dict[torch.dtype, Emulator]:
    """The SM90 kernels: of bf16 all, of fp16 those of head dim 64 alone."""
    skip_unless_possible()
    libraries = [
        build_emulator.Library("sm90_bf16", 90, dtypes=("bf16",)),
        build_emulator.Library("sm90_fp16", 90, dtypes=("fp16",), head_dims=(64,)),
    ]
    emulators = (Emulator(path, arch=90) for path in build_emulator.build(*libraries))
    return dict(zip((torch.bfloat16, torch.float16), emulators, strict=True))


def skip_unless_possible() -> None:
    reason = build_emulator.why_not()
    if reason:
        pytest.skip(reason)
