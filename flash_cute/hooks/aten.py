"""flash_cute behind PyTorch's flash attention on CUDA: `scaled_dot_product_attention` with that
backend, and `torch.nn.attention.varlen.varlen_attn`.

The ops of SDPA take (B, H, N, D), the others (B, N, H, D), or (T, H, D) with cum_seq_*. All align
causal masks to the bottom right corner; SDPA calls them only where Nq = Nk. A call that flash_cute
does not serve goes to PyTorch's kernel. So does its backward, where a random state matters: with
dropout.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cute import ops

#: What an op's function gives for a call that it does not serve.
UNSERVED = None

#: Which one our kernels write for no random state.
Random = tuple[Tensor, Tensor, Tensor]

# The dispatcher is past autograd here, and PyTorch has checked the call: nothing else is needed.
_fwd: Callable[..., tuple[Tensor, ...]] = ops.fwd._op  # spares OpOverload.__call__
_bwd: Callable[..., tuple[Tensor, ...]] = ops.bwd._op

#: The greatest head dim that was built.
HEAD_DIM = max(ops.build_info()["head_dims"], default=0)


def _serves(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> bool:
    """PyTorch's flash backend has one head dim: out is as q in the ops' shape functions, and SDPA
    takes other backends where v's differs."""
    dtype = q.dtype
    return (
        dropout_p == 0
        and (dtype is torch.bfloat16 or dtype is torch.float16)
        and k.dtype is v.dtype is dtype
        and 0 < q.size(-1) == v.size(-1) <= HEAD_DIM
    )


def _no_random(q: Tensor) -> Random:
    """The state of no dropout and the matrix of no debugging. PyTorch's kernel leaves the first two
    unwritten, too."""
    device = q.device
    state = torch.empty(2, dtype=torch.uint64, device=device)
    return state, torch.empty((), dtype=torch.uint64, device=device), _nothing(device, q.dtype)


@functools.cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _band(
    is_causal: bool, scale: float | None, left: int | None = None, right: int | None = None
) -> dict[str, Any]:
    """Keywords of our ops; only what is no default, as each takes time."""
    keywords: dict[str, Any] = {}
    if scale is not None:
        keywords["softmax_scale"] = scale
    if left is not None and left >= 0:
        keywords["window_left"] = left
    if is_causal:
        keywords["window_right"] = 0
    elif right is not None and right >= 0:
        keywords["window_right"] = right
    return keywords


def _lengths(cum_seq_q: Tensor, cum_seq_k: Tensor | None) -> tuple[Any, ...]:
    """Those of `ops.OPTIONAL` up to cu_seqlens_k."""
    cum_seq_k = cum_seq_q if cum_seq_k is None else cum_seq_k
    return None, None, None, cum_seq_q.int(), cum_seq_k.int()


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
    out, lse = _fwd(query, key, value, **_band(is_causal, scale))
    return out, lse, None, None, query.size(2), key.size(2), *_no_random(query)


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
    keywords = _band(is_causal, scale)
    if torch.are_deterministic_algorithms_enabled():
        keywords["deterministic"] = True
    return _bwd(grad_out, query, key, value, out, logsumexp, **keywords)[:3]


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
) -> tuple[Any, ...] | None:
    """_flash_attention_forward. `num_splits` asks for bits that do not depend on the batch."""
    has_more = alibi_slopes is not None or block_table is not None or num_splits is not None
    if return_debug_mask or has_more or not _serves(query, key, value, dropout_p):
        return UNSERVED
    keywords = _band(is_causal, scale, window_size_left, window_size_right)
    if seqused_k is not None:
        keywords["seqused_k"] = seqused_k.int()
    if cum_seq_q is not None:
        out, lse = _fwd(query, key, value, *_lengths(cum_seq_q, cum_seq_k), **keywords)
    else:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out, lse = _fwd(q, k, v, **keywords)
        out = out.transpose(1, 2)
    return out, lse, *_no_random(query)


def flash_forward_into(out: Tensor, *args: Any, **keywords: Any) -> Tensor | None:
    """_flash_attention_forward_no_dropout_inplace: writes to `out`, and returns the log-sum-exp."""
    results = flash_forward(*args, **keywords)
    if results is UNSERVED:
        return UNSERVED
    out.copy_(results[0])
    lse: Tensor = results[1]
    return lse


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
    if not _serves(query, key, value, dropout_p):
        return UNSERVED
    keywords = _band(is_causal, scale, window_size_left, window_size_right)
    if torch.are_deterministic_algorithms_enabled():
        keywords["deterministic"] = True
    tensors = (grad_out, query, key, value, out)
    if cum_seq_q is not None:
        lengths = _lengths(cum_seq_q, cum_seq_k)
        return _bwd(*tensors, logsumexp, None, *lengths, **keywords)[:3]
    grads = _bwd(*(x.transpose(1, 2) for x in tensors), logsumexp, **keywords)
    return tuple(x.transpose(1, 2) for x in grads[:3])


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
