"""The public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function

from flash_cute import checks, ops, sharding
from flash_cute.autograd import below_autograd
from flash_cute.transforms import autocast

# Looked up once, as they are needed in each call.
_fwd: Callable[..., tuple[Tensor, Tensor]] = ops.fwd._op  # spares OpOverload.__call__
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_functorch_level = torch._C._functorch.maybe_current_level
_has_function_mode = torch._C._is_torch_function_mode_enabled


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    deterministic: bool | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention: softmax(softmax_scale * q @ k^T) @ v for each head, without the matrix of
    scores in memory.

    The algorithm is FlashAttention-2's (Dao, "FlashAttention-2: Faster Attention with Better
    Parallelism and Work Partitioning", 2023); `flash_cute.reference` spells it out.

    Args:
        q: (B, Hq, Nq, D), fp16 or bf16 on a GPU of compute capability 8.0 or newer; on the CPU fp32
            and fp64 too. Any strides and storage offset. D is 1 to 256, Nq at most 2**30 - 2**12.
        k: (B, Hkv, Nk, D), of q's dtype and device. Hq must be a multiple of Hkv: query head h
            reads head h // (Hq // Hkv) of k and v (grouped-query and multi-query attention; nothing
            is repeated in memory).
        v: as k.
        is_causal: query i sees only the keys j <= i + Nk - Nq (aligned to the bottom right corner;
            PyTorch's SDPA aligns to the top left, which is the same where Nq = Nk).
        softmax_scale: any finite number; 1 / sqrt(D) if None.
        deterministic: whether the gradients are to be the same bits each time; None follows
            `torch.are_deterministic_algorithms_enabled()` when they are computed. That takes longer
            on a GPU, where otherwise q's gradient is summed in any order; those of k and v, and on
            the CPU all, are always the same.
        arch: for tests and benchmarks, the kernels that are to run: "sm80" (on every GPU from
            Ampere on) or "sm90" (on Hopper alone, where they are the default).

    Returns:
        out: q's shape and dtype, with the strides of `torch.empty_like(q)`: dense, its dimensions
            in the order in which q's lie in memory. So a projection (B, N, H, D), transposed to
            (B, H, N, D), comes back ready to be viewed as (B, N, H * D).
        softmax_lse: (B, Hq, Nq), fp32, contiguous: the natural logarithm of the sum of the
            exponentials of a row's scaled scores.

        A row that sees no key has out = 0 and softmax_lse = -inf.

        Both results are differentiable in q, k and v. A gradient has the dtype of its tensor and
        the strides of `torch.empty_like` of it. There are no second derivatives and no forward-mode
        ones.

    Raises:
        TypeError: an argument's type or dtype is not one of those above.
        ValueError: shapes or devices do not go together, the scale is NaN or infinite, or the GPU
            is too old, or not one that runs `arch`.
        RuntimeError: this build or driver cannot serve the call. The driver is too old, the head
            dim was left out of the build, or there are 2^31 tiles or more. Likewise if the kernels
            of `arch` were not built, or cannot read these tensors or take this scale.
        NotImplementedError: an input carries a forward-mode tangent. Taking a second derivative
            raises it, too.

    Under `torch.autocast` the inputs are cast as those of PyTorch's SDPA are. Work is queued on the
    current stream of q's device; nothing waits for it.
    """
    if (
        not _is_dynamo_compiling()  # first, as Dynamo cannot trace the others
        and type(q) is type(k) is type(v) is Tensor
        and type(is_causal) is bool
        and (softmax_scale is None or type(softmax_scale) is float)
        and arch is None
        and deterministic is None
        and forward_ad._current_level < 0
        and _functorch_level() is None
        and not _has_function_mode()
    ):
        # A plain call, the fastest way: past the op's autograd unless there are gradients, and if
        # the op refuses it, `refusal` finds out why. Each keyword takes time.
        keywords: dict[str, Any] = {"window_right": 0} if is_causal else {}
        if softmax_scale is not None:
            keywords["softmax_scale"] = softmax_scale
        try:
            if q.requires_grad or k.requires_grad or v.requires_grad:
                return _fwd(q, k, v, **keywords)
            with below_autograd():
                return _fwd(q, k, v, **keywords)
        except Exception:
            q, k, v = autocast(q), autocast(k), autocast(v)
            error = checks.refusal(q, k, v, is_causal, softmax_scale)
            if error is None:
                raise
        raise error

    q, k, v = autocast(q), autocast(k), autocast(v)
    error = checks.refusal(q, k, v, is_causal, softmax_scale, arch, deterministic)
    error = error or checks.refusal_of_derivatives(q, k, v)
    if error is not None:
        if any(isinstance(x, torch.fx.Proxy) for x in (q, k, v)):
            # torch.fx.symbolic_trace takes the call down; it is checked when it is made.
            keywords = {"deterministic": deterministic, "arch": arch}
            return handle_torch_function(
                forward, (q, k, v), q, k, v, is_causal, softmax_scale, **keywords
            )
        raise error
    sharding.register()
    # The causal mask's offset is left to the op: torch.jit.trace would keep that of the lengths
    # that it has seen. Likewise the scale: torch.compile would guard its head dim.
    results: tuple[Tensor, Tensor] = ops.fwd(
        *(q, k, v),
        softmax_scale=None if softmax_scale is None else float(softmax_scale),
        window_right=0 if is_causal else -1,
        deterministic=deterministic,
        tuning=None if arch is None else f"arch={arch.removeprefix('sm')}",
    )
    return results
