"""`forward` and its kin in the layouts and with the options of the flash_attn packages. flash_attn/
and flash_attn_interface.py have their functions.

Dense tensors are (B, N, H, D) here, packed ones (T, H, D). A log-sum-exp is (B, H, N), packed (H,
T).
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import flash_cute
from flash_cute import checks, interface, ops
from flash_cute.options import side_of
from flash_cute.transforms import autocast

Window = tuple[int | None, int | None]

#: What helps where an option is refused.
_INSTEAD = {
    "dropout_p": "flash_cute has no dropout; use PyTorch's scaled_dot_product_attention",
    "rotary_cos": "rotate q and k before the call",
    "rotary_sin": "rotate q and k before the call",
    "block_table": "paged caches are not served; use a contiguous one",
    "page_table": "paged caches are not served; use a contiguous one",
}


def refuse(**options: Any) -> None:
    """Raises a NotImplementedError for the first option that is given: neither None nor zero."""
    for name, x in options.items():
        if _is_off(x):
            continue
        shown = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        instead = _INSTEAD.get(name, "flash_cute does not serve it")
        raise NotImplementedError(f"{name} is {shown}: {instead}")


def _is_off(x: Any) -> bool:
    return x is None or (isinstance(x, numbers.Number) and not x)


def check_dims(shape: str, **tensors: Any) -> None:
    """Raises a TypeError or ValueError for the first that has not this shape, in letters, which may
    be anything, and numbers."""
    sizes = shape.strip("()").split(", ")
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {checks.shown(x)}: it must be a torch.Tensor")
        if (error := checks.refusal_of_layout(name, x)) is not None:
            raise error
        if x.dim() != len(sizes) or any(
            size.isdigit() and int(size) != n for size, n in zip(sizes, x.shape, strict=True)
        ):
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be {shape}")


def check_shape(name: str, x: Any, shape: torch.Size) -> None:
    """Raises a TypeError or ValueError if x is not a tensor of this shape."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {checks.shown(x)}: it must be a torch.Tensor")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be {tuple(shape)}")


def check_integers(name: str, x: Any, others: str = "") -> None:
    """Raises a TypeError if x is no tensor of integers. `others`: what else it may be."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        kind = checks.name_of(x.dtype) if isinstance(x, Tensor) else checks.shown(x)
        raise TypeError(f"{name} is {kind}: it must be {others}an int32 or int64 tensor")


def check_like(name: str, x: Tensor, wanted: Tensor) -> None:
    """Raises a TypeError or ValueError if x has not the shape, dtype and device of `wanted`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {checks.shown(x)}: it must be a torch.Tensor")
    given, right = ((tuple(y.shape), y.dtype, str(y.device)) for y in (x, wanted))
    if given != right:
        raise ValueError(f"{name} has shape, dtype and device {given}: they must be {right}")


def check_head_dims(q: Tensor, v: Tensor) -> None:
    """Raises a ValueError if they differ: FlashAttention-2 has one, other functions take two."""
    if not isinstance(q, Tensor) or not isinstance(v, Tensor) or q.is_nested or v.is_nested:
        return  # what follows refuses them
    if not q.dim() == v.dim() > 0:
        return
    if q.shape[-1] != v.shape[-1]:
        raise ValueError(
            f"v has head dim {v.shape[-1]} and q has {q.shape[-1]}: FlashAttention-2's must be "
            "equal; call flash_cute.forward, or flash_cute.flash_attn_interface"
        )


