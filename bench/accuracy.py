"""Errors of gradients against the plain formula in fp64: the greatest, and the root of the mean
square. What may pass is not decided here; bench.check does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.baselines import Provider
from bench.cases import make_inputs, square
from bench.harness import Options, Row, prepare

CASES = (
    *(square(1, 1024, 4, head_dim, causal, op="bwd")
      for head_dim in (32, 64, 128, 256) for causal in (False, True)),
    square(1, 1000, 4, 96, causal=True, op="bwd"),
    square(2, 512, 8, 192, causal=False, op="bwd"),
    square(1, 2048, 8, 128, causal=True, kv_heads=2, op="bwd"),
    square(2, 2048, 8, 64, causal=False, kv_heads=1, op="bwd"),
)  # fmt: skip


@torch.no_grad()
def measure_accuracy(providers: Sequence[Provider], options: Options) -> list[Row]:
    """A row per case, gradient and provider."""
    from flash_cute import reference

    rows = []
    for case in CASES:
        q, k, v, dout = make_inputs(case, options.device, options.seed)
        exact = reference.attention_backward(dout, q, k, v, case.causal, case.scale)
        for provider in providers:
            runner = prepare(provider, case, (q, k, v, dout), options)
            results = exact if runner.call is None else runner.call()
            for gradient, actual, expected in zip(("dq", "dk", "dv"), results, exact, strict=True):
                row = {**runner.row, "kind": "accuracy", "name": f"{case.name}, {gradient}"}
                if runner.call is not None:
                    error = actual.double() - expected
                    row["max_error"] = error.abs().max().item()
                    row["rmse"] = error.square().mean().sqrt().item()
                rows.append(row)
    return rows
