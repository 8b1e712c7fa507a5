"""FlashAttention-2's private functions, which ring attention calls. Arguments are as in
flash_attn_interface.py.
"""

from __future__ import annotations

from torch import Tensor

from flash_cute import layouts
from flash_cute.layouts import check_head_dims, refuse


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """(out, softmax_lse, None, None): there are no probabilities, and no state of dropout."""
    refuse(dropout_p=dropout_p)
    check_head_dims(q, v)
    window = (window_size_left, window_size_right)
    options = layouts.options_of(causal, softmax_scale, window, softcap, alibi_slopes=alibi_slopes)
    return *layouts.dense(q, k, v, options), None, None


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """As `_flash_attn_forward`, of packed sequences."""
    refuse(dropout_p=dropout_p, block_table=block_table)
    check_head_dims(q, v)
    window = (window_size_left, window_size_right)
    options = layouts.options_of(
        causal, softmax_scale, window, softcap, alibi_slopes=alibi_slopes, key_start=leftpad_k,
        seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return *layouts.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, options), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """Writes the gradients to those of dq, dk and dv that are given. `out` and `softmax_lse` may be
    of more keys than k has. The sums that the package returns, of dout * out, are not kept."""
    refuse(dropout_p=dropout_p)
    check_head_dims(q, v)
    window = (window_size_left, window_size_right)
    options = layouts.options_of(
        causal, softmax_scale, window, softcap, deterministic, alibi_slopes=alibi_slopes
    )
    gradients = layouts.backward(dout, q, k, v, out, softmax_lse, options)
    layouts.write((dq, dk, dv), gradients)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """As `_flash_attn_backward`, of packed sequences."""
    refuse(dropout_p=dropout_p)
    check_head_dims(q, v)
    layouts.check_integers("cu_seqlens_q", cu_seqlens_q)
    window = (window_size_left, window_size_right)
    options = layouts.options_of(
        causal, softmax_scale, window, softcap, deterministic, alibi_slopes=alibi_slopes
    )
    gradients = layouts.backward(
        dout, q, k, v, out, softmax_lse, options, cu_seqlens_q, cu_seqlens_k
    )
    layouts.write((dq, dk, dv), gradients)
