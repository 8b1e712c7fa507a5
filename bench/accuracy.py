"""Errors of results against the plain formula in fp64: the greatest, and the root of the mean
square. What may pass is not decided here; bench.check does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.baselines import Provider
from bench.cases import Case, make_inputs, square
from bench.harness import Options, Row, prepare

#: Each with a factor of its queries.
CASES: list[tuple[Case, float]] = [
    (case, 1.0)
    for case in (
        *(square(1, 1024, 4, head_dim, causal, op="bwd")
          for head_dim in (32, 64, 128, 256) for causal in (False, True)),
        square(1, 1000, 4, 96, causal=True, op="bwd"),
        square(2, 512, 8, 192, causal=False, op="bwd"),
        square(1, 2048, 8, 128, causal=True, kv_heads=2, op="bwd"),
        square(2, 2048, 8, 64, causal=False, kv_heads=1, op="bwd"),
    )
]  # fmt: skip
#: In fp32: many keys, and sharp scores.
FP32_CASES: list[tuple[Case, float]] = [
    (square(1, 16384, 1, head_dim, causal=False, dtype="fp32", op=op), factor)
    for op in ("fwd", "bwd")
    for head_dim in (64, 128)
    for factor in (1.0, 6.0)
]


@torch.no_grad()
def measure_accuracy(
    providers: Sequence[Provider], options: Options, cases: Sequence[tuple[Case, float]] = CASES
) -> list[Row]:
    """A row per case, result (out; or dq, dk and dv) and provider."""
    from flash_cute import reference

    rows = []
    for case, factor in cases:
        q, k, v, *dout = make_inputs(case, options.device, options.seed)
        q *= factor
        masked = case.causal, case.scale
        names: tuple[str, ...] = ("out",)
        if dout:
            names = ("dq", "dk", "dv")
            exact = reference.attention_backward(*dout, q, k, v, *masked)[:3]
        else:
            exact = reference.attention(q, k, v, *masked)[:1]
        of_factor = f" x{factor:g}" if factor != 1 else ""
        for provider in providers:
            runner = prepare(provider, case, (q, k, v, *dout), options)
            with provider.pinned():
                results = exact if runner.call is None else runner.call()
            for name, actual, expected in zip(names, results, exact, strict=False):
                row = {**runner.row, "kind": "accuracy", "name": f"{case.name}{of_factor}, {name}"}
                if runner.call is not None:
                    error = actual.double() - expected
                    row["max_error"] = error.abs().max().item()
                    row["rmse"] = error.square().mean().sqrt().item()
                rows.append(row)
            del runner, results
        del exact
    return rows
