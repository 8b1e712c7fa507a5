"""The emulated machine and its cases are worth their time: planted faults do not pass."""

from __future__ import annotations

import re
from pathlib import Path

import build_emulator
import planting
import pytest
from build_emulator import ROOT, SOURCES
from faults import FAULTS


@pytest.fixture(scope="module")
def planted() -> Path:
    reason = build_emulator.why_not()
    if reason:
        pytest.skip(reason)
    return build_emulator.build(planting.plant())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_is_caught(planted, fault):
    assert re.search(fault.caught_by, planting.what_catches(planted, fault))


def test_nothing_is_caught_where_no_fault_is(planted):
    assert planting.what_catches(planted, None) == ""


def test_each_fault_has_one_marker():
    files = [f for f in (ROOT / SOURCES).rglob("*") if f.suffix in (".h", ".cpp", ".cu")]
    markers = [found[3] for file in files for found in planting.MARKED.finditer(file.read_text())]
    mentions = sum(file.read_text().count("fault:") for file in files)
    assert sorted(markers) == sorted(fault.name for fault in FAULTS)
    assert mentions == len(markers) <= 25
