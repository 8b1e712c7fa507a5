"""Host time of a call: how long Python and the launch take when the kernel itself takes nothing.

Many calls in a row without a synchronisation; the queue of the GPU is empty at the start and holds
all of them, so the host never waits. Reported is the median of the rounds, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from bench.baselines import Call, Provider
from bench.cases import Case, make_inputs
from bench.harness import Options, Row, prepare, turn_order

#: Below the number of launches that the GPU's queue holds (about 1024), also if a call needs two.
CALLS = 400
CASES = (
    Case(1, 8, 8, 1, 1, 64, causal=False),
    Case(1, 8, 8, 1, 128, 64, causal=False),
    Case(1, 32, 8, 1, 128, 128, causal=False),
)


def _round(call: Call, device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return elapsed / calls * 1e6


def measure_host_time(
    providers: Sequence[Provider], options: Options, rounds: int = 15, calls: int = CALLS
) -> list[Row]:
    """A row per case, grad mode and provider. No input requires grad in either mode."""
    rows = []
    for case in CASES:
        for grad_mode in (False, True):
            with torch.set_grad_enabled(grad_mode):
                tensors = make_inputs(case, options.device, options.seed)
                runners = [prepare(p, case, tensors, options) for p in providers]
                working = [runner for runner in runners if runner.call is not None]
                for turn in range(rounds + 1):
                    for runner in turn_order(working, turn):
                        assert runner.call is not None
                        with runner.provider.pinned():
                            us = _round(runner.call, options.device, calls)
                        if turn > 0:  # the first round warms up
                            runner.samples.append([us])
                for runner in runners:
                    runner.row |= {"kind": "host_time", "grad_mode": grad_mode}
                    if runner.samples:
                        samples = [turn[0] for turn in runner.samples]
                        runner.row["host_us"] = statistics.median(samples)
                        runner.row["host_us_min"] = min(samples)
                    rows.append(runner.row)
    return rows
