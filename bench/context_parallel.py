"""PyTorch's context_parallel with our kernels and with its own, in each process of torchrun.

    torchrun --nproc-per-node 2 -m bench.context_parallel --json bench/results/context_parallel.json

A causal forward and backward of B1 H8 D128 in bf16. Gradients are compared with those that one GPU
computes of the whole sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_cute
from bench import environment, tables
from bench.harness import Row, turn_order
from bench.run import positive, save, without_folders

HEADS, HEAD_DIM = 8, 128
PROVIDERS = ("flash_cute", "torch")


def make_inputs(length: int, device: torch.device) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, the same in all processes."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    draw = torch.randn(4, *shape, generator=generator, device=device, dtype=torch.bfloat16)
    return [x.clone() for x in draw]  # each with memory of its own, which is cut to a share


def on_one_gpu(length: int, device: torch.device) -> list[Tensor]:
    q, k, v, dout = make_inputs(length, device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = flash_cute.forward(*inputs, is_causal=True)[0]
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@contextlib.contextmanager
def behind(provider: str) -> Iterator[None]:
    """PyTorch's flash backend, with our kernels or with its own."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flash_cute.register(torch=provider == "flash_cute")
        try:
            yield
        finally:
            flash_cute.unregister(torch=True)


def measure(length: int, rounds: int, device: torch.device) -> list[Row]:
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cuda", (size,))
    expected = on_one_gpu(length, device)
    buffers = make_inputs(length, device)
    rows: dict[str, Row] = {
        provider: {
            "kind": "context_parallel", "name": f"N {length} on {size} GPUs", "status": "ok",
            "provider": provider, "length": length, "gpus": size,
        }
        for provider in PROVIDERS
    }  # fmt: skip
    samples: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
    # The buffers become this process's shares; the loss of a share's rows is that of the whole.
    with context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
    ):
        *inputs, dout = buffers
        inputs = [x.requires_grad_() for x in inputs]

        def step() -> list[Tensor]:
            out = functional.scaled_dot_product_attention(*inputs, is_causal=True)
            return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

        for provider in PROVIDERS:
            with behind(provider):
                results = context_parallel_unshard(mesh, step(), [2] * 4)
            errors = [
                float((x.float() - right.float()).norm() / right.float().norm())
                for x, right in zip(results, expected, strict=True)
            ]
            rows[provider]["errors"] = dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))
            del results
        ours, theirs = (max(rows[provider]["errors"].values()) for provider in PROVIDERS)
        rows["flash_cute"]["correct"] = ours <= max(1e-2, 2 * theirs)
        for turn in range(rounds + 1):
            for provider in turn_order(PROVIDERS, turn):
                with behind(provider):
                    dist.barrier()
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    step()
                    torch.cuda.synchronize()
                    seconds = torch.tensor(time.perf_counter() - start, device=device)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if turn > 0:  # the first warms up
                    samples[provider].append(float(seconds) * 1e3)
    for provider, times in samples.items():
        rows[provider]["ms"] = statistics.median(times)
    return list(rows.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torchrun ... -m bench.context_parallel")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[2**15, 2**17])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--commit", help="recorded where it cannot be told")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the rows")
    args = parser.parse_args(argv)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    _cp_options.enable_load_balance = True
    rows = []
    for length in args.lengths:
        rows += measure(length, args.rounds, device)
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print(tables.context_parallel(rows))
        if args.json:
            meta = environment.describe(device, without_folders(argv))
            meta["commit"] = meta["commit"] or args.commit
            save(args.json, {"meta": meta, "rows": rows})
    dist.destroy_process_group()
    return int(not all(row.get("correct", True) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
