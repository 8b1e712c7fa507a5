"""The public functions of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function

from flash_cute import checks, ops, options, sharding
from flash_cute.autograd import below_autograd, differentiable
from flash_cute.transforms import autocast

# Looked up once, as they are needed in each call.
_fwd: Callable[..., tuple[Tensor, Tensor]] = ops.fwd._op  # spares OpOverload.__call__
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_functorch_level = torch._C._functorch.maybe_current_level
_has_function_mode = torch._C._is_torch_function_mode_enabled
_has_autocast = torch._C._is_any_autocast_enabled
_is_tracing = torch._C._is_tracing
_is_grad_enabled = torch.is_grad_enabled

# Defaults, to be known again. Of a default 0.0 Dynamo would make a variable.
_OPEN, _OFF = (-1, -1), 0
Window = tuple["int | None", "int | None"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window_size: Window = _OPEN,
    softcap: float | None = _OFF,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    key_start: Tensor | None = None,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention: softmax(softmax_scale * q @ k^T) @ v for each head, without the matrix of
    scores in memory.

    The algorithm is FlashAttention-2's (Dao, "FlashAttention-2: Faster Attention with Better
    Parallelism and Work Partitioning", 2023); `flash_cute.reference` spells it out.

    Args:
        q: (B, Hq, Nq, D), fp16, bf16 or fp32, on a GPU of compute capability 8.0 or newer or on the
            CPU, and there fp64 too. Any strides and storage offset. D is 1 to 1024, in fp32 on a
            GPU 1 to 256. Nq is at most 2**30 - 2**12.
        k: (B, Hkv, Nk, D), of q's dtype and device. Hq must be a multiple of Hkv: query head h
            reads head h // (Hq // Hkv) of k and v (grouped-query and multi-query attention; nothing
            is repeated in memory).
        v: (B, Hkv, Nk, Dv), of k's dtype and device. Dv may differ from D, within the same limits;
            v may be a slice of k.
        is_causal: query i sees only the keys j <= i + Nk - Nq (aligned to the bottom right corner;
            PyTorch's SDPA aligns to the top left, which is the same where Nq = Nk).
        softmax_scale: any finite number; 1 / sqrt(D) if None.
        window_size: (left, right): query i sees only the keys from d - left to d + right, both
            included, where d = i + Nk - Nq is the key on its diagonal. -1 or None is open. With
            `is_causal`, right is 0: (W - 1, 0) then sees W keys.
        softcap: c > 0 makes c * tanh(s / c) of each scaled score s. 0 or None is off.
        alibi_slopes: (Hq,) or (B, Hq), fp32. slope * |d - j| is taken from the score of key j. They
            have no gradient.
        bias: (B, Hq, Nq, Nk), or 1 in place of some of these; q's dtype or fp32. It is added to the
            scores after `softcap`. -inf hides a key, unless k or v is NaN or Inf there.
        learnable_sink: (Hq,), fp32, fp16 or bf16 (or q's dtype): the score of one more key for each
            head, whose value is 0. Scale, softcap, bias and mask leave it alone.
        seqused_k: (B,), int32: sequence b has the keys below seqused_k[b], and Nk above stands for
            that number, so the diagonal ends at the last key in use. int64 is converted.
        key_start: (B,), int32: sequence b has the keys from key_start[b] on. The diagonal stays. No
            key outside of these bounds is read into a result; NaN may stand there.
        deterministic: whether the gradients are to be the same bits each time; None follows
            `torch.are_deterministic_algorithms_enabled()` when they are computed. That takes longer
            on a GPU, where otherwise q's gradient is summed in any order; those of k and v, and on
            the CPU all, are always the same.
        out: (B, Hq, Nq, Dv), of q's dtype (autocast's, within it) and device, which is written and
            returned. Not where gradients are asked for. It may be q, but shares no memory with
            another input.
        arch: for tests and benchmarks, the kernels that are to run: "sm80" (on every GPU from
            Ampere on) or "sm90" (on Hopper alone, where they are the default).

    Returns:
        out: (B, Hq, Nq, Dv), of q's dtype, with the strides of `torch.empty_like(q)` if Dv = D:
            dense, its dimensions in the order in which q's lie in memory (if Dv differs from D, Dv
            innermost). So for a projection (B, N, H, D), transposed to (B, H, N, D), it is ready to
            be viewed as (B, N, H * Dv).
        softmax_lse: (B, Hq, Nq), fp32, contiguous: the natural logarithm of the sum of the
            exponentials of a row's scores, as the softmax sees them; of the sink, too.

        A row that sees no key has out = 0, and softmax_lse = -inf or the sink.

        Both results are differentiable in q, k, v, bias and learnable_sink. A gradient has the
        shape and dtype of its tensor and the strides of `torch.empty_like` of it. There are no
        second derivatives and no forward-mode ones.

    Raises:
        TypeError: an argument's type or dtype is not one of those above.
        ValueError: shapes or devices do not go together, the scale is NaN or infinite, the softcap
            is too in float32, or below 0, a side of the window is below -1, alibi_slopes requires a
            gradient, or out is given where one is asked for, or shares memory as it must not, or
            the GPU is too old, or not one that runs `arch`.
        RuntimeError: this build or driver cannot serve the call. The driver is too old, the head
            dim was left out of the build, or there are 2^31 tiles or more. Likewise if the kernels
            of `arch` were not built, or cannot read these tensors or take this dtype or scale.
        NotImplementedError: an input carries a forward-mode tangent. Taking a second derivative
            raises it, too.

    Under `torch.autocast` the inputs are cast as those of PyTorch's SDPA are. Work is queued on the
    current stream of q's device; nothing waits for it. So the values of seqused_k and key_start are
    not checked. With FLASH_CUTE_CHECK=1 in the environment they are, which waits; a wrong one
    raises ValueError. In compiled code, or where vmap maps over them, they are not checked.
    """
    if (
        not _is_dynamo_compiling()  # first, as Dynamo cannot trace the others
        and type(q) is type(k) is type(v) is Tensor
        and type(is_causal) is bool
        and (softmax_scale is None or type(softmax_scale) is float)
        and (window_size is _OPEN or is_open(window_size))
        and (softcap is _OFF or softcap is None or (type(softcap) is float and softcap == 0.0))
        and alibi_slopes is bias is learnable_sink is seqused_k is key_start is out is None
        and deterministic is None
        and arch is None
        and forward_ad._current_level < 0
        and _functorch_level() is None
        and not _has_function_mode()
    ):
        # A plain call, the fastest way: past the op's Autograd key or, if there are gradients, to
        # what stands there without the dispatcher. If the op refuses the call, `refusal` finds out
        # why. Each keyword takes time.
        keywords: dict[str, Any] = {"window_right": 0} if is_causal else {}
        if softmax_scale is not None:
            keywords["softmax_scale"] = softmax_scale
        try:
            if _is_tracing():  # with gradients or without: its check compares lines of source
                return _fwd(q, k, v, **keywords)
            if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                if _has_autocast():
                    return _fwd(q, k, v, **keywords)
                return differentiable(keywords, q, k, v)
            with below_autograd():
                return _fwd(q, k, v, **keywords)
        except Exception:
            q, k, v = autocast(q), autocast(k), autocast(v)
            error = checks.refusal(q, k, v, is_causal, softmax_scale)
            if error is None:
                raise
        raise error

    return _general(
        forward,
        *(q, k, v),
        is_causal=is_causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        learnable_sink=learnable_sink,
        seqused_k=seqused_k,
        key_start=key_start,
        deterministic=deterministic,
        out=out,
        arch=arch,
    )


