"""The emulated kernels, built once a session where they can be."""

from __future__ import annotations

import build_emulator
import pytest
import torch
from emulator import Emulator


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    skip_unless_possible()
    return Emulator(build_emulator.build(build_emulator.SM80)[0])


@pytest.fixture(scope="session")
def hopper() -> dict[torch.dtype, Emulator]:
    """The SM90 kernels: of bf16 all, of fp16 those of head dim 64 alone."""
    skip_unless_possible()
    paths = build_emulator.build(*build_emulator.SM90.values())
    emulators = (Emulator(path, arch=90) for path in paths)
    return dict(zip((torch.bfloat16, torch.float16), emulators, strict=True))


def skip_unless_possible() -> None:
    reason = build_emulator.why_not()
    if reason:
        pytest.skip(reason)
