"""What becomes of a score ahead of the softmax: its changes and its mask. `reference` and the CPU
compute it by this file.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def visible_keys(
    rows: Tensor, len_k: int, window_left: int, window_right: int, diagonal_offset: int
) -> tuple[Tensor, Tensor]:
    """The mask: for each query row, the first key it sees and one past the last. Without a key, end
    <= begin.

    The diagonal is at key i + diagonal_offset of row i. The row sees from `window_left` keys before
    it to `window_right` keys after it; a window of -1 has no bound on its side. Both results never
    decrease from a row to the next.
    """
    level = rows + diagonal_offset
    begin = torch.zeros_like(rows) if window_left < 0 else (level - window_left).clamp(min=0)
    end = (
        torch.full_like(rows, len_k)
        if window_right < 0
        else (level + window_right + 1).clamp(max=len_k)
    )
    return begin, end


def visible_rows(
    keys: Tensor, len_q: int, window_left: int, window_right: int, diagonal_offset: int
) -> tuple[Tensor, Tensor]:
    """The mask's inverse: for each key, the first query row that sees it and one past the last.
    Without a row, end <= begin.

    It is `visible_keys` with the roles exchanged: the diagonal is at row j - diagonal_offset of key
    j, and the rows before it look to their right. Both results never decrease, so the rows that see
    any key of a block lie between `begin` of its first key and `end` of its last. Those between
    `begin` of its last key and `end` of its first see them all.
    """
    return visible_keys(keys, len_q, window_right, window_left, -diagonal_offset)


def visible_mask(
    len_q: int,
    len_k: int,
    window_left: int,
    window_right: int,
    diagonal_offset: int | Tensor,
    device: torch.device | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    key_start: Tensor | None = None,
) -> Tensor:
    """Which row sees which key, (Nq, Nk); with lengths, (B,) each, (B, 1, Nq, Nk). Row i of
    sequence b exists below seqused_q[b], and key j from key_start[b] to below seqused_k[b]."""
    rows, keys = (torch.arange(n, device=device) for n in (len_q, len_k))
    level = rows[:, None] + diagonal_offset
    visible = (keys >= per_sequence(key_start, 0)) & (keys < per_sequence(seqused_k, len_k))
    visible = visible & (rows[:, None] < per_sequence(seqused_q, len_q))
    if window_left >= 0:
        visible = visible & (keys >= level - window_left)
    if window_right >= 0:
        visible = visible & (keys <= level + window_right)
    return visible


def per_sequence(numbers: Tensor | None, default: int) -> int | Tensor:
    """Numbers of sequences, (B,), as they stand beside scores: (B, 1, 1, 1)."""
    return default if numbers is None else numbers.long().view(-1, 1, 1, 1)


def band_of(
    q: Tensor,
    k: Tensor,
    is_causal: bool,
    window_left: int,
    window_right: int,
    diagonal_offset: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[int, int, Any]:
    """The mask as `visible_mask` takes it: window_left, window_right, diagonal_offset. The diagonal
    ends in the bottom right corner by default, that of the lengths in use."""
    offset: Any = diagonal_offset
    if offset is None or is_causal:
        offset = per_sequence(seqused_k, k.shape[2]) - per_sequence(seqused_q, q.shape[2])
    return window_left, 0 if is_causal else window_right, offset


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The scale, which is 1/sqrt(D) by default."""
    return 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)


def change(
    scores: Tensor,
    diagonal_offset: int | Tensor = 0,
    *,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The changes of scaled scores (B, H, Nq, Nk), in this order: softcap * tanh(score / softcap),
    where it is not 0; + bias, which broadcasts; - slope * |i + diagonal_offset - j|, the distance
    to the diagonal, with slopes of heads (H,) or of sequences and heads (B, H).
    """
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape[2:])
        distance = (rows[:, None] + diagonal_offset - keys).abs()
        slopes = alibi_slopes.view(-1, scores.shape[1], 1, 1)
        scores = scores - slopes.to(torch.promote_types(slopes.dtype, scores.dtype)) * distance
    return scores
