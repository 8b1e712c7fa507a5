"""What `forward` accepts. `op_arguments` runs before every call, so it is a handful of attribute
reads; `refuse` runs only when that says no, finds the first reason and raises it in one sentence.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: Sequence lengths from here on are refused: the kernels count rows and keys in 32 bits.
MAX_LENGTH = 2**30
MAX_HEAD_DIM = 256
#: The largest finite scale. Comparing with it refuses NaN and infinities, and integers beyond it.
MAX_SCALE = sys.float_info.max

#: What to use instead where flash_cute cannot.
SDPA = "torch.nn.functional.scaled_dot_product_attention"

#: Why derivatives are refused, and what helps.
NO_BACKWARD = (
    "flash_cute.forward has no backward yet; call it under torch.no_grad() or on detached tensors, "
    f"or use {SDPA}"
)
NO_TANGENT = (
    "flash_cute.forward has no derivative yet; call it on primals alone "
    f"(torch.autograd.forward_ad.unpack_dual), or use {SDPA}"
)

GPU_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


#: What `arch` may be, and the op's number for it.
ARCHS = {"sm80": 80, "sm90": 90}


def op_arguments(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, softmax_scale: float | None
) -> tuple[float | int | None, ...] | None:
    """What the op takes beyond q, k and v: scale, window_left, window_right, diagonal_offset. None
    if an argument does not keep to the contract of `forward`.

    A causal mask's offset, Nk - Nq, is left to the op (None): torch.jit.trace would keep that of
    the lengths that it has seen.
    """
    if not are_dense_tensors(q, k, v):
        return None
    shape_q, shape_k = q.shape, k.shape
    if len(shape_q) != 4 or len(shape_k) != 4:
        return None
    batch_q, heads_q, len_q, head_dim_q = shape_q
    batch_k, heads_kv, len_k, head_dim_k = shape_k
    dtype, device = q.dtype, q.device
    if not (
        shape_k == v.shape
        and batch_q == batch_k
        and head_dim_q == head_dim_k
        and 0 < head_dim_q <= MAX_HEAD_DIM
        and (heads_q % heads_kv == 0 if heads_kv > 0 else heads_q == 0)
        # While tracing this would become a limit on dynamic shapes. The op checks it again.
        and (torch.compiler.is_compiling() or (len_q < MAX_LENGTH and len_k < MAX_LENGTH))
        and dtype == k.dtype == v.dtype
        and device == k.device == v.device
        and why_not(device, dtype) is None
        and isinstance(is_causal, bool)
        and (softmax_scale is None or _is_valid_scale(softmax_scale))
        and not wants_derivative(q, k, v)
    ):
        return None
    scale = 1.0 / math.sqrt(head_dim_q) if softmax_scale is None else float(softmax_scale)
    return (scale, -1, 0, None) if is_causal else (scale, -1, -1, 0)


def wants_derivative(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a gradient is wanted, or there is a forward-mode tangent."""
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return True
    # Level -1: no forward-mode differentiation is under way, by forward_ad or torch.func.
    return forward_ad._current_level >= 0 and any(map(_has_tangent, (q, k, v)))


def are_dense_tensors(q: Any, k: Any, v: Any) -> bool:
    """Whether all are tensors of which shape and strides can be asked."""
    return (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and q.layout is k.layout is v.layout is torch.strided
        and not (q.is_nested or k.is_nested or v.is_nested)
    )


def _is_valid_scale(scale: Any) -> bool:
    if isinstance(scale, bool):
        return False
    # The latter come of sizes in non-strict torch.export; asking makes them constants, guarded.
    if not isinstance(scale, (float, int, torch.SymFloat, torch.SymInt)):
        if torch.compiler.is_compiling() and _is_number_in_array(scale):
            return True  # it has no value yet; the op asks whether it is finite
        # NumPy's scalars are real numbers, but asking takes long.
        if not isinstance(scale, numbers.Real) and not _is_number_of_trace(scale):
            return False
        try:
            scale = float(scale)  # NumPy would compare in the scalar's own dtype
        except OverflowError:
            return False
    return bool(-MAX_SCALE <= scale <= MAX_SCALE)


def _is_number_in_array(scale: Any) -> bool:
    """Whether it is what torch.compile makes of NumPy's scalars: an array of no dimensions."""
    return not isinstance(scale, Tensor) and getattr(scale, "ndim", None) == 0


def _is_number_of_trace(scale: Any) -> bool:
    """Whether it is what torch.jit.trace makes of sizes: a tensor of no dimensions."""
    return (
        isinstance(scale, Tensor)
        and bool(torch.jit.is_tracing())  # type: ignore[attr-defined]
        and scale.ndim == 0
        and (scale.is_floating_point() or scale.dtype == torch.int64)
        and not scale.requires_grad
    )


