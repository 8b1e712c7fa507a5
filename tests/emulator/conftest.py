"""The emulated kernels, built once a session where they can be."""

from __future__ import annotations

import build_emulator
import pytest
from emulator import Emulator


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    reason = build_emulator.why_not()
    if reason:
        pytest.skip(reason)
    return Emulator(build_emulator.build(build_emulator.Library())[0])
