"""Ring attention: each process holds a share of a sequence, keys and values go around, and
`flash_cute.merge` puts the results together. Autograd has the gradients.

    torchrun --nproc-per-node 2 -m examples.ring_attention

It checks itself against the whole sequence on one process.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flash_cute


class PassOn(torch.autograd.Function):
    """Gives x to the next process, and returns that of the one before. Gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return PassOn.send(x, 1)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return PassOn.send(dx, -1)

    @staticmethod
    def send(x: Tensor, step: int) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        calls = [
            dist.P2POp(dist.isend, x.contiguous(), (rank + step) % size),
            dist.P2POp(dist.irecv, received, (rank - step) % size),
        ]
        for request in dist.batch_isend_irecv(calls):
            request.wait()
        return received


def ring_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """The attention of this process's queries to all keys. q, k, v (B, H, N, D) are its share: the
    tokens from rank * N on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    keys = torch.stack([k, v])
    outs, lses = [], []
    unseen = 0
    for step in range(size):
        if step > 0:
            keys = PassOn.apply(keys)
        owner = (rank - step) % size
        if is_causal and owner > rank:
            # All of it is later. Gradients pass it all the same: the others wait for them.
            unseen = unseen + keys[..., :0].sum()
            continue
        out, lse = flash_cute.forward(q, *keys, is_causal=is_causal and owner == rank)
        outs.append(out)
        lses.append(lse)
    return flash_cute.merge(outs, lses)[0] + unseen


def main() -> None:
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        backend, device = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)  # all processes make the whole sequence
    whole = [torch.randn(2, 4, 64 * size, 32).to(device, dtype) for _ in range(4)]
    dout = whole.pop()
    for is_causal in (False, True):
        ours, theirs = ([x.detach().requires_grad_() for x in whole] for _ in range(2))
        out = flash_cute.forward(*theirs, is_causal)[0]
        expected = [out, *torch.autograd.grad(out, theirs, dout)]
        share = ring_attention(*(x.chunk(size, 2)[rank] for x in ours), is_causal)
        grads = torch.autograd.grad(share, ours, dout.chunk(size, 2)[rank])
        results = [share, *(x.chunk(size, 2)[rank] for x in grads)]
        for x, right in zip(results, expected, strict=True):
            tolerance = 1e-4 if device.type == "cpu" else 5e-2
            torch.testing.assert_close(
                x,
                right.chunk(size, 2)[rank],
                rtol=0,
                atol=tolerance * float(right.detach().abs().max()),
            )
    dist.barrier()
    if rank == 0:
        print(f"{size} processes, {backend}: output and gradients are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
