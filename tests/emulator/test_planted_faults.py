"""The emulated machine and its cases are worth their time: planted faults do not pass."""

from __future__ import annotations

import re

import faults
import planting
import pytest
from faults import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_is_caught(library, fault):
    assert re.search(fault.caught_by, planting.what_catches(library, fault))


def test_nothing_is_caught_where_no_fault_is(library):
    assert planting.what_catches(library, None) == ""


def test_each_fault_has_one_marker():
    texts = [file.read_text() for file in faults.sources()]
    markers = [found[3] for text in texts for found in faults.MARKED.finditer(text)]
    mentions = sum(text.count("fault:") for text in texts)
    assert sorted(markers) == sorted(fault.name for fault in FAULTS)
    assert mentions == len(markers) <= 59
