"""The merge of attention over splits of the keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_cute import checks


def merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, learnable_sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention over all keys, exactly, of results over disjoint splits of them: what `forward`
    or `forward_varlen` returned for the same q and each split of k and v.

    Args:
        outs: of each split, (B, H, N, Dv) or packed (T, H, Dv), of one shape and dtype.
        lses: of each split, (B, H, N) or packed (H, T), floating-point, natural logarithms. A row
            of -inf saw no key of its split, and its `out` does not matter.
        learnable_sink: (H,), as `forward` takes it. Give it here alone, as it counts once.

    Returns:
        out: of the splits' shape and dtype.
        softmax_lse: of the LSEs' shape and dtype, the sink included.

        A row that saw no key at all has out = 0, and softmax_lse = -inf or the sink.

    It computes in fp32 (fp64 if one of its tensors is), and is differentiable in all of them. It is
    made of PyTorch's operations.

    Raises:
        TypeError: outs or lses are no sequences of dense tensors, or dtypes do not go together.
        ValueError: there is no split, or not as many of both, or shapes or devices do not go
            together.
    """
    error = _refusal(outs, lses, learnable_sink)
    if error is not None:
        raise error
    is_packed = outs[0].dim() == 3
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (*outs, *lses)), torch.float32)
    splits = [lse.to(dtype) for lse in lses]
    columns = splits
    if learnable_sink is not None:  # a split that has no out
        columns = [*splits, learnable_sink.to(dtype)[:, None].expand_as(splits[0])]

    # Relative to the greatest, no sum overflows. It changes no result, so it has no gradient.
    # Where all are -inf, 0 in its place keeps -inf - -inf (NaN) out.
    greatest = functools.reduce(torch.maximum, (x.detach() for x in columns))
    greatest = greatest.masked_fill(greatest == -math.inf, 0.0)
    weights = [(x - greatest).exp() for x in columns]
    total = functools.reduce(torch.add, weights)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    lse = (greatest + total.log()).masked_fill(is_empty, -math.inf)

    out = torch.zeros_like(outs[0], dtype=dtype)
    for some_out, some_lse, weight in zip(outs, splits, weights, strict=False):
        share = (weight / total).mT if is_packed else weight / total
        no_key = (some_lse == -math.inf).mT if is_packed else some_lse == -math.inf
        out = out + share[..., None] * some_out.to(dtype).masked_fill(no_key[..., None], 0.0)
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)


def _refusal(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sink: Tensor | None
) -> Exception | None:
    given: dict[str, Tensor] = {}
    for name, splits in (("outs", outs), ("lses", lses)):
        if not isinstance(splits, (list, tuple)):
            return TypeError(
                f"{name} is {checks.type_of(splits)}: it must be a list or tuple of tensors"
            )
        for i, x in enumerate(splits):
            if not isinstance(x, Tensor):
                return TypeError(f"{name}[{i}] is {checks.type_of(x)}: it must be a torch.Tensor")
        given.update((f"{name}[{i}]", x) for i, x in enumerate(splits))
    if len(outs) != len(lses) or not outs:
        return ValueError(
            f"outs has {len(outs)} tensors and lses {len(lses)}: it must be as many, and one at "
            "least"
        )
    if sink is not None:
        if not isinstance(sink, Tensor):
            kind = checks.type_of(sink)
            return TypeError(f"learnable_sink is {kind}: it must be a torch.Tensor or None")
        given["learnable_sink"] = sink
    for name, x in given.items():
        if (error := checks.refusal_of_layout(name, x)) is not None:
            return error
        if x.device != outs[0].device:
            devices = f"{name} is on {x.device} and outs[0] on {outs[0].device}"
            return ValueError(f"{devices}: they must be on the same device")

    shape = outs[0].shape
    if len(shape) not in (3, 4):
        return ValueError(
            f"outs[0] has shape {tuple(shape)}: it must be (B, H, N, Dv) or packed (T, H, Dv)"
        )
    lse_shape = shape[:3] if len(shape) == 4 else torch.Size((shape[1], shape[0]))
    alike = {"outs": (outs[0].dtype, shape), "lses": (lses[0].dtype, lse_shape)}
    for name, x in given.items():
        dtype, wanted = alike.get(name[:4], (x.dtype, shape[1:2]))
        if x.shape != wanted:
            return ValueError(f"{name} has shape {tuple(x.shape)}: it must be {tuple(wanted)}")
        if x.dtype != dtype or not x.is_floating_point():
            return TypeError(
                f"{name} is {checks.name_of(x.dtype)}: it must be "
                + (checks.name_of(dtype) if x.dtype != dtype else "floating-point")
            )
    return None
