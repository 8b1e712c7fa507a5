"""Gradients in several processes: data parallel, FSDP2, and tensors that are sharded."""

from __future__ import annotations

import os
import socket

import torch
from test_autograd import assert_close, gradients_of, inputs, loss

import flash_cute


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return self.out(flash_cute.forward(q, k, v, True)[0].transpose(1, 2).flatten(2))


def _options(mesh) -> None:
    """What changes scores is sharded by its batch and heads; packed sequences by heads."""
    from torch.distributed import broadcast
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for bias_sizes, slopes_sizes in (((2, 4, 7, 11), (4,)), ((1, 1, 7, 11), (2, 4))):
        tensors = [*inputs(), torch.randn(4), torch.randn(bias_sizes), torch.rand(slopes_sizes)]
        tensors.append(torch.tensor([11, 4], dtype=torch.int32))
        for x in tensors:
            broadcast(x.detach(), 0)

        def changed(ends, q, k, v, sink, bias, slopes, used):
            return flash_cute.forward(
                q, k, v, learnable_sink=sink, bias=bias, alibi_slopes=slopes, seqused_k=used
            )

        def packed(ends, q, k, v, sink, bias, slopes, used):
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            return flash_cute.forward_varlen(q, k, v, *ends, learnable_sink=sink)

        for function, dims in ((changed, (0, 1)), (packed, (1,))):
            for x in tensors[:5]:
                x.requires_grad_()
            wanted = tensors[:5] if function is changed else tensors[:4]
            ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (7, 11)]
            out, lse = function(ends, *tensors)
            expected = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), wanted)
            ends = [distribute_tensor(x, mesh, [Replicate()]) for x in ends]
            for dim in dims:
                where = [Shard(dim)] * 3 + [Replicate()] * 4
                sharded = [
                    distribute_tensor(x.detach(), mesh, [y])
                    for x, y in zip(tensors, where, strict=True)
                ]
                wanted = [x.requires_grad_() for x in sharded[: len(expected)]]
                out, lse = function(ends, *sharded)
                assert out.placements == (Shard(dim),)
                result = out.full_tensor().sin().sum() + lse.full_tensor().cos().sum()
                actual = torch.autograd.grad(result, wanted)
                assert_close([dx.full_tensor() for dx in actual], expected)


def _process(rank: int, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(1))
    expected = Block()
    expected(x).square().mean().backward()
    for parallel in (torch.nn.parallel.DistributedDataParallel, fully_shard):
        block = Block()
        wrapped = parallel(block, **({"mesh": mesh} if parallel is fully_shard else {}))
        wrapped(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        for a, b in zip(block.parameters(), expected.parameters(), strict=True):
            gradient = a.grad.full_tensor() if parallel is fully_shard else a.grad
            torch.testing.assert_close(gradient, b.grad)

    for heads_kv in (4, 2, 1):
        qkv = inputs(heads_kv=heads_kv)
        expected = gradients_of(loss, *qkv)
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            if heads_kv == 1 and placement == Shard(1):
                continue  # the mesh cannot hold such a k
            sharded = [
                distribute_tensor(x.detach(), mesh, [placement]).requires_grad_() for x in qkv
            ]
            out, lse = flash_cute.forward(*sharded, True)
            kept = heads_kv % 2 == 0 or placement == Shard(0)
            assert (
                not kept
                or placement == Shard(2)
                or out.placements == lse.placements == (placement,)
            )
            result = out.full_tensor().sin().sum() + lse.full_tensor().cos().sum()
            actual = torch.autograd.grad(result, sharded)
            assert_close([dx.full_tensor() for dx in actual], expected)
    _options(mesh)
    dist.barrier()
    # Not by return: gloo's threads may still hold tensors, and abort when the interpreter ends.
    os._exit(0)


def test_two_processes():
    """Data parallel, FSDP2, and tensors that are sharded over batch or heads."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_process, (port,), nprocs=2)