def options_of(
    causal: bool,
    softmax_scale: float | None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    **tensors: Any,
) -> dict[str, Any]:
    """The keywords of `forward` and `forward_varlen`. A plain call gets plain ones: that is its
    fastest way."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {checks.shown(causal)}: it must be True or False")
    options: dict[str, Any] = {"is_causal": causal, "softmax_scale": softmax_scale}
    window: Any = window_size
    if isinstance(window, (tuple, list)) or (isinstance(window, Tensor) and window.dim() == 1):
        window = tuple(_side(side) for side in window)
    if not interface.is_open(window):
        options["window_size"] = window
    if not _is_off(softcap):
        options["softcap"] = softcap
    if not _is_off(deterministic):
        # What is no number is refused by `forward`.
        is_number = isinstance(deterministic, numbers.Number)
        options["deterministic"] = bool(deterministic) if is_number else deterministic
    options.update((name, x) for name, x in tensors.items() if x is not None)
    return options


def _side(x: Any) -> Any:
    """A side of a window, -1 if it is open. Tensors of one element are numbers too, for these
    packages."""
    if isinstance(x, bool):
        return x  # refused by `forward`
    if isinstance(x, numbers.Integral) or (isinstance(x, Tensor) and x.numel() == 1):
        x = int(x)
    is_number = isinstance(x, (int, torch.SymInt))
    return -1 if x is None or (is_number and x < 0) else x


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """Views (B, H, N, D) of (B, N, H, D), and the other way round."""
    return [x.transpose(1, 2) for x in tensors]


def dense(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], names: dict[str, str] | None = None
) -> tuple[Tensor, Tensor]:
    """`forward` of (B, N, H, D). Its errors have the shapes as they were given, and of `k` and `v`
    the names that the caller has for them."""
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        check_dims("(B, N, H, D)", q=q, k=k, v=v)
    q, k, v = heads_first(q, k, v)
    out, lse = _call(flash_cute.forward, (q, k, v), options, names or {})
    return out.transpose(1, 2), lse


def _call(
    function: Callable[..., Any],
    inputs: Iterable[Tensor | None],
    options: dict[str, Any],
    names: dict[str, str] | None,
) -> Any:
    """With `names`, errors have them."""
    if names is None or torch.compiler.is_compiling():  # not every Dynamo can trace what is below
        return function(*inputs, **options)
    try:
        return function(*inputs, **options)
    except (TypeError, ValueError) as error:
        raise _named(error, names) from None


def check(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    names: dict[str, str],
) -> None:
    """Raises what `dense` or `packed` do by `function`, of its tensors, and computes nothing."""
    error = interface.refusal(function, q, k, v, **options)
    if error is not None:
        raise _named(error, names)


def _named(error: Exception, names: dict[str, str]) -> Exception:
    text = re.sub(r"\((\w+), (\w+), (\w+), (\w+)\)", r"(\1, \3, \2, \4)", str(error))
    return type(error)(re.sub(r"\w+", lambda name: names.get(name[0], name[0]), text))


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    options: dict[str, Any],
    names: dict[str, str] | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward_varlen`, likewise."""
    inputs = q, k, v, cu_seqlens_q, cu_seqlens_k
    out, lse = _call(flash_cute.forward_varlen, inputs, options, names)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> list[Tensor]:
    """(dq, dk, dv) of `dense`, with cu_seqlens_* of `packed`. `out` and `lse` may be of more keys
    than k has, as in ring attention."""
    dout, q, k, v = (autocast(x) for x in (dout, q, k, v))
    function: Callable[..., Any] = flash_cute.forward
    ends: dict[str, Tensor] = {}
    if cu_seqlens_q is None:
        refuse(cu_seqlens_k=cu_seqlens_k, seqused_q=options.get("seqused_q"))
        check_dims("(B, N, H, D)", dout=dout, q=q, k=k, v=v, out=out)
        check_dims("(B, H, N)", softmax_lse=lse)
        dout, q, k, v, out = heads_first(dout, q, k, v, out)
    else:
        function = flash_cute.forward_varlen
        check_dims("(T, H, D)", dout=dout, q=q, k=k, v=v, out=out)
        check_dims("(H, T)", softmax_lse=lse)
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_integers(name, x)
            ends[name] = x.int()
    check(function, q, k, v, options | ends, {})
    keywords = options | ends
    left, right = map(side_of, keywords.pop("window_size", (-1, -1)))
    keywords["window_left"] = left
    keywords["window_right"] = 0 if keywords.pop("is_causal") else right
    gradients = list(_call(ops.bwd, (dout, q, k, v, out, lse), keywords, {})[:3])
    return heads_first(*gradients) if cu_seqlens_q is None else gradients


def write(targets: Iterable[Tensor | None], gradients: Iterable[Tensor]) -> None:
    """Copies each of (dq, dk, dv) whose target is a tensor, once all fit."""
    given = list(zip(("dq", "dk", "dv"), targets, gradients, strict=True))
    for name, target, gradient in given:
        if target is not None:
            check_shape(name, target, gradient.shape)
    for _, target, gradient in given:
        if target is not None:
            target.copy_(gradient)
