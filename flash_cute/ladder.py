"""From naive attention to FlashAttention-2, a rung at a time: for reading.

All functions compute the same, each by its own way through the keys:

    S = Q K^T / sqrt(D),  O = softmax(S) V,  LSE = logsumexp(S) of each row

Each adds one idea to the one before it. The last rung is FlashAttention-2, which is
`reference.attention_blockwise`. `python -m examples.ladder` climbs the ladder, beside the kernels.

Shapes are q (B, H, Nq, D), k (B, H, Nk, D), v (B, H, Nk, Dv), out (B, H, Nq, Dv), lse (B, H, Nq). A
causal mask is aligned to the bottom right corner. A row that sees no key has out = 0 and lse =
-inf. What is kept of each row is (B, H, Nq, 1): `row_max` (m in the papers) and `row_sum` (l, or
d).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_cute import reference
from flash_cute.scores import band_of


def naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """The formula as it stands (Vaswani et al. 2017, arXiv:1706.03762).

        l_i = sum_j e^S_ij,  O_i = sum_j e^S_ij V_j / l_i,  LSE_i = log l_i

    It keeps all Nq x Nk scores. e^S overflows: in fp32 from S = 89 on.
    """
    weights = torch.exp(_scores(q, k, is_causal))
    row_sum = weights.sum(-1, keepdim=True)
    return _divide(weights @ v, row_sum), row_sum.log().squeeze(-1)


def three_passes(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, block_n: int = 32
) -> tuple[Tensor, Tensor]:
    """Safe softmax (algorithm 2 of Milakov and Gimelshein 2018, arXiv:1805.02867).

        m_i = max_j S_ij,  l_i = sum_j e^(S_ij - m_i),  O_i = sum_j e^(S_ij - m_i) / l_i V_j

    No exponent is above 0, so nothing overflows. Scores are computed again in each pass, a block of
    keys at a time. So no more than a block of them is kept.
    """
    row_max, row_sum, out = _start(q, v)
    for keys in _blocks(k, block_n):
        row_max = torch.maximum(row_max, _scores(q, k, is_causal, keys=keys).amax(-1, keepdim=True))
    for keys in _blocks(k, block_n):
        weights = _exp(_scores(q, k, is_causal, keys=keys), row_max)
        row_sum += weights.sum(-1, keepdim=True)
    for keys in _blocks(k, block_n):
        weights = _exp(_scores(q, k, is_causal, keys=keys), row_max)
        out += _divide(weights, row_sum) @ v[:, :, keys]
    return out, _lse(row_max, row_sum)


def two_passes(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, block_n: int = 32
) -> tuple[Tensor, Tensor]:
    """Online softmax (algorithm 3 of Milakov and Gimelshein 2018, arXiv:1805.02867).

        m' = max(m, max_j S_ij),  l' = l e^(m - m') + sum_j e^(S_ij - m'),  j in the block

    A sum relative to m becomes one relative to m' by the factor e^(m - m'). So the sum need not
    wait for the maximum of the whole row. The second pass is the third of `three_passes`.
    """
    row_max, row_sum, out = _start(q, v)
    for keys in _blocks(k, block_n):
        scores = _scores(q, k, is_causal, keys=keys)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        row_sum = row_sum * _exp(row_max, new_max) + _exp(scores, new_max).sum(-1, keepdim=True)
        row_max = new_max
    for keys in _blocks(k, block_n):
        weights = _exp(_scores(q, k, is_causal, keys=keys), row_max)
        out += _divide(weights, row_sum) @ v[:, :, keys]
    return out, _lse(row_max, row_sum)


def one_pass(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, block_n: int = 32
) -> tuple[Tensor, Tensor]:
    """Online softmax of the weighted sum, too (Rabe and Staats 2021, arXiv:2112.05682).

        O' = O e^(m - m') + sum_j e^(S_ij - m') V_j,  and at the end O / l

    O is a sum of weights as l is, so the same factor rescales it. Nothing waits for the end of the
    row but one division.
    """
    row_max, row_sum, out = _start(q, v)
    for keys in _blocks(k, block_n):
        scores = _scores(q, k, is_causal, keys=keys)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        rescale = _exp(row_max, new_max)
        weights = _exp(scores, new_max)
        row_sum = row_sum * rescale + weights.sum(-1, keepdim=True)
        out = out * rescale + weights @ v[:, :, keys]
        row_max = new_max
    return _divide(out, row_sum), _lse(row_max, row_sum)


def chunks(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, block_n: int = 128
) -> tuple[Tensor, Tensor]:
    """Chunks of keys, each for itself, and then combined (Rabe and Staats 2021, arXiv:2112.05682).

        LSE_i = log sum_c e^LSE_ic,  O_i = sum_c e^(LSE_ic - LSE_i) O_ic,  c a chunk

    The order of keys does not matter, so chunks may run side by side. Flash-Decoding (Dao et al.
    2023) does so where queries are few: split-KV. It keeps an O and an LSE of each chunk.
    """
    _, _, no_out = _start(q, v)
    outs, lses = [no_out], [torch.full_like(q[..., :1], -math.inf)]  # those of no keys
    for keys in _blocks(k, block_n):
        scores = _scores(q, k, is_causal, keys=keys)
        row_max = scores.amax(-1, keepdim=True)
        weights = _exp(scores, row_max)
        row_sum = weights.sum(-1, keepdim=True)
        outs.append(_divide(weights @ v[:, :, keys], row_sum))
        lses.append(row_max + row_sum.log())
    of_chunks = torch.stack(lses)  # (chunks, B, H, Nq, 1)
    lse = torch.logsumexp(of_chunks, 0)
    return (_exp(of_chunks, lse) * torch.stack(outs)).sum(0), lse.squeeze(-1)


def flash_attention_1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    block_m: int = 32,
    block_n: int = 32,
) -> tuple[Tensor, Tensor]:
    """FlashAttention (algorithm 1 of Dao et al. 2022, arXiv:2205.14135).

        l' = l e^(m - m') + sum_j e^(S_ij - m')
        O' = (l e^(m - m') O + sum_j e^(S_ij - m') V_j) / l'

    Rows come in blocks as well, so a block of scores fits the chip's own memory. The outer loop is
    over K and V, each block of which is read once. The inner one is over Q. So O, m and l of all
    rows go to memory and come back at each key block, and O is divided each time.
    """
    row_max, row_sum, out = _start(q, v)
    for keys in _blocks(k, block_n):
        for rows in _blocks(q, block_m):
            scores = _scores(q, k, is_causal, rows, keys)
            old_max = row_max[:, :, rows]
            new_max = torch.maximum(old_max, scores.amax(-1, keepdim=True))
            weights = _exp(scores, new_max)
            old_sum = row_sum[:, :, rows] * _exp(old_max, new_max)
            new_sum = old_sum + weights.sum(-1, keepdim=True)
            new_out = old_sum * out[:, :, rows] + weights @ v[:, :, keys]
            row_max[:, :, rows], row_sum[:, :, rows] = new_max, new_sum
            out[:, :, rows] = _divide(new_out, new_sum)
    return out, _lse(row_max, row_sum)


def flash_attention_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    block_m: int = 32,
    block_n: int = 32,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (algorithm 1 of Dao 2023, arXiv:2307.08691).

        O' = O e^(m - m') + sum_j e^(S_ij - m') V_j,  and at the end O / l and LSE = m + log l

    The loops change places: a tile of rows walks over the keys. Its O, m and l stay on the chip. O
    is divided and written once, with LSE for m and l. Tiles share nothing, so they run side by
    side. Key blocks that the mask hides from the whole tile are left out. It goes from the last
    block to the first, in base 2: e^x = 2^(x log2 e). `reference.attention_blockwise` has the code.
    """
    return reference.attention_blockwise(
        q, k, v, is_causal, dtype=q.dtype, block_m=block_m, block_n=block_n
    )


RUNGS = (naive, three_passes, two_passes, one_pass, chunks, flash_attention_1, flash_attention_2)


def _blocks(x: Tensor, size: int) -> list[slice]:
    """The rows of x, `size` at a time. The last block may be shorter."""
    return [slice(begin, begin + size) for begin in range(0, x.shape[2], size)]


def _scores(
    q: Tensor, k: Tensor, is_causal: bool, rows: slice = slice(None), keys: slice = slice(None)
) -> Tensor:
    """S = Q K^T / sqrt(D) of some rows and keys, -inf where the mask hides the key from the row."""
    scores = (q[:, :, rows] / math.sqrt(q.shape[3])) @ k[:, :, keys].mT
    if not is_causal:
        return scores
    row, key = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    band = band_of(q, k, is_causal, -1, -1, None)
    _, end = reference.visible_keys(row[rows], len(key), *band)
    return scores.masked_fill(key[keys] >= end[:, None], -math.inf)


def _start(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """row_max, row_sum and out before the first key."""
    zero = torch.zeros_like(q[..., :1])
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    return torch.full_like(zero, -math.inf), zero, out


def _exp(scores: Tensor, row_max: Tensor) -> Tensor:
    """e^(S - m). A row that has seen no key has m = -inf. 0 in its place keeps -inf - -inf, which
    is NaN, out."""
    return torch.exp(scores - row_max.masked_fill(row_max == -math.inf, 0.0))


def _divide(out: Tensor, row_sum: Tensor) -> Tensor:
    """O / l, and 0 in a row that has seen no key."""
    return (out / row_sum).masked_fill(row_sum == 0, 0.0)


def _lse(row_max: Tensor, row_sum: Tensor) -> Tensor:
    """m + log l, -inf without a key."""
    return (row_max + row_sum.log()).squeeze(-1)
