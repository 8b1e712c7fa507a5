"""The emulated kernels, built once a session where they can be."""

from __future__ import annotations

from pathlib import Path

import build_emulator
import pytest
from emulator import Emulator

#: sm90 has few multiprocessors: each CTA takes several tiles, and its stages are used again.
KERNELS = {
    "sm80": {"arch": 80, "splits": 1},
    "sm90": {"arch": 90, "splits": 1, "multiprocessors": 2},
    "sm80-split": {"arch": 80, "splits": 3},
    "sm90-split": {"arch": 90, "splits": 3, "multiprocessors": 5},
}


@pytest.fixture(scope="session")
def library() -> Path:
    reason = build_emulator.why_not()
    if reason:
        pytest.skip(reason)
    return build_emulator.build(build_emulator.TESTED)


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, library: Path) -> Emulator:
    """The kernels of both architectures, for whole keys and for split-KV."""
    return Emulator(library, **KERNELS[request.param])


@pytest.fixture(params=["sm80", "sm90"])
def unsplit(request: pytest.FixtureRequest, library: Path) -> Emulator:
    """Those of both architectures for whole keys."""
    return Emulator(library, **KERNELS[request.param])


@pytest.fixture
def sm80(library: Path) -> Emulator:
    return Emulator(library, **KERNELS["sm80"])


@pytest.fixture
def sm90(library: Path) -> Emulator:
    return Emulator(library, **KERNELS["sm90"])
