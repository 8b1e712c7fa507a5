"""flash_cute/ladder.py: each rung is the one before it. examples/ladder.py runs."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import random_inputs
from torch import Tensor

from flash_cute import ladder, reference

LENGTHS = [(1, 1), (40, 40), (20, 75), (75, 20), (33, 64), (5, 0), (0, 5)]  # (Nq, Nk)
BLOCKS = [{}, {"block_m": 16, "block_n": 7}, {"block_m": 100, "block_n": 1}]


def climb(rung: Any, *inputs: Tensor, is_causal: bool, blocks: dict[str, int]) -> Any:
    known = inspect.signature(rung).parameters
    sizes = {name: size for name, size in blocks.items() if name in known}
    return rung(*inputs, is_causal, **sizes)


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("len_q, len_k", LENGTHS)
def test_each_rung_is_the_next(len_q, len_k, is_causal, blocks):
    inputs = random_inputs(2, 3, len_q, 16, len_k=len_k, dtype=torch.float64)
    results = [climb(rung, *inputs, is_causal=is_causal, blocks=blocks) for rung in ladder.RUNGS]
    for below, above in pairwise([reference.attention(*inputs, is_causal), *results]):
        torch.testing.assert_close(above, below, rtol=0, atol=1e-13)
    out, lse = results[0]
    no_key = torch.arange(len_q) < (len_q - len_k if is_causal else len_q * (len_k == 0))
    assert torch.all(out[:, :, no_key] == 0) and torch.all(lse[:, :, no_key] == -math.inf)
    assert torch.all(lse[:, :, ~no_key].isfinite())


def test_only_the_naive_rung_overflows():
    q, k, v = random_inputs(len_q=70, head_dim=16)
    exact, _ = reference.attention(30 * q, 30 * k, v)
    outs = [rung(30 * q, 30 * k, v)[0].double() for rung in ladder.RUNGS]
    assert not outs[0].isfinite().all()
    for out in outs[1:]:
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-2)


def test_the_walk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from examples import ladder as walk

    assert list(walk.PLACES) == list(ladder.RUNGS)
    png = tmp_path / "deep" / "ladder.png"
    assert walk.main(["--length", "64", "--longest", "1024", "--out", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "sm80/fwd/mainloop.h:" in printed and "arXiv:2307.08691" in printed
    rows = [line.split() for line in printed.splitlines()]
    passes = [row[1] for row in rows if len(row) == 4 and hasattr(ladder, row[0])]
    assert passes == ["1", "3", "2", "1", "1", "1", "1"]
    naive, ours = zip(*([float(x) for x in row[1:]] for row in rows[-4:-1]), strict=True)
    assert naive[-1] > 3.9 * naive[-2] and ours[-1] < 2.2 * ours[-2]