def is_open(window: Any) -> bool:
    """Whether the window is (-1, -1) in ints. Tensors might not be comparable."""
    is_pair = type(window) is tuple and len(window) == 2
    return is_pair and type(window[0]) is type(window[1]) is int and window == _OPEN


def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    window_size: Window = _OPEN,
    softcap: float | None = _OFF,
    alibi_slopes: Tensor | None = None,
    bias: None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    key_start: Tensor | None = None,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    """As `forward`, of sequences of any lengths that lie one after the other: packed.

    Args:
        q: (T, Hq, D), the queries of all sequences; otherwise as those of `forward`.
        k: (Tk, Hkv, D).
        v: (Tk, Hkv, Dv).
        cu_seqlens_q: (B + 1,), int32, on q's device: sequence b has the rows of q from
            cu_seqlens_q[b] to below cu_seqlens_q[b + 1]. The first is 0; none is below the one
            before; equal ones are an empty sequence. int64 is converted.
        cu_seqlens_k: the same of k and v; None means cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: the longest length, which other interfaces ask for. They change
            no result, right or wrong.
        seqused_q: (B,), int32: sequence b has only its first seqused_q[b] queries.
        seqused_k, key_start: (B,), int32, as in `forward`, counted from a sequence's first key.
        alibi_slopes: (Hq,) or (B, Hq).
        bias: must be None: packed sequences have none.
        is_causal, softmax_scale, window_size, softcap, learnable_sink, deterministic, out, arch: as
            in `forward`, with the lengths of each sequence in place of Nq and Nk.

    Returns:
        out: (T, Hq, Dv), as `forward`'s.
        softmax_lse: (Hq, T), fp32, contiguous.

        A row of q that no sequence has, beyond the last or beyond seqused_q, has out = 0 and
        softmax_lse = -inf.

    Raises:
        As `forward`. Of the values of lengths nothing is checked but with FLASH_CUTE_CHECK=1, which
        also wants cu_seqlens_q and cu_seqlens_k to end with T and Tk.

    A sequence's results depend on no other's tensors; NaN does not pass. Nothing waits for the
    device.
    """
    return _general(
        forward_varlen,
        *(q, k, v),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        is_causal=is_causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        learnable_sink=learnable_sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        key_start=key_start,
        deterministic=deterministic,
        out=out,
        arch=arch,
    )


