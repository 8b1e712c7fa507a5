"""PyTorch's context_parallel on our kernels, in each of the processes of `torchrun`. On the CPU,
PyTorch has no flash attention that it could share: there SDPA is a call of the op that it has on
GPUs. test_register_torch.py runs this.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_cute
from flash_cute.hooks import aten


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False
) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def main() -> None:
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= size else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local)
        flash_cute.register(torch=True)
    else:
        functional.scaled_dot_product_attention = scaled_dot_product_attention
        aten.register("CPU")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = dist.init_device_mesh(device, (size,))

    length, dtype = 256 * size, torch.bfloat16 if device == "cuda" else torch.float16
    for is_causal in (False, True):
        torch.manual_seed(0)  # all processes make the whole sequence
        made = [torch.randn(1, 4, length, 32).to(device, dtype) for _ in range(4)]
        dout = made.pop()
        whole = [x.clone().requires_grad_() for x in made]
        out = flash_cute.forward(*whole, is_causal)[0]
        expected = [out.detach(), *torch.autograd.grad(out, whole, dout)]
        buffers = [*made, dout]  # which become this process's shares
        _cp_options.enable_load_balance = is_causal  # PyTorch's rule
        with (
            context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
            ),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            q, k, v = (x.requires_grad_() for x in made)
            share = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            with torch.profiler.profile() as profile:
                shares = [share.detach(), *torch.autograd.grad(share, (q, k, v), dout)]
            results = context_parallel_unshard(mesh, shares, [2] * 4)
        names = [event.key for event in profile.key_averages()]
        ours = [n for n in names if n == "flash_cute::bwd" or "flash_cute_kernel" in n]
        assert ours, "our kernels were not called"
        for x, right in zip(results, expected, strict=True):
            bound = 2e-2 * float(right.abs().max())
            torch.testing.assert_close(x, right, rtol=0, atol=bound)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{size} processes on {device}: output and gradients are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
