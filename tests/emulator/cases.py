"""How the tests here call the emulated kernels and what they ask of every result."""

from __future__ import annotations

import math

from emulator import Counters, Emulator
from torch import Tensor

from flash_cute import tolerance


def check(
    emulator: Emulator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    smem_limit: int = 0,
    splits: int = 0,
    multiprocessors: int = 132,
    seed: int = 0,
    **band: int,
) -> tuple[Tensor, Tensor, Counters]:
    """Runs the kernel, which must break no rule of the emulated machine, and compares with the
    exact result as the GPU's is compared.
    """
    if is_causal:
        band = {"window_right": 0, "diagonal_offset": k.shape[2] - q.shape[2]}
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    out, lse, counters = emulator.forward(
        *(q, k, v, scale),
        smem_limit=smem_limit,
        splits=splits,
        multiprocessors=multiprocessors,
        seed=seed,
        **band,
    )
    result = tolerance.compare(out, lse, q, k, v, False, scale, **band)
    assert result.passed, str(result)
    return out, lse, counters
