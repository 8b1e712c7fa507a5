"""What `forward` accepts: one list of rules, each with its message. Those for what else than q, k
and v there is are in options.py.

A plain call on a GPU does not come here. The op refuses what is unsafe, and then `refusal` says
why. All other calls (traced, transformed, on the CPU) ask `refusal` first.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_cute import ops

MAX_LENGTH = ops.build_info()["max_length"]
MAX_HEAD_DIM = ops.build_info()["max_head_dim"]
#: Of float32 on GPUs.
MAX_HEAD_DIM_FP32 = ops.build_info()["max_head_dim_fp32"]
GPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: What `arch` may be.
ARCHS = ("sm80", "sm90")

#: What to use instead where flash_cute cannot.
SDPA = "torch.nn.functional.scaled_dot_product_attention"

#: Why derivatives are refused, and what helps.
NO_DOUBLE_BACKWARD = (
    "a second derivative of flash_cute.forward is taken, and it has first ones alone; use "
    f"{SDPA} under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)
NO_TANGENT = (
    "flash_cute.forward has no forward-mode derivative; call it on primals alone "
    f"(torch.autograd.forward_ad.unpack_dual), or use {SDPA}"
)


def refusal(
    q: Any,
    k: Any,
    v: Any,
    is_causal: Any = False,
    softmax_scale: Any = None,
    arch: Any = None,
    deterministic: Any = None,
    *,
    is_packed: bool = False,
) -> Exception | None:
    """The first reason for which `forward` cannot take these arguments, to be raised; else None.
    With `is_packed`, `forward_varlen`."""
    tensors = (("q", q), ("k", k), ("v", v))
    for name, x in tensors:
        if not isinstance(x, Tensor):
            return TypeError(f"{name} is {type_of(x)}: it must be a torch.Tensor")
        if (error := refusal_of_layout(name, x)) is not None:
            return error
        if x.dim() != (3 if is_packed else 4):
            dims = (
                "3 dimensions, (tokens, heads, head dim), as cu_seqlens_q is given"
                if is_packed
                else "4 dimensions, (batch, heads, length, head dim)"
            )
            return ValueError(f"{name} has shape {tuple(x.shape)}: it must have {dims}")

    for name, x in tensors[1:]:
        if x.device != q.device:
            devices = f"{name} is on {x.device} and q on {q.device}"
            return ValueError(f"{devices}: they must be on the same device")
        if x.dtype != q.dtype:
            dtypes = f"{name} is {name_of(x.dtype)} and q is {name_of(q.dtype)}"
            return TypeError(f"{dtypes}: they must have the same dtype")
    if (reason := why_not(q.device, q.dtype)) is not None:
        kind, text = reason
        text = f"q is {name_of(q.dtype)} on {q.device}: {text}"
        return TypeError(text) if kind == "dtype" else ValueError(text)

    most = max_head_dim(q.device.type, q.dtype)
    there = f" for float32 on GPUs; cast it, or use {SDPA}" if most < MAX_HEAD_DIM else ""
    if not 0 < q.shape[-1] <= most:
        shape = f"{q.shape[-1]} (shape {tuple(q.shape)})"
        return ValueError(f"q has head dim {shape}: it must be 1 to {most}{there}")
    if not 0 < v.shape[-1] <= most:
        shape = f"{v.shape[-1]} (shape {tuple(v.shape)})"
        return ValueError(f"v has head dim {shape}: it must be 1 to {most}{there}")
    length = 0 if is_packed else 2
    equal = [
        ("k", k, "q", q, -1, "head dim"),
        ("v", v, "k", k, 1, "number of heads"),
        ("v", v, "k", k, length, "length"),
    ]
    if not is_packed:
        equal[:0] = [(name, x, "q", q, 0, "batch size") for name, x in tensors[1:]]
    for name, x, other_name, other, dim, what in equal:
        if x.shape[dim] != other.shape[dim]:
            this = f"{name} has {what} {x.shape[dim]} (shape {tuple(x.shape)})"
            that = f"{other_name} has {other.shape[dim]} (shape {tuple(other.shape)})"
            return ValueError(f"{this} and {that}: they must be equal")
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q % heads_kv != 0 if heads_kv > 0 else heads_q != 0:
        heads = f"q has {heads_q} heads and k and v have {heads_kv}"
        return ValueError(f"{heads}: q's must be a multiple of k's and v's")
    for name, x in tensors[:2]:
        # Of a dynamic length this would become a limit. The op asks again.
        is_known = not torch.compiler.is_compiling() and isinstance(x.shape[length], int)
        if is_known and x.shape[length] > MAX_LENGTH:
            return ValueError(
                f"{name} has length {x.shape[length]}: it must be at most {MAX_LENGTH}"
            )

    if not isinstance(is_causal, bool):
        return TypeError(f"is_causal is {shown(is_causal)}: it must be True or False")
    if softmax_scale is not None and not is_real(softmax_scale):
        allowed = "a float, an int, or None for 1/sqrt(D)"
        return TypeError(f"softmax_scale is {shown(softmax_scale)}: it must be {allowed}")
    if softmax_scale is not None and not is_finite(softmax_scale):
        return ValueError(f"softmax_scale is {shown(softmax_scale)}: it must be finite")
    if deterministic is not None and not isinstance(deterministic, bool):
        allowed = "True, False, or None for torch.are_deterministic_algorithms_enabled()"
        return TypeError(f"deterministic is {shown(deterministic)}: it must be {allowed}")
    return None if arch is None else _refusal_of_arch(arch, q.device)


def refusal_of_layout(name: str, x: Tensor) -> Exception | None:
    """As `refusal`, if a tensor is nested or sparse."""
    if not x.is_nested and x.layout == torch.strided:
        return None
    kind, mend = ("nested", "pad it") if x.is_nested else (name_of(x.layout), "call to_dense()")
    return TypeError(f"{name} is a {kind} tensor: it must be dense; {mend}, or use {SDPA}")


def max_head_dim(device_type: str, dtype: torch.dtype) -> int:
    is_fp32 = device_type == "cuda" and dtype == torch.float32
    return MAX_HEAD_DIM_FP32 if is_fp32 else MAX_HEAD_DIM


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """Of the LSE to a q (B, H, N, D) or packed (T, H, D)."""
    return tuple(q.shape[:3]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def out_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Of the output: q's, with v's head dim."""
    return (*q.shape[:-1], v.shape[-1])


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """The output, dense, in q's order of dimensions. Where v has another head dim than q, that lies
    innermost. An empty one is contiguous then."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    if any(isinstance(size, int) and size == 0 for size in (*q.shape, v.shape[-1])):
        return q.new_empty(out_shape(q, v))
    return torch.empty_like(q.as_strided(out_shape(q, v), (*q.stride()[:-1], 0)))


def refusal_of_derivatives(tensors: dict[str, Tensor | None]) -> Exception | None:
    """As `refusal`, if there is a forward-mode tangent."""
    for name, x in tensors.items():
        if x is not None and has_tangent(x):
            return NotImplementedError(f"{name} carries a forward-mode tangent: {NO_TANGENT}")
    return None


def refusal_of_results(
    q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Exception | None:
    """As `refusal`, of what else the backward gets: the forward's results and their gradients."""
    for name, x, shape, dtype in (
        ("out", out, out_shape(q, v), q.dtype),
        ("softmax_lse", lse, lse_shape(q), torch.float32),
        ("dout", dout, out_shape(q, v), q.dtype),
        ("dlse", dlse, lse_shape(q), torch.float32),
    ):
        if x is not None and x.shape != shape:
            return ValueError(f"{name} has shape {tuple(x.shape)}: it must be {tuple(shape)}")
        if x is not None and x.dtype != dtype:
            return TypeError(f"{name} is {name_of(x.dtype)}: it must be {name_of(dtype)}")
        if x is not None and x.device != q.device:
            return ValueError(f"{name} is on {x.device} and q on {q.device}: they must be the same")
    return None


