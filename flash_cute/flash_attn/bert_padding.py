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


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """As `index_first_axis`, and x itself: its gradient is the sum of both."""
    return index_first_axis(x, indices), x


class IndexFirstAxis:
    """FlashAttention's names for these functions: `IndexFirstAxis.apply(x, indices)`."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    apply = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    apply = staticmethod(index_first_axis_residual)


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

    Raises:
        ValueError: attention_mask has another shape than (B, N).
    """
    shapes = hidden_states.shape[:2], attention_mask.shape
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"attention_mask has shape {tuple(shapes[1])}: it must be {tuple(shapes[0])}, "
            "(B, N) of hidden_states"
        )
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs the tokens of a padded batch whose rows have several sequences each. `pad_input` is the
    inverse. Waits for the GPU.

    Args:
        hidden_states: (B, N, ...). In each row the sequences follow each other from the start, and
            padding follows the last.
        attention_mask_in_length: (B, N), int: the lengths of a row's sequences, in order; zeros say
            nothing. [[2, 3, 0, 0, 0, 0]] is a row of two sequences and one token of padding.

    Returns:
        The tokens of all sequences (T, ...); their indices among the B * N (T,) int64; cu_seqlens
        (S + 1,) int32 of the S sequences of the batch; the longest sequence.

    Raises:
        ValueError: a row's sequences are longer than N.
    """
    ends = attention_mask_in_length.sum(-1, keepdim=True)
    if torch.any(ends > hidden_states.shape[1]):
        raise ValueError(
            "attention_mask_in_length has a row whose sequences are longer than hidden_states' "
            f"{hidden_states.shape[1]} tokens"
        )
    columns = torch.arange(hidden_states.shape[1], device=ends.device)
    tokens, indices, *_ = unpad_input(hidden_states, columns < ends)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return tokens, indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (batch, seqlen, ...), zeros at padding."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *rows.shape[1:])
