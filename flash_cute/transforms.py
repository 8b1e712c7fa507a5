"""What the op is beside CUDA: on the CPU, and under torch's transforms (fake tensors, counts of
operations, autocast, vmap; derivatives are in autograd.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from flash_cute import checks, cpu, ops

Shape = tuple[int, ...]

torch.library.impl("flash_cute::fwd", "CPU", cpu.attention)


@torch.library.register_fake("flash_cute::fwd")
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    # This serves meta tensors, too, also where q alone is none.
    if (error := checks.refusal(q, k, v)) is not None:
        raise error
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fwd_flops(q: Shape, k: Shape, v: Shape, *args: Any, **keywords: Any) -> int:
    """For torch.utils.flop_counter, by PyTorch's rule for SDPA: masks spare nothing."""
    batch, heads, len_q, head_dim = q
    return 4 * batch * heads * len_q * k[2] * head_dim


if torch.ops.flash_cute.fwd not in flop_registry:  # it is where the package is imported again
    register_flop_formula(torch.ops.flash_cute.fwd)(_fwd_flops)


def autocast(x: Any) -> Any:
    """x as PyTorch's SDPA takes it under `torch.autocast`: floating-point tensors but for fp64 in
    autocast's dtype. Without autocast, x."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _fwd_autocast(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    q, k, v = autocast(q), autocast(k), autocast(v)
    with torch.autocast(q.device.type, enabled=False):
        return ops.fwd(q, k, v, **keywords)


torch.library.impl("flash_cute::fwd", "AutocastCUDA", _fwd_autocast)
torch.library.impl("flash_cute::fwd", "AutocastCPU", _fwd_autocast)


def _fwd_vmap(
    info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, **keywords: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """One call for the whole map: the mapped dimension joins the batch."""

    def fold(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    batch = q.shape[0] if in_dims[0] is None else q.movedim(in_dims[0], 0).shape[1]
    folded = (fold(x, dim) for x, dim in zip((q, k, v), in_dims, strict=False))
    out, lse = ops.fwd(*folded, **keywords)
    shape = (info.batch_size, batch)
    return (out.unflatten(0, shape), lse.unflatten(0, shape)), (0, 0)


torch.library.register_vmap("flash_cute::fwd", _fwd_vmap)
