"""FlashAttention-2's functions.

q is (B, Nq, Hq, D), k and v are (B, Nk, Hkv, D); packed: (T, H, D), with int32 `cu_seqlens_*` (B +
1,) that say where sequences begin. dtypes, devices and errors are those of `flash_cute.forward`
and `forward_varlen`. All masks align to the bottom right corner. Options:

    dropout_p       must be 0, else NotImplementedError
    softmax_scale   1 / sqrt(D) if None
    causal          query i sees keys j <= i + Nk - Nq
    window_size     (left, right): query i sees keys from i + Nk - Nq - left to i + Nk - Nq + right;
                    below 0: no limit
    softcap         scores become softcap * tanh(score / softcap); 0: none
    alibi_slopes    (Hq,) or (B, Hq), fp32: -slope * abs(i + Nk - Nq - j) is added to a score
    deterministic   gradients have the same bits each time
    learnable_sink  (Hq,), beyond FlashAttention-2: a score that each softmax of a head has besides
    max_seqlen_*    hints, which never change a result
    block_table     must be None, else NotImplementedError

With `return_attn_probs` the result is (out, softmax_lse, None): there are no probabilities in
memory. softmax_lse is (B, Hq, Nq), packed (Hq, T), fp32. It is -inf for a row without keys, where
FlashAttention-2 has inf. With ALiBi under a causal mask FlashAttention-2 adds to all scores of a
row, and so to its softmax_lse, slope * (i + Nk - Nq); it is not added here.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flash_cute
from flash_cute import checks, layouts
from flash_cute.flash_attn._private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from flash_cute.layouts import Window, check_dims, check_head_dims, refuse
from flash_cute.options import have_values, looks_at_values, refusal_of_memory
from flash_cute.transforms import autocast

# The package has the private functions as custom ops besides. `forward` is one already.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

Result = Tensor | tuple[Tensor, Tensor, None]
#: What arguments of `forward` are called in its errors (`layouts.dense`).
CACHES = {
    "k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "key_start": "cache_leftpad",
}  # fmt: skip


def _result(results: tuple[Tensor, Tensor], return_attn_probs: bool) -> Result:
    return (*results, None) if return_attn_probs else results[0]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Attention of q (B, Nq, Hq, D) on k and v (B, Nk, Hkv, D). Returns out, as q."""
    refuse(dropout_p=dropout_p)
    check_head_dims(q, v)
    options = layouts.options_of(
        causal, softmax_scale, window_size, softcap, deterministic,
        alibi_slopes=alibi_slopes, learnable_sink=learnable_sink,
    )  # fmt: skip
    return _result(layouts.dense(q, k, v, options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of kv (B, Nk, 2, Hkv, D)."""
    check_dims("(B, N, 2, H, D)", kv=kv)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv (B, N, 3, H, D)."""
    check_dims("(B, N, 3, H, D)", qkv=qkv)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Attention of packed sequences, q (Tq, Hq, D) on k and v (Tk, Hkv, D). Returns out, as q."""
    refuse(dropout_p=dropout_p, block_table=block_table)
    check_head_dims(q, v)
    options = layouts.options_of(
        causal, softmax_scale, window_size, softcap, deterministic,
        alibi_slopes=alibi_slopes, learnable_sink=learnable_sink,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    results = layouts.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    return _result(results, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of kv (Tk, 2, Hkv, D)."""
    check_dims("(T, 2, H, D)", kv=kv)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv (T, 3, H, D)."""
    check_dims("(T, 3, H, D)", qkv=qkv)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, Nq, Hq, D) on contiguous caches (Bc, Nc, Hkv, D), after k and v have been
    appended to them in place.

    Args:
        k, v: None, or (B, Nnew, Hkv, D). They go to the tokens from `cache_seqlens` on, which must
            lie within the cache.
        cache_seqlens: tokens in the caches before that, an int or (B,) int32; None: all of Nc.
        cache_batch_idx: (B,): which of the Bc sequences is whose; these are copied. None: B = Bc.
        cache_leftpad: (B,) int32: the first token of a cache that counts; None: 0.
        num_splits, rotary_interleaved: change nothing.

    Returns:
        out (B, Nq, Hq, D), with return_softmax_lse also the log-sum-exp (B, Hq, Nq). They have no
        gradients, as in FlashAttention-2. Nothing waits for the GPU.
    """
    refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, block_table=block_table)
    check_dims("(B, N, H, D)", q=q)
    check_head_dims(q, v_cache)
    options = layouts.options_of(
        causal, softmax_scale, window_size, softcap,
        alibi_slopes=alibi_slopes, key_start=cache_leftpad,
    )  # fmt: skip
    caches = k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx
    results = dense_with_caches(q, *caches, options)
    return results if return_softmax_lse else results[0]


def dense_with_caches(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """`layouts.dense` of q (B, Nq, Hq, D) and caches, after `append`."""

    def check(keys: Tensor, values: Tensor, **lengths: Tensor) -> None:
        queries, keys, values = layouts.heads_first(q, keys, values)
        layouts.check(flash_cute.forward, queries, keys, values, {**options, **lengths}, CACHES)

    new, lengths = (k, v), (cache_seqlens, cache_batch_idx)
    k_cache, v_cache, used = append(k_cache, v_cache, *new, *lengths, q.shape[0], check)
    return layouts.dense(q, k_cache, v_cache, {**options, **used}, CACHES)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    batch: int,
    check: Callable[..., None],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Writes k and v into the caches, once all fits. Returns the caches of the `batch` sequences
    of q, and as seqused_k their lengths (B,) int32, if not all is used. check(k_cache, v_cache,
    seqused_k) raises what is wrong with the call; its caches have no values."""
    check_dims("(B, N, H, D)", k_cache=k_cache, v_cache=v_cache)
    if v_cache.shape[:3] != k_cache.shape[:3]:
        wanted = f"it must be {tuple(k_cache.shape[:3])}, as k_cache's, and a head dim"
        raise ValueError(f"v_cache has shape {tuple(v_cache.shape)}: {wanted}")
    if (k is None) != (v is None):
        raise ValueError("of k and v one is None: both must be given, or none")
    rows = cache_batch_idx
    if rows is None:
        rows = torch.arange(k_cache.shape[0], device=k_cache.device)
    layouts.check_integers("cache_batch_idx", rows)
    if cache_batch_idx is not None:
        if rows.shape != (batch,):
            wanted = f"it must be {(batch,)}, one for each sequence of q"
            raise ValueError(f"cache_batch_idx has shape {tuple(rows.shape)}: {wanted}")
        _check_values("cache_batch_idx", rows, k_cache.shape[0] - 1)
    elif k_cache.shape[0] != batch:
        wanted = "they must be equal, or cache_batch_idx given"
        raise ValueError(f"k_cache has {k_cache.shape[0]} sequences and q has {batch}: {wanted}")
    used = cache_seqlens
    if isinstance(used, bool):
        raise TypeError(f"cache_seqlens is {used}: it must be an int or a tensor")
    if isinstance(used, (int, numbers.Integral)):
        _check_values("cache_seqlens", int(used), k_cache.shape[1])
        used = torch.full(rows.shape, int(used), dtype=torch.int32, device=k_cache.device)
    if used is not None:
        layouts.check_integers("cache_seqlens", used, "an int, or ")
        if used.shape != rows.shape:
            shape = tuple(used.shape)
            raise ValueError(f"cache_seqlens has shape {shape}: it must be {tuple(rows.shape)}")
    if k is not None and v is not None:
        if used is None:
            raise ValueError("k is given and cache_seqlens is None: it says where k goes")
        _check_new(k, v, k_cache, v_cache, batch)
        _check_values("cache_seqlens", cache_seqlens, k_cache.shape[1] - k.shape[1])
        tokens = used[:, None] + torch.arange(k.shape[1], device=k_cache.device)
        used = (used + k.shape[1]).int()
        scalars = (autocast(x.new_empty(())) for x in (k_cache, v_cache))
        sizes = ((batch, *x.shape[1:]) for x in (k_cache, v_cache))
        check(*(x.expand(size) for x, size in zip(scalars, sizes, strict=True)), seqused_k=used)
        k_cache[rows[:, None], tokens] = k
        v_cache[rows[:, None], tokens] = v
    else:
        _check_values("cache_seqlens", cache_seqlens, k_cache.shape[1])
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    return k_cache, v_cache, {} if used is None else {"seqused_k": used.int()}


def _check_values(name: str, x: int | Tensor | None, most: int) -> None:
    """Raises a ValueError if a number is not within 0 to `most`. Tensors on a GPU are looked at
    with FLASH_CUTE_CHECK=1."""
    if isinstance(x, Tensor):
        if not have_values(x) or (x.is_cuda and not looks_at_values()):
            return
        for index, number in enumerate(x.tolist()):
            if not 0 <= number <= most:
                raise ValueError(f"{name}[{index}] is {number}: it must be 0 to {most}")
    elif x is not None and not 0 <= x <= most:
        raise ValueError(f"{name} is {x}: it must be 0 to {most}")


def _check_new(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: int) -> None:
    """Raises a TypeError or ValueError if k and v do not fit the caches."""
    check_dims("(B, N, H, D)", k=k, v=v)
    inputs = {"k": k, "v": v}
    for name, cache in (("v_cache", v_cache), ("k_cache", k_cache)):
        if (error := refusal_of_memory(name, cache, inputs)) is not None:
            raise error
        inputs[name] = cache
    if k.shape[:2] != v.shape[:2] or k.shape[0] != batch:
        shapes = f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}"
        raise ValueError(f"{shapes}: they must have {batch} sequences, of one length")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.shape[2:] != cache.shape[2:]:
            wanted = f"its heads and head dim must be the cache's, {tuple(cache.shape[2:])}"
            raise ValueError(f"{name} has shape {tuple(x.shape)}: {wanted}")
        if x.dtype != cache.dtype or x.device != cache.device:
            wanted = f"{checks.name_of(cache.dtype)} on {cache.device}, as {name}_cache"
            given = f"{checks.name_of(x.dtype)} on {x.device}"
            raise TypeError(f"{name} is {given}: it must be {wanted}")
