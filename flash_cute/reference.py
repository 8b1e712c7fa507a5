"""Attention and its gradients as plain formulas, and the same things block by block: for reading
and for checking. The kernels compute so, forward and backward.

Shapes are those of `flash_cute.forward`: q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv),
out (B, Hq, Nq, Dv), lse (B, Hq, Nq). A gradient has the shape of its tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_cute.scores import (
    band_of,
    change,
    per_sequence,
    scale_of,
    visible_keys,
    visible_mask,
    visible_rows,
)

__all__ = [
    "attention",
    "attention_backward",
    "attention_backward_blockwise",
    "attention_blockwise",
    "in_use",
    "repeat_heads",
    "softmax",
    "sum_heads",
    "visible_keys",
    "visible_mask",
    "visible_rows",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    key_start: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q @ k^T) @ v and the log-sum-exp of the scaled scores, computed and returned
    in `dtype`.

    Takes memory for all Nq x Nk scores. The windows are those of `visible_keys`; diagonal_offset
    None is Nk - Nq, the bottom right corner. `is_causal` stands for window_right = 0 there.

    `scores.change` says what softcap, bias and slopes make of a score, `scores.visible_mask` what
    the lengths leave of a sequence. The sink is one more column of scores, whose value is 0. Rows
    past `seqused_q` have out = 0 and lse = -inf.
    """
    band = band_of(
        q, k, is_causal, window_left, window_right, diagonal_offset, seqused_q, seqused_k
    )
    lengths = seqused_q, seqused_k, key_start
    visible = visible_mask(q.shape[2], k.shape[2], *band, q.device, *lengths)
    q, k, v = (x.to(dtype) for x in in_use(q, k, v, *lengths))
    k, v = repeat_heads(k, q), repeat_heads(v, q)

    scores = (q @ k.mT) * scale_of(q, softmax_scale)  # (B, Hq, Nq, Nk)
    changes = {"softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias}
    scores = change(scores, band[2], **changes).masked_fill(~visible, -math.inf)  # type: ignore[arg-type]
    lse, weights = softmax(scores, learnable_sink, seqused_q)
    # A row without a key has out = 0.
    weights = weights.masked_fill(~visible, 0.0)
    return (weights @ v).masked_fill(~visible.any(-1, keepdim=True), 0.0), lse


def attention_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    dlse: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    key_start: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """The gradients (dq, dk, dv) of a loss whose gradients by `attention`'s results are dout and
    dlse, computed and returned in `dtype`. None stands for zeros. Behind them come dsink, if there
    is a sink, and dbias, if there is a bias.

    With T = scale * Q K^T, S what `change` makes of T, P = softmax(S), O = P V, and by each row LSE
    = logsumexp(S):

        dV = P^T dO
        dP = dO V^T
        dS = P * (dP - delta),  delta = rowsum(dO * O) - dLSE
        dT = dS * (1 - tanh(T / softcap)^2),  or dS without softcap
        dQ = scale * dT K
        dK = scale * dT^T Q
        dbias = dS, summed over what the bias broadcasts
        dsink = -sum of e^(sink - LSE) * delta over the rows of a head

    The row sums come of the softmax: dS = P * (dP - rowsum(P * dP)), and rowsum(P * dP) = dO V^T
    P^T = rowsum(dO * O). As d LSE / dS = P, a gradient by the LSE only shifts them. The sink is a
    column of S with dP = 0. A head of k and v gets the sum over the query heads that share it.
    """
    scale = scale_of(q, softmax_scale)
    band = band_of(
        q, k, is_causal, window_left, window_right, diagonal_offset, seqused_q, seqused_k
    )
    lengths = seqused_q, seqused_k, key_start
    visible = visible_mask(q.shape[2], k.shape[2], *band, q.device, *lengths)
    dout = q.new_zeros(*q.shape[:3], v.shape[3]) if dout is None else dout
    dlse = torch.zeros_like(q[..., 0]) if dlse is None else dlse
    dout, dlse = in_use(dout, k, v, *lengths)[0].to(dtype), dlse.to(dtype)
    q_heads, k_heads, v_heads = (x.to(dtype) for x in in_use(q, k, v, *lengths))
    k_heads, v_heads = repeat_heads(k_heads, q), repeat_heads(v_heads, q)

    uncapped = (q_heads @ k_heads.mT) * scale  # T
    changes = {"softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias}
    scores = change(uncapped, band[2], **changes).masked_fill(~visible, -math.inf)  # type: ignore[arg-type]
    lse, weights = softmax(scores, learnable_sink, seqused_q)
    weights = weights.masked_fill(~visible, 0.0)  # P
    # What a row without a key hands out is constant. Its dlse may be NaN, as those of functions of
    # -inf are; its dout must be finite. With a sink its LSE is the sink.
    dlse = torch.where(lse == -math.inf, 0.0, dlse)
    delta = (dout * (weights @ v_heads)).sum(-1) - dlse
    dweights = dout @ v_heads.mT  # dP
    dscores = weights * (dweights - delta[..., None])  # dS
    duncapped = dscores
    if softcap:
        duncapped = dscores * (1 - torch.tanh(uncapped / softcap) ** 2)
    dq = scale * (duncapped @ k_heads)
    dk = scale * (duncapped.mT @ q_heads)
    dv = weights.mT @ dout
    gradients = [dq, sum_heads(dk, k), sum_heads(dv, v)]
    if learnable_sink is not None:
        share = (learnable_sink.to(dtype)[:, None] - lse).exp().masked_fill(lse == -math.inf, 0.0)
        gradients.append(-(share * delta).sum((0, 2)))
    if bias is not None:
        gradients.append(dscores.sum_to_size(bias.shape))
    return tuple(gradients)


def attention_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    dtype: torch.dtype = torch.float32,
    block_m: int = 128,
    block_n: int = 64,
) -> tuple[Tensor, Tensor]:
    """`attention`, step by step as the kernels do it: a tile of `block_m` queries walks over the
    keys, `block_n` at a time, from the last visible block to the first, with online softmax in base
    2.

    A row keeps its running maximum m, its running sum of weights, and the weighted sum of V; all
    three are relative to m, so a greater maximum rescales what came before it. (The kernels' limit
    is a maximum with slack.)
    """
    len_q, len_k = q.shape[2], k.shape[2]
    scale = scale_of(q, softmax_scale)
    band = band_of(q, k, is_causal, window_left, window_right, diagonal_offset)
    q, k, v = q.to(dtype), repeat_heads(k, q).to(dtype), repeat_heads(v, q).to(dtype)
    # The scale's sign goes into Q, its size into the exponent: e^(scale * s) = 2^(scale_log2 * s).
    # So the greatest score is the greatest exponent, and a mask of -inf never meets a factor of 0
    # or below; of a scale of 0, the 0 goes into Q. A normal number of `dtype` is neither 0 nor inf.
    q = q * (math.copysign(1.0, scale) if scale != 0 else 0.0)
    smallest, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    scale_log2 = min(max(abs(scale) * math.log2(math.e), smallest), largest) if scale != 0 else 1.0

    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
    for m_begin in range(0, len_q, block_m):
        rows = torch.arange(m_begin, min(m_begin + block_m, len_q), device=q.device)
        begin, end = visible_keys(rows, len_k, *band)
        first_block = int(begin[0]) // block_n
        past_last_block = -(-max(0, int(end[-1])) // block_n)

        q_tile = q[:, :, rows]
        row_max = torch.full(q_tile.shape[:3], -math.inf, dtype=dtype, device=q.device)
        row_sum = torch.zeros_like(row_max)
        weighted_v = q.new_zeros(*q_tile.shape[:3], v.shape[3])
        for n_block in reversed(range(first_block, past_last_block)):
            keys = torch.arange(
                n_block * block_n, min((n_block + 1) * block_n, len_k), device=q.device
            )
            scores = q_tile @ k[:, :, keys].mT
            # Blocks that every row sees whole need no test of single elements.
            if int(begin[-1]) > int(keys[0]) or int(keys[-1]) >= int(end[0]):
                visible = (begin[:, None] <= keys) & (keys < end[:, None])
                scores = scores.masked_fill(~visible, -math.inf)

            new_max = torch.maximum(row_max, scores.amax(dim=-1))
            # A row that has seen no key yet has the maximum -inf; 0 in its place keeps -inf - -inf
            # (NaN) out.
            shift = new_max.masked_fill(new_max == -math.inf, 0.0)
            rescale = torch.exp2((row_max - shift) * scale_log2)
            weights = torch.exp2((scores - shift[..., None]) * scale_log2)
            row_sum = row_sum * rescale + weights.sum(dim=-1)
            weighted_v = weighted_v * rescale[..., None] + weights @ v[:, :, keys]
            row_max = new_max

        sees_key = row_sum != 0
        out[:, :, rows] = torch.where(sees_key[..., None], weighted_v / row_sum[..., None], 0.0)
        lse[:, :, rows] = (row_max * scale_log2 + torch.log2(row_sum)) * math.log(2.0)
    return out, lse


def attention_backward_blockwise(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    dlse: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = None,
    dtype: torch.dtype = torch.float32,
    block_m: int = 64,
    block_n: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward`, block by block, as kernels are to do it: a tile of `block_n` keys walks
    over the queries that see it, `block_m` at a time, in each query head of its group. `out` and
    `lse` are the forward's.

    The LSE is that of the whole row, so P = e^(S - LSE) comes at once: there is no running maximum
    and nothing is rescaled. A tile has dK and dV to itself. To dQ all tiles of the row add.
    """
    len_q, len_k = q.shape[2], k.shape[2]
    scale = scale_of(q, softmax_scale)
    band = band_of(q, k, is_causal, window_left, window_right, diagonal_offset)
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    # The query heads that share a head of k and v stand in a dimension of their own.
    group = (k.shape[1], -1) if k.shape[1] > 0 else (0, 1)
    q, dout, out, lse, dlse = (x.to(dtype).unflatten(1, group) for x in (q, dout, out, lse, dlse))
    k, v = k.to(dtype), v.to(dtype)

    # Preprocess: the two numbers that a step needs of a row, padded to whole blocks. LSE = +inf
    # makes P = 0 without a test, in the rows past the last and in those that see no key, whose dlse
    # may be NaN.
    no_key = lse == -math.inf
    delta = ((dout * out).sum(-1) - dlse).masked_fill(no_key, 0.0)
    lse_log2 = (lse * math.log2(math.e)).masked_fill(no_key, math.inf)
    padding = -len_q % block_m
    delta = pad(delta, (0, padding), value=0.0)
    lse_log2 = pad(lse_log2, (0, padding), value=math.inf)
    q, dout = (pad(x, (0, 0, 0, padding)) for x in (q, dout))

    # e^(scale * s - lse) = 2^(scale_log2 * s - lse_log2). Without a maximum the scale may have any
    # sign.
    scale_log2 = scale * math.log2(math.e)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for n_begin in range(0, len_k, block_n):
        keys = torch.arange(n_begin, min(n_begin + block_n, len_k), device=q.device)
        begin, end = visible_rows(keys, len_q, *band)
        first_block = int(begin[0]) // block_m
        past_last_block = -(-max(0, int(end[-1])) // block_m)

        k_tile, v_tile = k[:, :, keys], v[:, :, keys]
        for head in range(q.shape[2]):
            for m_block in range(first_block, past_last_block):
                rows = torch.arange(m_block * block_m, (m_block + 1) * block_m, device=q.device)
                q_block, dout_block = q[:, :, head, rows], dout[:, :, head, rows]

                # The mask goes onto the exponent: e^(s - lse) of a key that its row does not see
                # may be inf.
                scores = q_block @ k_tile.mT
                exponent = scores * scale_log2 - lse_log2[:, :, head, rows, None]
                # Blocks whose rows all see every key need no test of single elements.
                if int(begin[-1]) > int(rows[0]) or min(int(rows[-1]) + 1, len_q) > int(end[0]):
                    visible = (begin <= rows[:, None]) & (rows[:, None] < end)
                    exponent = exponent.masked_fill(~visible, -math.inf)
                weights = torch.exp2(exponent)

                dweights = dout_block @ v_tile.mT
                dscores = weights * (dweights - delta[:, :, head, rows, None])
                dv[:, :, keys] += weights.mT @ dout_block
                dk[:, :, keys] += dscores.mT @ q_block
                dq[:, :, head, rows] += dscores @ k_tile

    # The scale goes onto the sums: onto dS, it could leave fp16's range.
    return scale * dq[:, :, :, :len_q].flatten(1, 2), scale * dk, dv


def softmax(scores: Tensor, sink: Tensor | None, seqused_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """The LSE and the weights of masked scores (B, H, Nq, Nk). The sink, (H,), is one more column:
    it counts in both and has no weight of its own. Rows past `seqused_q` do not have it."""
    len_q, len_k = scores.shape[2:]
    if sink is not None:
        rows = torch.arange(len_q, device=scores.device)[:, None]
        column = sink.to(scores.dtype)[:, None, None]
        column = torch.where(rows < per_sequence(seqused_q, len_q), column, -math.inf)
        scores = torch.cat([scores, column.expand(*scores.shape[:3], 1)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    # A row without a key has lse = -inf, and weights of NaN, from -inf - -inf.
    weights = torch.softmax(scores, dim=-1).masked_fill((lse == -math.inf)[..., None], 0.0)
    return lse, weights[..., :len_k]


def in_use(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    key_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs with zeros where the lengths leave them out: NaN may stand there."""
    rows, keys = (torch.arange(x.shape[2], device=q.device)[:, None] for x in (q, k))
    unused_q = rows >= per_sequence(seqused_q, q.shape[2])
    unused_k = (keys >= per_sequence(seqused_k, k.shape[2])) | (keys < per_sequence(key_start, 0))
    return q.masked_fill(unused_q, 0), k.masked_fill(unused_k, 0), v.masked_fill(unused_k, 0)


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Each head of x, k or v, repeated for the query heads that share it."""
    if x.shape[1] == q.shape[1]:
        return x
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def sum_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """The inverse for a gradient: the sum over the query heads that share a head of x."""
    if gradient.shape[1] == x.shape[1]:
        return gradient
    total: Tensor = gradient.unflatten(1, (x.shape[1], -1)).sum(2)
    return total
