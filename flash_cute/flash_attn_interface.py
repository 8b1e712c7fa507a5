"""FlashAttention-3's functions (the module flash_attn_interface, 3.0) on flash_cute's kernels.

Layouts and options are as in flash_attn/flash_attn_interface.py; the order of arguments differs. v
may have a head dim of its own. More options:

    seqused_q, seqused_k        (B,) int32: the rows of each sequence that count
    qv, *_descale, attention_chunk, page_table, rotary_cos, rotary_sin, cu_seqlens_k_new
                                must be None or 0, else NotImplementedError
    num_splits, pack_gqa, sm_margin, scheduler_metadata
                                change nothing: flash_cute has its own choice
    rotary_interleaved, rotary_seqlens
                                change nothing without rotary_cos

With `return_attn_probs` the result is (out, softmax_lse).
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

import flash_cute
from flash_cute import checks, layouts
from flash_cute.flash_attn.flash_attn_interface import CACHES, append, dense_with_caches
from flash_cute.layouts import Window, refuse
from flash_cute.options import refusal_of_memory

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Attention of q (B, Nq, Hq, D) on k (B, Nk, Hkv, D) and v (B, Nk, Hkv, Dv). Returns out, (B,
    Nq, Hq, Dv)."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(attention_chunk=attention_chunk)
    options = layouts.options_of(
        causal, softmax_scale, window_size, softcap, deterministic, learnable_sink=learnable_sink
    )
    results = layouts.dense(q, k, v, options)
    return results if return_attn_probs else results[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv: (B, N, 3, H, D); or (B, N, Hq + 2 * Hkv, D), where Hq is
    num_heads_q."""
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv is {checks.shown(qkv)}: it must be a torch.Tensor")
    integers = (numbers.Integral, torch.SymInt, Tensor, type(None))
    if isinstance(num_heads_q, bool) or not isinstance(num_heads_q, integers):
        raise TypeError(f"num_heads_q is {checks.shown(num_heads_q)}: it must be an int or None")
    if qkv.dim() == 5:
        layouts.check_dims("(B, N, 3, H, D)", qkv=qkv)
        q, k, v = qkv.unbind(2)
    elif (
        num_heads_q is not None
        and qkv.dim() == 4
        and 0 < num_heads_q < qkv.shape[2]
        and (qkv.shape[2] - num_heads_q) % 2 == 0
    ):
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], 2)
    else:
        shape = f"qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q}"
        raise ValueError(
            f"{shape}: it must be (B, N, 3, H, D), or (B, N, num_heads_q + 2 * Hkv, D)"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Attention of packed sequences, q (Tq, Hq, D) on k (Tk, Hkv, D) and v (Tk, Hkv, Dv). Returns
    out, (Tq, Hq, Dv)."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(attention_chunk=attention_chunk)
    options = layouts.options_of(
        causal, softmax_scale, window_size, softcap, deterministic, learnable_sink=learnable_sink,
        seqused_q=seqused_q, seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    results = layouts.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    return results if return_attn_probs else results[0]


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """As FlashAttention-2's (flash_attn/flash_attn_interface.py), for a dense q; with
    `cu_seqlens_q` q is packed, (T, Hq, D), and so is the result."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(attention_chunk=attention_chunk, page_table=page_table)
    refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cu_seqlens_k_new=cu_seqlens_k_new)
    layouts.check_dims("(B, N, H, D)" if cu_seqlens_q is None else "(T, H, D)", q=q)
    options = layouts.options_of(
        causal, softmax_scale, window_size, softcap, key_start=cache_leftpad
    )
    caches = k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx
    if cu_seqlens_q is None:
        results = dense_with_caches(q, *caches, options)
    else:
        layouts.check_dims("(B + 1)", cu_seqlens_q=cu_seqlens_q)
        batch = max(0, cu_seqlens_q.shape[0] - 1)
        begins = torch.arange(batch + 1, dtype=torch.int32, device=q.device)

        def check(keys: Tensor, values: Tensor, **lengths: Tensor) -> None:
            ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": begins * keys.shape[1]}
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # one value: no copies
            given = {**options, **ends, **lengths}
            layouts.check(flash_cute.forward_varlen, q, keys, values, given, CACHES)

        k_cache, v_cache, used = append(*caches, batch, check)
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        options |= {"max_seqlen_q": max_seqlen_q, **used}
        ends = begins * k_cache.shape[1]
        results = layouts.packed(q, keys, values, cu_seqlens_q, ends, options, CACHES)
    return results if return_softmax_lse else results[0]


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of splits of the keys, from out_partial (splits, B, N, H, D) and
    lse_partial (splits, B, N, H), by `flash_cute.merge`: (B, N, H, D), of out_dtype (by default
    that of out_partial), and (B, N, H). With `out` it is written there."""
    layouts.check_dims("(splits, B, N, H, D)", out_partial=out_partial)
    layouts.check_shape("lse_partial", lse_partial, out_partial.shape[:-1])
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"out_dtype is {checks.shown(dtype)}: it must be a torch.dtype or None")
    outs = out_partial.to(torch.promote_types(out_partial.dtype, dtype)).transpose(2, 3).unbind()
    merged, lse = flash_cute.merge(outs, lse_partial.transpose(2, 3).unbind())
    merged = merged.transpose(1, 2).to(dtype)
    if out is not None:
        layouts.check_like("out", out, merged)
        if (error := refusal_of_memory("out", out, {})) is not None:
            raise error
        merged = out.copy_(merged)
    return merged, lse.transpose(1, 2)


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """None, which `flash_attn_with_kvcache` takes as `scheduler_metadata`: flash_cute plans in each
    call."""


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, None, None]:
    """(out, softmax_lse, None, None), dense or packed: there are no parts of split-KV to give.
    Beside what all functions here refuse, it refuses new keys and `kv_batch_idx`."""
    refuse(k_new=k_new, v_new=v_new, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new)
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(page_table=page_table, kv_batch_idx=kv_batch_idx, attention_chunk=attention_chunk)
    refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary)
    window = (window_size_left, window_size_right)
    options: dict[str, Any] = layouts.options_of(
        causal, softmax_scale, window, softcap, seqused_k=seqused_k, key_start=leftpad_k
    )
    if cu_seqlens_q is None:
        refuse(cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
        if out_ is not None:
            layouts.check_dims("(B, N, H, D)", out_=out_)
            options["out"] = out_.transpose(1, 2)
        return *layouts.dense(q, k, v, options, {"out": "out_"}), None, None
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if seqused_q is not None:
        options["seqused_q"] = seqused_q
    if out_ is not None:
        options["out"] = out_
    names = {"out": "out_"}
    return *layouts.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, options, names), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> None:
    """Writes the gradients of `_flash_attn_forward` to those of dq, dk and dv that are given.
    ("sequed" is the module's spelling.)"""
    window = (window_size_left, window_size_right)
    options = layouts.options_of(
        is_causal, softmax_scale, window, softcap, deterministic,
        seqused_q=sequed_q, seqused_k=sequed_k,
    )  # fmt: skip
    gradients = layouts.backward(
        dout, q, k, v, out, softmax_lse, options, cu_seqlens_q, cu_seqlens_k
    )
    layouts.write((dq, dk, dv), gradients)