def has_tangent(x: Tensor) -> bool:
    if forward_ad._current_level < 0:  # no forward mode is under way, by forward_ad or torch.func
        return False
    if torch._C._functorch.is_batchedtensor(x):
        return False  # or it cannot be asked for: the op asks, which vmap shows what is within
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call, unused-ignore]


#: SymFloat and SymInt are computed from sizes in non-strict torch.export.
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)


def is_real(scale: Any) -> bool:
    if isinstance(scale, _NUMBERS):
        return not isinstance(scale, bool)
    is_traced = _is_number_of_compiler(scale) or _is_number_of_trace(scale)
    return is_traced or isinstance(scale, numbers.Real)  # as NumPy's scalars are


def is_finite(scale: Any) -> bool:
    if not isinstance(scale, _NUMBERS):
        if _is_number_of_compiler(scale):
            return True  # it has no value yet: the op asks
        try:
            scale = float(scale)  # NumPy would compare in the scalar's own dtype
        except OverflowError:
            return False
    # Of sys.float_info.max Dynamo would make a variable, and compile the graph twice.
    return bool(-1.7976931348623157e308 <= scale <= 1.7976931348623157e308)


def _is_number_of_compiler(scale: Any) -> bool:
    """Whether it is what torch.compile makes of NumPy's scalars: an array of no dimensions."""
    is_array = torch.compiler.is_compiling() and not isinstance(scale, Tensor)
    return is_array and getattr(scale, "ndim", None) == 0


