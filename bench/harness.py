"""The clock: providers interleaved in one process, and rows that say what was measured.

`measure(case, providers, options)` returns one row (a plain dict) per provider. For every case the
providers take turns, `rounds` times over, in alternating order; before every timed call the L2
cache is flushed; what is reported is the median over all rounds. On the CPU the same code runs with
a wall clock, so that the harness itself can be tested without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from bench import check as checking
from bench.baselines import Call, Provider, bind_op
from bench.cases import Case, make_inputs
from bench.environment import sm_clock

Row = dict[str, Any]
Item = TypeVar("Item")

#: A provider that says so has not failed: it does not take the case, or not on this machine.
REFUSALS = ("No available kernel", "No viable backend", "out of memory")


@dataclass(frozen=True)
class Options:
    device: torch.device = field(default_factory=lambda: default_device())
    rounds: int = 5
    #: Timed calls per round; None: as many as fit into `budget_ms`.
    iters: int | None = None
    #: Time on the device for one provider in one round of one case.
    budget_ms: float = 20.0
    min_iters: int = 3
    max_iters: int = 100
    check: bool = False
    seed: int = 0


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Timer:
    """Times single calls in milliseconds, each after a flush of the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            # Larger than any L2; writing it takes long enough to hide the host time of a launch.
            size = max(256 << 20, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
            self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def __call__(self, call: Call, iters: int) -> list[float]:
        if self.device.type != "cuda":
            return [self._wall_clock(call) for _ in range(iters)]
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(iters)
        ]
        for start, stop in events:
            self._flush.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) for start, stop in events]

    @staticmethod
    def _wall_clock(call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


def wake_up(device: torch.device, seconds: float = 0.5) -> None:
    """Work until an idle GPU's clocks are up."""
    if device.type != "cuda":
        return
    x = torch.randn(4096, 4096, device=device, dtype=torch.float16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize(device)


def turn_order(items: Sequence[Item], turn: int) -> list[Item]:
    """Who comes after whom in a round. A chip at its power limit is slower behind a hot neighbour,
    so each second round goes backwards, and each pair of rounds begins with another."""
    first = turn // 2 % max(1, len(items))
    order = [*items[first:], *items[:first]]
    return order[::-1] if turn % 2 else order


def _reason(error: BaseException, caught: list[warnings.WarningMessage]) -> str:
    """SDPA explains itself in warnings and then raises "No available kernel": keep the former."""
    lines = [str(w.message).split("(Triggered")[0].strip() for w in caught]
    headings = ("kernel not used because", "runtime disabled")
    told = [line for line in lines if line and not any(text in line for text in headings)]
    text = str(error).strip().splitlines()
    return (told[0] if told else text[0] if text else type(error).__name__)[:200]


def _iterations(options: Options, estimate_ms: float) -> int:
    if options.iters is not None:
        return options.iters
    fitting = int(options.budget_ms / max(estimate_ms, 1e-3))
    return max(options.min_iters, min(options.max_iters, fitting))


@dataclass
class Runner:
    """A provider that has taken the case: its call, its row and the samples so far."""

    provider: Provider
    row: Row
    call: Call | None = None
    iters: int = 0
    samples: list[list[float]] = field(default_factory=list)


def prepare(
    provider: Provider,
    case: Case,
    tensors: Sequence[torch.Tensor],
    options: Options,
) -> Runner:
    """Bind, run once and look whether it works at all."""
    runner = Runner(provider, {**case.to_dict(), "provider": provider.name, "status": "ok"})
    reason = provider.why_not(case, options.device)
    if reason is not None:
        runner.row |= {"status": "skipped", "note": reason}
        return runner
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runner.call = bind_op(provider, case, tensors)
            with provider.pinned():
                runner.call()
            if options.device.type == "cuda":
                torch.cuda.synchronize(options.device)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            runner.call = None
            status = "skipped" if any(sign in str(error) for sign in REFUSALS) else "failed"
            runner.row |= {"status": status, "note": _reason(error, caught)}
    return runner


@torch.no_grad()
def measure(
    case: Case, providers: Sequence[Provider], options: Options, timer: Timer | None = None
) -> list[Row]:
    """One row per provider, in the order given; see `finish_row` for what is in it."""
    timer = timer or Timer(options.device)
    tensors = make_inputs(case, options.device, options.seed)
    runners = [prepare(provider, case, tensors, options) for provider in providers]
    working = [runner for runner in runners if runner.call is not None]

    if options.check and working:
        results = {}
        for runner in working:
            assert runner.call is not None
            with runner.provider.pinned():
                results[runner.provider.name] = runner.call()
        check = checking.check if case.op == "fwd" else checking.check_gradients
        errors = check(case, tensors, results)
        del results
        for runner in working:
            runner.row |= errors[runner.provider.name]

    for runner in working:
        assert runner.call is not None
        with runner.provider.pinned():
            runner.iters = _iterations(options, statistics.median(timer(runner.call, 3)))

    clock: int | None = None
    for turn in range(options.rounds):
        for runner in turn_order(working, turn):
            assert runner.call is not None
            with runner.provider.pinned():
                runner.samples.append(timer(runner.call, runner.iters))
        clock = sm_clock(options.device)

    for runner in working:
        finish_row(runner.row, case, runner.samples, runner.iters)
        runner.row["sm_mhz"] = clock
        if runner.provider.is_ours and not (case.documents or case.score):
            runner.row["tile"] = tile_of(case, runner.provider.tuning, options.device)
        if case.window >= 0:
            runner.row["copy_ms"] = copy_ms(case.bytes(), timer)
    rows = [runner.row for runner in runners]
    del runners, working, tensors
    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def tile_of(case: Case, tuning: str, device: torch.device) -> tuple[int, int]:
    """(queries, keys) of a block of scores of the kernel that a dense, plain call gets."""
    if device.type != "cuda":
        return 128, 128
    from flash_cute import ops, plan

    asked = argparse.Namespace(
        B=case.batch, H=case.heads, Hkv=case.kv_heads, Nq=case.q_len, Nk=case.kv_len,
        D=case.head_dim, Dv=case.columns_v, causal=case.causal and case.window < 0,
        window=(case.window, 0 if case.causal else -1), backward=case.op != "fwd",
        deterministic=False, dtype=case.dtype,
    )  # fmt: skip
    answer = ops.plan(plan.request(asked, plan.device_here()), tuning)
    return answer["block_m"], answer["block_n"]


def copy_ms(count: int, timer: Timer) -> float:
    """What a copy takes that moves as many bytes, half of them read and half written."""
    source = torch.empty(count // 2, dtype=torch.int8, device=timer.device)
    target = torch.empty_like(source)
    return statistics.median(timer(lambda: (target.copy_(source),), 20))


def finish_row(row: Row, case: Case, samples: list[list[float]], iters: int) -> None:
    """Milliseconds are medians over all rounds x iters; `round_ms` has each round's own median."""
    every = [sample for turn in samples for sample in turn]
    if not every:
        return
    ms = statistics.median(every)
    row |= {
        "ms": ms,
        "ms_min": min(every),
        "round_ms": [statistics.median(turn) for turn in samples],
        "iters": iters,
        "tflops": case.flops() / ms * 1e-9,
    }
    if case.q_len == 1 and case.op == "fwd":
        row["gbps"] = case.kv_bytes() / ms * 1e-6
