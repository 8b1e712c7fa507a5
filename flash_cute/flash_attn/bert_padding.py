"""From padded batches (B, N, ...) to packed tokens (T, ...), and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices` (int64, (T,)) of x (R, ...): (T, ...)."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse: (first_axis_dim, ...), zeros where `indices` name no row."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch. Waits for the GPU, as the number of tokens is needed.

    Args:
        hidden_states: (B, N, ...).
        attention_mask: (B, N), bool or int: 1 for a token, 0 for padding.
        unused_mask: likewise 1 where there is room that is kept but not used.

    Returns:
        The rows that a mask names (T, ...); their indices among the B * N (int64); cu_seqlens (B +
        1,) int32; the longest sequence; the tokens of each sequence that are used (B,) int32.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (batch, seqlen, ...), zeros at padding."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *rows.shape[1:])