def _has_tangent(x: Tensor) -> bool:
    if torch._C._functorch.is_batchedtensor(x):
        return False  # or it cannot be asked for: the op asks, which vmap shows what is within
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call, unused-ignore]


Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """As torch.compiler's, which would import all of Dynamo: seconds, and 75 MB."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Without the decorator torch.compile would trace into the cache, and warn of it.
@assume_constant_result
def why_not(device: torch.device, dtype: torch.dtype) -> tuple[str, str] | None:
    """What is wrong, "dtype" or "device", and the reason, if such tensors are not served; else
    None."""
    return _why_not(device, dtype)


@functools.cache
def _why_not(device: torch.device, dtype: torch.dtype) -> tuple[str, str] | None:
    if device.type not in ("cuda", "cpu", "meta") or (device.type == "cuda" and torch.version.hip):
        return "device", f"flash_cute serves CUDA GPUs and the CPU; use {SDPA}"
    dtypes = GPU_DTYPES if device.type == "cuda" else CPU_DTYPES
    if dtype not in dtypes:
        use_instead = f"; cast it, or use {SDPA}" if dtype.is_floating_point else ""
        *most, last = map(_name, dtypes)
        return "dtype", f"on this device it can be {', '.join(most)} or {last}{use_instead}"
    # Without a GPU here only fake tensors can be on one, and any will do for them.
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            gpu = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
            return "device", f"this GPU ({gpu}) is too old: 8.0 (Ampere) is the least; use {SDPA}"
    return None


def arch_number(arch: Any, device: torch.device) -> int:
    """The op's number for `arch`, which is not None, or the reason against it."""
    allowed = ", ".join(map(repr, ARCHS)) + " or None for the default"
    if not isinstance(arch, str):
        raise TypeError(f"arch is {_shown(arch)}: it must be {allowed}")
    if arch not in ARCHS:
        raise ValueError(f"arch is {arch!r}: it must be {allowed}")
    if device.type == "cpu":
        raise ValueError(
            f"arch is {arch!r} and q is on cpu: it must be None there, as it chooses among the "
            "GPU's kernels"
        )
    if arch == "sm90" and (gpu := gpu_that_is_not_hopper(device)) is not None:
        raise ValueError(f"arch is 'sm90' and q is on {device} ({gpu}): it must be 'sm80' or None")
    return ARCHS[arch]


@assume_constant_result
def gpu_that_is_not_hopper(device: torch.device) -> str | None:
    """The GPU's name and compute capability if the sm90 kernels do not run on it, else None."""
    # Without a GPU here only fake tensors can be on one, and any will do for them.
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return None if major == 9 else f"{name}, compute capability {major}.{minor}"


def refuse(q: Any, k: Any, v: Any, is_causal: Any, softmax_scale: Any) -> NoReturn:
    """Raises the first reason for which `forward` cannot take these arguments."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: it must be a torch.Tensor")
        if not are_dense_tensors(x, x, x):
            kind = "nested" if x.is_nested else _name(x.layout)
            mend = "pad it" if x.is_nested else "call to_dense()"
            raise TypeError(f"{name} is a {kind} tensor: it must be dense; {mend}, or use {SDPA}")
        if x.dim() != 4:
            dims = "4 dimensions, (batch, heads, length, head dim)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must have {dims}")
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            devices = f"{name} is on {x.device} and q on {q.device}"
            raise ValueError(f"{devices}: they must be on the same device")
        if x.dtype != q.dtype:
            dtypes = f"{name} is {_name(x.dtype)} and q is {_name(q.dtype)}"
            raise TypeError(f"{dtypes}: they must have the same dtype")
    if (refusal := why_not(q.device, q.dtype)) is not None:
        what, reason = refusal
        text = f"q is {_name(q.dtype)} on {q.device}: {reason}"
        # Not one `raise` of either: Dynamo cannot raise a class that it is handed.
        if what == "dtype":
            raise TypeError(text)
        raise ValueError(text)

    if not 0 < q.shape[3] <= MAX_HEAD_DIM:
        shape = f"{q.shape[3]} (shape {tuple(q.shape)})"
        raise ValueError(f"q has head dim {shape}: it must be 1 to {MAX_HEAD_DIM}")
    must_be_equal = [
        ("k", k, "q", q, 0, "batch size"),
        ("v", v, "q", q, 0, "batch size"),
        ("k", k, "q", q, 3, "head dim"),
        ("v", v, "q", q, 3, "head dim"),
        ("v", v, "k", k, 1, "number of heads"),
        ("v", v, "k", k, 2, "length"),
    ]
    for name, x, other_name, other, dim, what in must_be_equal:
        if x.shape[dim] != other.shape[dim]:
            this = f"{name} has {what} {x.shape[dim]} (shape {tuple(x.shape)})"
            that = f"{other_name} has {other.shape[dim]} (shape {tuple(other.shape)})"
            raise ValueError(f"{this} and {that}: they must be equal")
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q % heads_kv != 0 if heads_kv > 0 else heads_q != 0:
        heads = f"q has {heads_q} heads and k and v have {heads_kv}"
        raise ValueError(f"{heads}: q's must be a multiple of k's and v's")
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] >= MAX_LENGTH:
            raise ValueError(f"{name} has length {x.shape[2]}: it must be below 2**30")

    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal is {_shown(is_causal)}: it must be True or False")
    if softmax_scale is not None and not _is_valid_scale(softmax_scale):
        real = (numbers.Real, torch.SymFloat, torch.SymInt)
        is_real = isinstance(softmax_scale, real) and not isinstance(softmax_scale, bool)
        if is_real or _is_number_of_trace(softmax_scale):
            raise ValueError(f"softmax_scale is {_shown(softmax_scale)}: it must be finite")
        allowed = "a float, an int, or None for 1/sqrt(D)"
        raise TypeError(f"softmax_scale is {_shown(softmax_scale)}: it must be {allowed}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if _has_tangent(x):
            raise NotImplementedError(f"{name} carries a forward-mode tangent: {NO_TANGENT}")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} takes part in a gradient: {NO_BACKWARD}")
    raise AssertionError("forward refused arguments that are all valid")


def _name(x: torch.dtype | torch.layout) -> str:
    return str(x).removeprefix("torch.")


def _shown(x: Any) -> str:
    """The argument's type and, where it is short, its value."""
    text = repr(x)
    kind = type(x)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name}" + (f" ({text})" if len(text) <= 40 else "")
