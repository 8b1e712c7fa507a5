"""The emulated suite is worth its time: faults planted in the kernels do not pass it."""

from __future__ import annotations

import re
from pathlib import Path

import build_emulator
import pytest
import torch
from faults_sm90 import SM90_VARIANTS
from plant_faults import FAULTS, what_catches


@pytest.fixture(scope="module")
def planted() -> dict[str, Path]:
    reason = build_emulator.why_not()
    if reason:
        pytest.skip(reason)
    planted = [*FAULTS, *SM90_VARIANTS]
    paths = build_emulator.build(*(fault.plant() for fault in planted))
    return {fault.name: path for fault, path in zip(planted, paths, strict=True)}


@pytest.mark.parametrize("fault", [*FAULTS, *SM90_VARIANTS], ids=lambda fault: fault.name)
def test_is_caught(planted, fault):
    objection = what_catches(fault.emulator(planted[fault.name]), fault.head_dim)
    assert re.search(fault.caught_by, objection)


def test_nothing_is_caught_where_no_fault_is(emulator, hopper):
    assert [what_catches(emulator, head_dim) for head_dim in (64, 96)] == ["", ""]
    assert [what_catches(hopper[torch.bfloat16], head_dim) for head_dim in (64, 128)] == ["", ""]
