"""What the ops are beside CUDA: on the CPU, and under torch's transforms (fake tensors, counts of
operations, autocast, vmap; derivatives are in autograd.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from flash_cute import checks, cpu, ops

Shape = tuple[int, ...]

torch.library.impl("flash_cute::fwd", "CPU", cpu.attention)
torch.library.impl("flash_cute::bwd", "CPU", cpu.attention_backward)


@torch.library.register_fake("flash_cute::fwd")
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    # This serves meta tensors, too, also where q alone is none.
    if (error := checks.refusal(q, k, v)) is not None:
        raise error
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("flash_cute::bwd")
def _bwd_fake(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    error = checks.refusal(q, k, v) or checks.refusal_of_results(q, out, softmax_lse, dout, dlse)
    if error is not None:
        raise error
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# For torch.utils.flop_counter, by PyTorch's rule for SDPA: masks spare nothing. The backward has
# five products where the forward has two.
def _fwd_flops(q: Shape, k: Shape, v: Shape, *args: Any, **keywords: Any) -> int:
    batch, heads, len_q, head_dim = q
    return 4 * batch * heads * len_q * k[2] * head_dim


def _bwd_flops(dout: Shape, q: Shape, k: Shape, v: Shape, *args: Any, **keywords: Any) -> int:
    return _fwd_flops(q, k, v) * 5 // 2


if torch.ops.flash_cute.fwd not in flop_registry:  # it is where the package is imported again
    register_flop_formula(torch.ops.flash_cute.fwd)(_fwd_flops)
    register_flop_formula(torch.ops.flash_cute.bwd)(_bwd_flops)


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


def _bwd_autocast(dout: Tensor | None, q: Tensor, *others: Tensor | None, **keywords: Any) -> Any:
    # Its tensors have the forward's dtype, in which the gradients are to be.
    with torch.autocast(q.device.type, enabled=False):
        return ops.bwd(dout, q, *others, **keywords)


def _vmap_of(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """One call for the whole map: the mapped dimension joins the batch."""

    def rule(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None, **keywords: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def mapped_first(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        mapped = [mapped_first(x, dim) for x, dim in zip(tensors, in_dims, strict=False)]
        sizes = next(x.shape[:2] for x in mapped if x is not None)
        results = op(*(None if x is None else x.flatten(0, 1) for x in mapped), **keywords)
        return tuple(x.unflatten(0, sizes) for x in results), (0,) * len(results)

    return rule


for _op, _autocast in ((ops.fwd, _fwd_autocast), (ops.bwd, _bwd_autocast)):
    torch.library.register_vmap(_op, _vmap_of(_op))
    torch.library.impl(_op.name(), "AutocastCUDA", _autocast)
    torch.library.impl(_op.name(), "AutocastCPU", _autocast)
