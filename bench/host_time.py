"""Host time of a call: how long Python and the launch take when the kernel itself takes nothing.

Many calls in a row without a synchronisation; the queue of the GPU is empty at the start and holds
all of them, so the host never waits. Reported is the median of the rounds, in microseconds.

`measure_doors` times the functions behind which flash_cute can stand: with our kernels there, and
with PyTorch's own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import environment
from bench.baselines import Bind, Call, Provider, ends_of
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
    environment.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    environment.synchronize(device)
    return elapsed / calls * 1e6


def _measure(
    case: Case, providers: Sequence[Provider], options: Options, rounds: int, calls: int
) -> list[Row]:
    """A row per provider, with its host time if it takes the case."""
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
    for runner in working:
        samples = [turn[0] for turn in runner.samples]
        runner.row |= {"host_us": statistics.median(samples), "host_us_min": min(samples)}
    return [runner.row for runner in runners]


def measure_host_time(
    providers: Sequence[Provider], options: Options, rounds: int = 15, calls: int = CALLS
) -> list[Row]:
    """A row per case, grad mode and provider. No input requires grad in either mode."""
    rows = []
    for case in CASES:
        for grad_mode in (False, True):
            with torch.set_grad_enabled(grad_mode):
                found = _measure(case, providers, options, rounds, calls)
            rows += [row | {"kind": "host_time", "grad_mode": grad_mode} for row in found]
    return rows


# -- doors ---------------------------------------------------------------------------------------

#: Few enough of a forward with its backward for the GPU's queue.
DOOR_CALLS = 100
DENSE = Case(1, 8, 8, 128, 128, 64, causal=True)
ROWS_FIRST = Case(1, 8, 8, 128, 128, 64, causal=True, documents=(128,))


def _bind_sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
    function = torch.nn.functional.scaled_dot_product_attention
    return lambda: (function(q, k, v, is_causal=True),)


def _bind_op(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
    op, lengths = torch.ops.aten._flash_attention_forward, (case.q_len, case.kv_len)
    if case.documents:
        ends = ends_of(case, q.device)
        return lambda: op(q, k, v, *ends, *lengths, 0.0, True, False)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: (op(q, k, v, None, None, *lengths, 0.0, True, False)[0].transpose(1, 2),)


def _bind_varlen(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    window: dict[str, Any] = {"window_size": (-1, 0)}
    if "window_size" not in varlen_attn.__code__.co_varnames:  # torch 2.10
        window = {"is_causal": True}
    ends = ends_of(case, q.device)
    return lambda: (varlen_attn(q, k, v, *ends, case.q_len, case.kv_len, **window),)


def _bind_transformers(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """As a layer of a causal model calls it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from flash_cute.hooks import hf

    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]
    options = {
        "scaling": case.scale, "dropout": 0.0,
        "position_ids": torch.arange(case.q_len, device=q.device)[None],
    }  # fmt: skip
    mask = None if name == "sdpa" else hf.make_mask(1, case.q_len, case.kv_len, device=q.device)
    function = sdpa_attention_forward if name == "sdpa" else hf.attention
    return lambda: (function(layer, q, k, v, mask, **options)[0].transpose(1, 2),)


#: The case, and what is called with our kernels and with PyTorch's.
DOORS: dict[str, tuple[Case, Bind, Bind]] = {
    "SDPA, flash backend": (DENSE, _bind_sdpa, _bind_sdpa),
    "_flash_attention_forward": (DENSE, _bind_op, _bind_op),
    "_flash_attention_forward, packed": (ROWS_FIRST, _bind_op, _bind_op),
    "varlen_attn": (ROWS_FIRST, _bind_varlen, _bind_varlen),
    "transformers' attention function": (
        DENSE, partial(_bind_transformers, "cute_fa"), partial(_bind_transformers, "sdpa"),
    ),
}  # fmt: skip


@contextlib.contextmanager
def registered(key: str) -> Iterator[None]:
    """PyTorch's flash backend, and our kernels behind it."""
    from flash_cute.hooks import aten

    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        warnings.simplefilter("ignore")
        aten.register(key)
        try:
            yield
        finally:
            aten.unregister()


def measure_doors(options: Options, rounds: int = 15, calls: int = DOOR_CALLS) -> list[Row]:
    """A row per door, op, and who is behind it: `flash_cute` or `torch`."""
    rows = []
    key = options.device.type.upper()
    for name, (case, ours, theirs) in DOORS.items():
        if "transformers" in name and importlib.util.find_spec("transformers") is None:
            continue
        providers = [
            Provider("flash_cute", name, ours, pinned=lambda: registered(key), is_ours=True),
            Provider("torch", name, theirs, pinned=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        ]
        for op in ("fwd", "fwdbwd"):
            with torch.set_grad_enabled(op == "fwdbwd"):
                found = _measure(replace(case, op=op), providers, options, rounds, calls)
            rows += [row | {"kind": "doors", "name": f"{name}, {op}"} for row in found]
    return rows