def _general(
    function: Callable[..., Any], q: Any, k: Any, v: Any, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """A call of any kind. `arguments` are those of the public `function`."""
    tensors = _tensors_of(arguments)
    if not _is_dynamo_compiling() and _is_ordinary(function, (q, k, v), tensors, arguments):
        # As in `forward`: what is left to refuse, the op refuses.
        keywords = _keywords(arguments)
        try:
            inputs = q, k, v, *tensors.values()
            if _is_tracing() or any(x is not None and x.requires_grad for x in inputs):
                return _fwd(q, k, v, *tensors.values(), **keywords)
            with below_autograd():
                return _fwd(q, k, v, *tensors.values(), **keywords)
        except Exception:
            q, k, v = autocast(q), autocast(k), autocast(v)
            error = _refusal(function, q, k, v, tensors, arguments)
            if error is None:
                raise
        raise error

    given = q, k, v
    q, k, v = autocast(q), autocast(k), autocast(v)
    if isinstance(bias := tensors["bias"], Tensor) and bias.dtype != torch.float32:
        tensors["bias"] = autocast(bias)
    error = _refusal(function, q, k, v, tensors, arguments)
    if error is not None:
        if any(isinstance(x, torch.fx.Proxy) for x in given):
            # torch.fx.symbolic_trace takes the call down; it is checked when it is made.
            traced: tuple[Tensor, Tensor] = handle_torch_function(
                function, given, *given, **arguments
            )
            return traced
        _raise(error)
    sharding.register()
    results: tuple[Tensor, Tensor] = ops.fwd(
        *(q, k, v),
        *(tensors.values() if any(x is not None for x in tensors.values()) else ()),
        **_keywords(arguments),
    )
    out = arguments["out"]
    if out is None:
        return results
    with torch.no_grad():
        return out.copy_(results[0]), results[1]


def _raise(error: Exception) -> NoReturn:
    raise error


if torch.__version__ < "2.13":  # its Dynamo cannot raise an exception that it did not see made
    _raise = checks.disable_compile(_raise)


def _keywords(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the op."""
    left, right = map(options.side_of, arguments["window_size"])
    softmax_scale, softcap, arch = (arguments[x] for x in ("softmax_scale", "softcap", "arch"))
    # The diagonal's offset is left to the op: torch.jit.trace would keep that of the lengths that
    # it has seen. Likewise the scale: torch.compile would guard its head dim.
    return {
        "softmax_scale": None if softmax_scale is None else float(softmax_scale),
        "window_left": left,
        "window_right": 0 if arguments["is_causal"] else right,
        "softcap": float(softcap) if softcap else 0.0,
        "deterministic": arguments["deterministic"],
        "tuning": None if arch is None else f"arch={arch.removeprefix('sm')}",
    }


def _is_ordinary(
    function: Callable[..., Any],
    qkv: tuple[Any, ...],
    tensors: dict[str, Any],
    arguments: dict[str, Any],
) -> bool:
    """Whether all is plain, and nothing that the op would not refuse is wrong with it."""
    softcap, softmax_scale = arguments["softcap"], arguments["softmax_scale"]
    window, slopes = arguments["window_size"], tensors["alibi_slopes"]
    return (
        type(qkv[0]) is type(qkv[1]) is type(qkv[2]) is Tensor
        and _PLAIN.issuperset(map(type, tensors.values()))
        and (function is forward or _has_ends(qkv[0], qkv[1], arguments))
        and type(window) is tuple
        and len(window) == 2
        and all(
            side is None or (type(side) is int and -1 <= side <= checks.MAX_LENGTH)
            for side in window
        )
        and type(arguments["is_causal"]) is bool
        and (softmax_scale is None or type(softmax_scale) is float)
        and (softcap is None or (type(softcap) in (float, int) and options.is_softcap(softcap)))
        and (slopes is None or not slopes.requires_grad)
        and arguments["out"] is arguments["deterministic"] is arguments["arch"] is None
        and forward_ad._current_level < 0
        and _functorch_level() is None
        and not _has_function_mode()
        and not options.looks_at_values()
    )


def _has_ends(q: Tensor, k: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether cu_seqlens are given; those of q serve a k of as many tokens."""
    if arguments["cu_seqlens_k"] is None and k.shape[:1] != q.shape[:1]:
        return False
    return arguments["cu_seqlens_q"] is not None


def refusal(
    function: Callable[..., Any], q: Any, k: Any, v: Any, **arguments: Any
) -> Exception | None:
    """What `forward` or `forward_varlen` raises of a call; None if it is served."""
    defaults = dict.fromkeys(("softmax_scale", "cu_seqlens_k", "deterministic", "out", "arch"))
    given = {"is_causal": False, "window_size": _OPEN, "softcap": _OFF, **defaults, **arguments}
    inputs = autocast(q), autocast(k), autocast(v)
    return _refusal(function, *inputs, _tensors_of(given), given)


def _tensors_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those beyond q, k and v."""
    tensors = {name: arguments.get(name) for name in ops.OPTIONAL}
    if tensors["cu_seqlens_k"] is tensors["cu_seqlens_q"]:  # one for both stays one
        tensors["cu_seqlens_k"] = None
    for name in _LENGTHS:
        if tensors[name] is not None:
            tensors[name] = options.lengths_of(tensors[name])
    if tensors["cu_seqlens_k"] is None:
        tensors["cu_seqlens_k"] = tensors["cu_seqlens_q"]
    return tensors


_PLAIN = {Tensor, type(None)}
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "key_start")


def _refusal(
    function: Callable[..., Any],
    q: Any,
    k: Any,
    v: Any,
    tensors: dict[str, Any],
    arguments: dict[str, Any],
) -> Exception | None:
    """The first reason for which the call cannot be, to be raised; else None."""
    is_packed = function is forward_varlen
    if is_packed and not isinstance(tensors["cu_seqlens_q"], Tensor):
        given_q = checks.type_of(tensors["cu_seqlens_q"])
        return TypeError(f"cu_seqlens_q is {given_q}: it must be a torch.Tensor")
    scalars = (arguments[name] for name in ("is_causal", "softmax_scale", "arch", "deterministic"))
    error = checks.refusal(q, k, v, *scalars, is_packed=is_packed)
    softcap, out = arguments["softcap"], arguments["out"]
    if softcap is None:
        softcap = 0.0
    if is_packed and arguments["cu_seqlens_k"] is None and not error and k.shape[0] != q.shape[0]:
        return ValueError(
            f"k has {k.shape[0]} tokens, q has {q.shape[0]} and cu_seqlens_k is None: they must be "
            "equal, or cu_seqlens_k given"
        )
    given = {"q": q, "k": k, "v": v, **tensors}
    error = (
        error
        or options.refusal_of_window(arguments["window_size"])
        or options.refusal_of_softcap(softcap)
        or options.refusal_of_tensors(q, k, tensors)
        or (None if out is None else options.refusal_of_out(q, v, out, given))
        or options.refusal_of_gradients(given, out)
        or checks.refusal_of_derivatives(given)
    )
    if error is not None or _is_dynamo_compiling() or not options.looks_at_values():
        return error
    # As they were given: int64 has values that int32 has not.
    lengths = {name: arguments.get(name) for name in _LENGTHS}
    if lengths["cu_seqlens_k"] is None:
        lengths["cu_seqlens_k"] = lengths["cu_seqlens_q"]
    return options.refusal_of_values(q, k, lengths)