def _is_number_of_trace(scale: Any) -> bool:
    """Whether it is what torch.jit.trace makes of sizes: a tensor of no dimensions."""
    return (
        isinstance(scale, Tensor)
        and bool(torch.jit.is_tracing())  # type: ignore[attr-defined]
        and scale.ndim == 0
        and (scale.is_floating_point() or scale.dtype == torch.int64)
        and not scale.requires_grad
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """As torch.compiler's, which would import all of Dynamo: seconds, and 75 MB."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable_compile(function: Function) -> Function:
    """As torch.compiler.disable, likewise: Dynamo breaks the graph and does not trace it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@assume_constant_result
def why_not(device: torch.device, dtype: torch.dtype) -> tuple[str, str] | None:
    """What is wrong, "dtype" or "device", and the reason, if such tensors are not served; else
    None."""
    if device.type not in ("cuda", "cpu", "meta") or (device.type == "cuda" and torch.version.hip):
        return "device", f"flash_cute serves CUDA GPUs and the CPU; use {SDPA}"
    dtypes = GPU_DTYPES if device.type == "cuda" else CPU_DTYPES
    if dtype not in dtypes:
        use_instead = f"; cast it, or use {SDPA}" if dtype.is_floating_point else ""
        *most, last = map(name_of, dtypes)
        return "dtype", f"on this device it can be {', '.join(most)} or {last}{use_instead}"
    if (gpu := _gpu(device)) is not None and gpu[0] < 8:
        return "device", f"this GPU ({gpu[1]}) is too old: 8.0 (Ampere) is the least; use {SDPA}"
    return None


def _refusal_of_arch(arch: Any, device: torch.device) -> Exception | None:
    """As `refusal`, of an `arch` that is not None."""
    allowed = ", ".join(map(repr, ARCHS)) + " or None for the default"
    if not isinstance(arch, str):
        return TypeError(f"arch is {shown(arch)}: it must be {allowed}")
    if arch not in ARCHS:
        return ValueError(f"arch is {arch!r}: it must be {allowed}")
    if device.type == "cpu":
        return ValueError(
            f"arch is {arch!r} and q is on cpu: it must be None there, as it chooses among the "
            "GPU's kernels"
        )
    gpu = _gpu(device)
    if arch == "sm90" and gpu is not None and gpu[0] != 9:
        return ValueError(
            f"arch is 'sm90' and q is on {device} ({gpu[1]}): it must be 'sm80' or None"
        )
    return None


@assume_constant_result
def _gpu(device: torch.device) -> tuple[int, str] | None:
    """The major compute capability and a description of a GPU; else None."""
    # Without a GPU here only fake tensors can be on one, and any will do for them.
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def name_of(x: torch.dtype | torch.layout) -> str:
    return str(x).removeprefix("torch.")


def shown(x: Any) -> str:
    """The argument's type and, where it is short, its value."""
    text = repr(x)
    return type_of(x) + (f" ({text})" if len(text) <= 40 else "")


def type_of(x: Any) -> str:
    kind = type(x)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
