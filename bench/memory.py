"""Peak extra memory of a forward, or of a training step, beyond its inputs, beside what its
results need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.baselines import Provider
from bench.cases import DTYPES, Case, make_inputs, square
from bench.harness import Options, Row, prepare

CASES = (
    square(1, 8192, 16, 128, causal=True),
    square(1, 8192, 16, 128, causal=True, layout="bnhd"),
    square(1, 8192, 16, 128, causal=True, kv_heads=2),
    # Rows of 100 x 2 bytes are no multiple of 16 bytes: these inputs have to be copied.
    square(1, 8192, 16, 100, causal=True),
)


def output_bytes(case: Case) -> int:
    """out in the inputs' dtype and softmax_lse in fp32; dq, dk and dv."""
    rows = case.batch * case.heads * case.q_len
    of_q = rows * case.head_dim * DTYPES[case.dtype].itemsize
    by_op = {"fwd": of_q + rows * 4, "bwd": of_q + case.kv_bytes()}
    return sum(size for op, size in by_op.items() if op in case.op)


@torch.no_grad()
def measure_memory(providers: Sequence[Provider], options: Options, op: str = "fwd") -> list[Row]:
    """A row per case and provider; `extra_bytes` is what the allocator's peak rose by."""
    if options.device.type != "cuda":
        raise ValueError("peak memory is read from the GPU's allocator: there is no GPU here")
    rows = []
    for case in [replace(case, op=op) for case in CASES]:
        tensors = make_inputs(case, options.device, options.seed)
        for provider in providers:
            runner = prepare(provider, case, tensors, options)  # and its one-time allocations
            runner.row |= {"kind": "memory", "output_bytes": output_bytes(case)}
            if runner.call is not None:
                torch.cuda.synchronize(options.device)
                before = torch.cuda.memory_allocated(options.device)
                torch.cuda.reset_peak_memory_stats(options.device)
                with provider.pinned():
                    result = runner.call()
                torch.cuda.synchronize(options.device)
                peak = torch.cuda.max_memory_allocated(options.device)
                runner.row["extra_bytes"] = peak - before
                del result
            rows.append(runner.row)
            del runner
    return rows
