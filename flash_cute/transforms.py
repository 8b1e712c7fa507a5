"""What the ops are beside CUDA: on the CPU, and under torch's transforms (fake tensors, counts of
operations, autocast, vmap; derivatives are in autograd.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from flash_cute import checks, cpu, ops, options

torch.library.impl("flash_cute::fwd", "CPU", cpu.attention)
torch.library.impl("flash_cute::bwd", "CPU", cpu.attention_backward)


@torch.library.register_fake("flash_cute::fwd")
def _fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, *optional: Tensor | None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    # This serves meta tensors, too, also where q alone is none.
    if (error := options.refusal_of_op(q, k, v, optional, **_scalars(keywords))) is not None:
        raise error
    return checks.empty_out(q, v), q.new_empty(checks.lse_shape(q), dtype=torch.float32)


@torch.library.register_fake("flash_cute::bwd")
def _bwd_fake(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None = None,
    *optional: Tensor | None,
    bias_grad: bool = False,
    **keywords: Any,
) -> tuple[Tensor, ...]:
    error = options.refusal_of_op(q, k, v, optional, **_scalars(keywords))
    error = error or checks.refusal_of_results(q, v, out, softmax_lse, dout, dlse)
    if error is not None:
        raise error
    sink, _, bias, *_ = (*optional, None, None, None)
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    dbias = q.new_empty(0) if bias is None or not bias_grad else torch.empty_like(bias)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsink, dbias


def _scalars(keywords: dict[str, Any]) -> dict[str, Any]:
    return {"softcap": keywords["softcap"]} if "softcap" in keywords else {}


# For torch.utils.flop_counter, by PyTorch's rule for SDPA: masks spare nothing.
def _scores(q: Tensor, k: Tensor, *others: Any) -> int:
    """How many there are, of all heads. `others` are those of `ops.OPTIONAL`."""
    len_q, len_k = (x.shape[-2] if x.dim() == 4 else x.shape[0] for x in (q, k))
    scores = len_q * len_k
    if q.dim() == 3:
        _, _, _, cu_seqlens_q, cu_seqlens_k, *_ = others
        sequences = cu_seqlens_q.shape[0] - 1
        if isinstance(cu_seqlens_q, FakeTensor) or cu_seqlens_q.is_meta:
            scores //= max(1, sequences)  # as of sequences of equal lengths
        else:
            scores = int((cu_seqlens_q.long().diff() * cu_seqlens_k.long().diff()).sum())
        return q.shape[1] * scores
    return q.shape[0] * q.shape[1] * scores


def _fwd_flops(q: Tensor, k: Tensor, v: Tensor, *others: Any, **keywords: Any) -> int:
    # Q K^T and P V
    return 2 * _scores(q, k, *others) * (q.shape[-1] + v.shape[-1])


def _bwd_flops(
    dout: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Any,
    lse: Any,
    dlse: Any = None,
    *others: Any,
    **keywords: Any,
) -> int:
    # Q K^T, dS K and dS^T Q; dO V^T and P^T dO
    return 2 * _scores(q, k, *others) * (3 * q.shape[-1] + 2 * v.shape[-1])


if torch.ops.flash_cute.fwd not in flop_registry:  # it is where the package is imported again
    register_flop_formula(torch.ops.flash_cute.fwd, get_raw=True)(_fwd_flops)
    register_flop_formula(torch.ops.flash_cute.bwd, get_raw=True)(_bwd_flops)


def autocast(x: Any) -> Any:
    """x as PyTorch's SDPA takes it under `torch.autocast`: floating-point tensors but for fp64 in
    autocast's dtype. Without autocast, x."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _fwd_autocast(q: Tensor, k: Tensor, v: Tensor, *optional: Any, **keywords: Any) -> Any:
    q, k, v = autocast(q), autocast(k), autocast(v)
    optional = tuple(
        autocast(x) if name == "bias" and x is not None and x.dtype != torch.float32 else x
        for name, x in zip(ops.OPTIONAL, optional, strict=False)
    )
    with torch.autocast(q.device.type, enabled=False):
        return ops.fwd(q, k, v, *optional, **keywords)


def _bwd_autocast(dout: Tensor | None, q: Tensor, *others: Tensor | None, **keywords: Any) -> Any:
    # Its tensors have the forward's dtype, in which the gradients are to be.
    with torch.autocast(q.device.type, enabled=False):
        return ops.bwd(dout, q, *others, **keywords)


def _vmap_of(op: Callable[..., tuple[Tensor, ...]], plain: int) -> Callable[..., Any]:
    """One call for the whole map: the mapped dimension joins the batch. A call for each of it where
    more than the first `plain` tensors is given, as sinks and packed sequences have no batch."""

    def rule(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None, **keywords: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def mapped_first(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        mapped = [mapped_first(x, dim) for x, dim in zip(tensors, in_dims, strict=False)]
        if any(x is not None for x in mapped[plain:]):
            # Of an empty map one call, for the shapes.
            items = [
                [None if x is None else x[i] for x in mapped] for i in range(info.batch_size)
            ] or [[None if x is None else x.new_zeros(x.shape[1:]) for x in mapped]]
            calls = [op(*item, **keywords) for item in items]
            results = tuple(
                torch.stack(parts)[: info.batch_size] for parts in zip(*calls, strict=True)
            )
            return results, (0,) * len(results)
        sizes = next(x.shape[:2] for x in mapped if x is not None)
        results = op(*(None if x is None else x.flatten(0, 1) for x in mapped), **keywords)
        # What has no elements has no batch either.
        return tuple(
            x.unflatten(0, sizes) if x.dim() > 1 else x.expand(info.batch_size, 0) for x in results
        ), (0,) * len(results)

    return rule


for _op, _autocast, _plain in ((ops.fwd, _fwd_autocast, 3), (ops.bwd, _bwd_autocast, 7)):
    torch.library.register_vmap(_op, _vmap_of(_op, _plain))
    torch.library.impl(_op.name(), "AutocastCUDA", _autocast)
    torch.library.impl(_op.name(), "AutocastCPU", _autocast)
