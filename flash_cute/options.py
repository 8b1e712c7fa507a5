"""What `forward` and `forward_varlen` accept beside q, k and v, as checks.py has it of those; and
FLASH_CUTE_CHECK=1, which looks at the values of lengths.
"""

from __future__ import annotations

import itertools
import numbers
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_cute import checks, memory, ops

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def refusal_of_op(
    q: Any,
    k: Any,
    v: Any,
    optional: Sequence[Tensor | None],
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Exception | None:
    """The first reason for which the ops cannot take these arguments, to be raised; else None.
    `optional` are those of `ops.OPTIONAL`, or the first of them."""
    tensors = dict(zip(ops.OPTIONAL, optional, strict=False))
    is_packed = tensors.get("cu_seqlens_q") is not None
    return (
        checks.refusal(q, k, v, False, softmax_scale, is_packed=is_packed)
        or refusal_of_softcap(softcap)
        or refusal_of_tensors(q, k, tensors)
    )


def refusal_of_tensors(q: Tensor, k: Tensor, tensors: dict[str, Tensor | None]) -> Exception | None:
    """As `checks.refusal`, of the tensors of `ops.OPTIONAL` that are given. q and k are right."""
    given = {name: x for name, x in tensors.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            return TypeError(f"{name} is {checks.type_of(x)}: it must be a torch.Tensor or None")
        if (error := checks.refusal_of_layout(name, x)) is not None:
            return error
        if x.device != q.device:
            return ValueError(f"{name} is on {x.device} and q on {q.device}: they must be the same")
        dtypes = _dtypes(name, q.dtype)
        if x.dtype not in dtypes:
            allowed = " or ".join(dict.fromkeys(map(checks.name_of, dtypes)))
            return TypeError(f"{name} is {checks.name_of(x.dtype)}: it must be {allowed}")

    if "cu_seqlens_q" not in given:
        batch = q.shape[0]
        if "cu_seqlens_k" in given:
            return ValueError("cu_seqlens_k is given without cu_seqlens_q: both or none must be")
    else:
        if "cu_seqlens_k" not in given:
            return ValueError("cu_seqlens_q is given without cu_seqlens_k: both or none must be")
        if "bias" in given:
            return ValueError(
                "bias is given with cu_seqlens_q: packed sequences have none; pad them, or use "
                f"{checks.SDPA}"
            )
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if given[name].dim() != 1 or given[name].shape[0] < 1:
                return _wrong_shape(name, given[name], "(sequences + 1,)")
        batch = given["cu_seqlens_q"].shape[0] - 1
        if given["cu_seqlens_k"].shape[0] != batch + 1:
            return _wrong_shape("cu_seqlens_k", given["cu_seqlens_k"], "that of cu_seqlens_q")

    heads = q.shape[1]
    for name in ("seqused_q", "seqused_k", "key_start"):
        if name in given and given[name].shape != (batch,):
            return _wrong_shape(name, given[name], f"({batch},), one for each sequence")
    if "learnable_sink" in given and given["learnable_sink"].shape != (heads,):
        wanted = f"({heads},), one for each head of q"
        return _wrong_shape("learnable_sink", given["learnable_sink"], wanted)
    # Of symbolic sizes Dynamo compares by ==, but not by `in`.
    shape = given["alibi_slopes"].shape if "alibi_slopes" in given else (heads,)
    if shape != (heads,) and shape != (batch, heads):
        wanted = f"({heads},) or ({batch}, {heads}), one for each head of q"
        return _wrong_shape("alibi_slopes", given["alibi_slopes"], wanted)
    if "bias" in given:
        whole = (batch, heads, q.shape[2], k.shape[2])
        sizes = given["bias"].shape
        if len(sizes) != 4 or any(a != 1 and a != b for a, b in zip(sizes, whole, strict=True)):
            wanted = f"{whole}, or have 1 in place of some of these"
            return _wrong_shape("bias", given["bias"], wanted)
    return None


def _dtypes(name: str, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    if name == "alibi_slopes":
        return (torch.float32,)
    if name == "bias":
        return torch.float32, dtype
    return (*FLOATS, dtype) if name == "learnable_sink" else (torch.int32, torch.int64)


def _wrong_shape(name: str, x: Tensor, wanted: str) -> ValueError:
    return ValueError(f"{name} has shape {tuple(x.shape)}: it must be {wanted}")


def lengths_of(x: Any) -> Any:
    """Lengths as the ops take them: int64 becomes int32, and values that do not fit wrap."""
    return x.to(torch.int32) if isinstance(x, Tensor) and x.dtype == torch.int64 else x


def is_softcap(number: float) -> bool:
    """Whether it is 0, or above and normal in float32, as the kernels have it."""
    return number == 0 or 1.1754943508222875e-38 <= number <= 3.4028234663852886e38


def refusal_of_softcap(softcap: Any) -> Exception | None:
    """As `checks.refusal`, of a softcap that is not None."""
    if not checks.is_real(softcap):
        allowed = "a float, an int, or None for none"
        return TypeError(f"softcap is {checks.shown(softcap)}: it must be {allowed}")
    if not checks.is_finite(softcap) or not is_softcap(softcap):
        allowed = "0 (none), or finite in float32 and 1.18e-38 or more"
        return ValueError(f"softcap is {checks.shown(softcap)}: it must be {allowed}")
    return None


def refusal_of_window(window: Any) -> Exception | None:
    """As `checks.refusal`, of a `window_size`."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        return TypeError(f"window_size is {checks.shown(window)}: it must be a pair, (left, right)")
    for side in window:
        if side is not None and not _is_integer(side):
            allowed = "each side must be an int, or None for an open one"
            return TypeError(f"window_size is {checks.shown(window)}: {allowed}")
        if side is not None and side < -1:
            allowed = "each side must be 0 or more, or -1 or None for an open one"
            return ValueError(f"window_size is {checks.shown(window)}: {allowed}")
    return None


def side_of(x: Any) -> Any:
    """A side of a window as the ops take it. No sequence is longer than MAX_LENGTH."""
    if x is None:
        return -1
    return x if isinstance(x, torch.SymInt) else min(int(x), checks.MAX_LENGTH)


def _is_integer(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt, numbers.Integral)) and not isinstance(x, bool)


def refusal_of_gradients(tensors: dict[str, Tensor | None], out: Any) -> Exception | None:
    """As `checks.refusal`, of tensors that ask for a gradient where there is none."""
    if not torch.is_grad_enabled():
        return None
    for name, x in tensors.items():
        if x is None or not x.requires_grad:
            continue
        if name == "alibi_slopes":
            return ValueError(f"{name} requires a gradient, and there is none; detach it")
        if out is not None:
            return ValueError(
                f"out is given and {name} requires a gradient: call it under torch.no_grad(), or "
                "without out"
            )
    return None


def refusal_of_out(
    q: Tensor, v: Tensor, out: Any, inputs: dict[str, Tensor | None]
) -> Exception | None:
    """As `checks.refusal`, of an `out` that is not None. `inputs` are all that are read."""
    if not isinstance(out, Tensor):
        return TypeError(f"out is {checks.type_of(out)}: it must be a torch.Tensor or None")
    if (error := checks.refusal_of_layout("out", out)) is not None:
        return error
    if out.shape != checks.out_shape(q, v):
        return _wrong_shape("out", out, f"{checks.out_shape(q, v)}: q's, with v's head dim")
    if out.dtype != q.dtype:
        dtypes = f"out is {checks.name_of(out.dtype)} and q is {checks.name_of(q.dtype)}"
        return TypeError(f"{dtypes}: they must have the same dtype")
    if out.device != q.device:
        return ValueError(f"out is on {out.device} and q on {q.device}: they must be the same")
    if out.requires_grad and torch.is_grad_enabled():
        return ValueError("out requires a gradient: it must not, as it is written")
    return refusal_of_memory("out", out, {**inputs, "q": None if _is_same(q, out) else q})


def _is_same(q: Tensor, out: Tensor) -> bool:
    return out is q or (_have_memory(q, out) and out.is_set_to(q))


def refusal_of_memory(name: str, x: Tensor, inputs: dict[str, Any]) -> Exception | None:
    """As `checks.refusal`, of an x that is written, if its elements share memory with each other or
    those of `inputs`. Of compiled code it sees whether x is expanded."""
    has_memory = _have_memory(x)
    if memory.overlaps_itself(x) if has_memory else memory.is_expanded(x):
        return ValueError(f"{name} has strides {tuple(x.stride())}: its elements must not overlap")
    for other_name, other in inputs.items() if has_memory else ():
        if other is not None and not _is_wrapped(other) and memory.overlap(x, other):
            return ValueError(
                f"{name} shares memory with {other_name}: it must not, as it is written"
            )
    return None


@checks.assume_constant_result
def looks_at_values() -> bool:
    off = ("", "0", "false", "off", "no")
    return os.environ.get("FLASH_CUTE_CHECK", "").lower() not in off


def have_values(*tensors: Tensor | None) -> bool:
    """Whether all tensors have values that Python may see: subclasses may have none, and so do meta
    tensors, those of vmap, and those of compiled code."""
    plain, functorch = (Tensor, torch.nn.Parameter), torch._C._functorch
    return not torch.compiler.is_compiling() and all(
        x is None
        or (
            type(x) in plain
            and not x.is_meta
            and not functorch.is_batchedtensor(x)
            and not functorch.is_functionaltensor(x)
        )
        for x in tensors
    )


def _have_memory(*tensors: Tensor) -> bool:
    """Whether they also have memory of their own: what torch.func wraps has not."""
    return have_values(*tensors) and not any(map(_is_wrapped, tensors))


def _is_wrapped(x: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def refusal_of_values(q: Tensor, k: Tensor, lengths: dict[str, Tensor | None]) -> Exception | None:
    """As `checks.refusal`, of the values of lengths, where there are any. It waits for the
    device."""
    values = {name: x.tolist() for name, x in lengths.items() if x is not None and have_values(x)}
    limits: dict[str, list[int]] = {}
    for name, x_name, x in (("cu_seqlens_q", "q", q), ("cu_seqlens_k", "k", k)):
        if lengths.get(name) is None:
            limits[x_name] = [x.shape[2]] * x.shape[0]
        if name not in values:
            continue
        ends = values[name]
        if ends[0] != 0:
            return ValueError(f"{name}[0] is {ends[0]}: it must be 0")
        for i, (before, after) in enumerate(itertools.pairwise(ends), 1):
            if after < before:
                return ValueError(
                    f"{name}[{i}] is {after}, after {before}: it must be at least that"
                )
        if ends[-1] != x.shape[0]:
            return ValueError(
                f"{name}[{len(ends) - 1}], the last, is {ends[-1]} and {x_name} has {x.shape[0]} "
                "tokens: they must be equal"
            )
        limits[x_name] = [after - before for before, after in itertools.pairwise(ends)]
    of_k = limits.get("k", [])
    for name, mosts in (
        ("seqused_q", limits.get("q", [])),
        ("seqused_k", of_k),
        ("key_start", values.get("seqused_k", of_k)),
    ):
        for b, (value, most) in enumerate(zip(values.get(name, ()), mosts, strict=False)):
            if not 0 <= value <= most:
                return ValueError(f"{name}[{b}] is {value}: it must be 0 to {most}")
    return None
