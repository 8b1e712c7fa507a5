"""flash_cute behind PyTorch's flash attention on CUDA: `scaled_dot_product_attention` with that
backend, and `torch.nn.attention.varlen.varlen_attn`.

The ops of SDPA take (B, H, N, D), the others (B, N, H, D), or (T, H, D) with cum_seq_*. All align
causal masks to the bottom right corner; SDPA calls them only where Nq = Nk. A call that flash_cute
does not serve goes to PyTorch's kernel. So does its backward, where a random state matters: with
dropout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flash_cute
from flash_cute import checks, layouts, ops

#: What an op's function gives for a call that it does not serve.
UNSERVED = None

#: Which one our kernels write for no random state.
Random = tuple[Tensor, Tensor, Tensor]


def _serves(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **tensors: Tensor | None) -> bool:
    """Whether flash_cute takes these, and its kernels the other `tensors` of a call."""
    later = (name for name, x in tensors.items() if x is not None and name in checks.NOT_ON_GPUS)
    return (
        dropout_p == 0
        and not (q.is_cuda and any(later))
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and 0 < q.shape[-1] == v.shape[-1] <= HEAD_DIM
    )


def _no_random(q: Tensor) -> Random:
    """The state of no dropout and the matrix of no debugging. PyTorch's kernel leaves the first two
    unwritten, too."""
    state = q.new_empty((2,), dtype=torch.uint64)
    return state, q.new_empty((), dtype=torch.uint64), q.new_empty((0,))


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...] | None:
    """_scaled_dot_product_flash_attention."""
    if return_debug_mask or not _serves(query, key, value, dropout_p):
        return UNSERVED
    out, lse = flash_cute.forward(query, key, value, is_causal, scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *_no_random(query)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Any, ...] | None:
    """_scaled_dot_product_flash_attention_backward."""
    if not _serves(query, key, value, dropout_p):
        return UNSERVED
    grads = ops.bwd(
        *(grad_out, query, key, value, out, logsumexp),
        softmax_scale=scale,
        window_right=0 if is_causal else -1,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return tuple(grads[:3])


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Any, ...] | None:
    """_flash_attention_forward. `num_splits` asks for bits that do not depend on the batch."""
    unserved = (alibi_slopes, block_table, num_splits)
    if return_debug_mask or any(x is not None for x in unserved):
        return UNSERVED
    lengths = {"cu_seqlens_q": cum_seq_q, "seqused_k": seqused_k}
    if not _serves(query, key, value, dropout_p, **lengths):
        return UNSERVED
    window = (window_size_left, window_size_right)
    options = layouts.options_of(is_causal, scale, window, seqused_k=seqused_k)
    if cum_seq_q is not None:
        hints = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
        options |= hints if out is None else {**hints, "out": out}
        results = layouts.packed(query, key, value, cum_seq_q, cum_seq_k, options)
    else:
        if out is not None:
            options["out"] = out.transpose(1, 2)
        results = layouts.dense(query, key, value, options)
    return *results, *_no_random(query)


def flash_forward_into(out: Tensor, *args: Any, **keywords: Any) -> Tensor | None:
    """_flash_attention_forward_no_dropout_inplace."""
    results = flash_forward(*args, **keywords, out=out)
    return UNSERVED if results is None else results[1]


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...] | None:
    """_flash_attention_backward."""
    if not _serves(query, key, value, dropout_p, cu_seqlens_q=cum_seq_q):
        return UNSERVED
    window = (window_size_left, window_size_right)
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = layouts.options_of(is_causal, scale, window, deterministic=deterministic)
    grads = layouts.backward(
        grad_out, query, key, value, out, logsumexp, options, cum_seq_q, cum_seq_k
    )
    return tuple(grads)


#: The greatest head dim that was built.
HEAD_DIM = max(ops.build_info()["head_dims"])

OPS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
}

_libraries: dict[str, torch.library.Library] = {}


def _override(name: str, ours: Callable[..., Any], key: str) -> Callable[..., Any]:
    try:
        kernel = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        kernel = None  # this torch has none for `key`

    def call(keyset: Any, *args: Any, **keywords: Any) -> Any:
        results = ours(*args, **keywords)
        if results is not UNSERVED:
            return results
        if kernel is None:
            raise NotImplementedError(f"neither flash_cute nor this torch serves aten::{name} so")
        return kernel.call_boxed(keyset, *args, **keywords)

    return call


def register(key: str = "CUDA") -> None:
    """Overrides the ops for a dispatch key."""
    if key in _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it overrides kernels is what was asked for
        for name, ours in OPS.items():
            if hasattr(torch.ops.aten, name):  # the last is new in torch 2.13
                library.impl(
                    name, _override(name, ours, key), key, with_keyset=True, allow_override=True
                )
    _libraries[key] = library
    if key == "CUDA" and _cudnn_is_first():
        warnings.warn(
            "PyTorch takes cuDNN before its flash backend, which is flash_cute now, on this GPU: "
            "call torch.backends.cuda.enable_cudnn_sdp(False), or use torch.nn.attention."
            "sdpa_kernel(SDPBackend.FLASH_ATTENTION)",
            stacklevel=3,
        )


def unregister() -> None:
    """The kernels that were there are back."""
    for library in _libraries.values():
        library._destroy()
    _libraries.clear()


def _cudnn_is_first() -> bool:
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return torch.cuda.get_device_capability()[0] in (9, 10)
