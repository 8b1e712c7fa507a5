"""Calls of sequences of their own lengths, for the emulated machine."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from emulator import Emulator
from support import random_inputs
from torch import Tensor

from flash_cute import reference, tolerance

#: Queries and keys of each sequence: none, one, a tile and one more, keys without queries and
#: queries without keys, more queries than keys.
LENGTHS = [
    [(5, 5), (0, 7), (130, 130), (1, 200), (70, 0)],
    [(64, 64), (128, 128), (129, 65)],
    [(1, n) for n in (3, 300, 1, 65, 64, 63, 2)],
]


def int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def unused(counts: Tensor, rows: int, start: Tensor | None = None) -> Tensor:
    """Whether a row is none of its sequence's, (B, rows)."""
    row = torch.arange(rows)
    after = row >= counts[:, None]
    return after if start is None else after | (row < start[:, None])


class Call:
    """Sequences as entries of a batch, padded, and where each of them lies packed. What no sequence
    has is NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        head_dim: int = 64,
        head_dim_v: int | None = None,
        heads: int = 2,
        heads_kv: int = 1,
        window: tuple[int, int] = (-1, -1),
        has_sink: bool = False,
        starts: bool = False,
        gap: int = 0,
        is_padded: bool = False,
        is_dense: bool = False,
        softcap: float = 0.0,
        slopes: str = "",
        bias: str = "",
        bias_dtype: torch.dtype = torch.float32,
        hides_rows: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`slopes` and `bias` name the dimensions that they have: of "bh" and of "bhqk". Rows that
        a bias hides have but huge negative ones, and no gradient. Sequences of a dense call have
        the lengths of its tensors."""
        torch.manual_seed(0)
        self.used_q, self.used_k = (int32(list(x)) for x in zip(*lengths, strict=True))
        self.start = self.used_k // 3 if starts else None
        rows_q, rows_k = int(self.used_q.max()), int(self.used_k.max())
        self.sizes = rows_q, rows_k
        q, k, v = random_inputs(
            *(len(lengths), heads, rows_q, head_dim),
            heads_kv=heads_kv,
            len_k=rows_k,
            dtype=dtype,
            head_dim_v=head_dim_v,
        )
        self.no_query = unused(self.used_q, rows_q)
        self.no_key = unused(self.used_k, rows_k, self.start)
        dout = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype)
        for x, no_row in ((q, self.no_query), (dout, self.no_query), (k, self.no_key)):
            x[no_row[:, None, :, None].expand_as(x)] = math.nan
        v[self.no_key[:, None, :, None].expand_as(v)] = math.nan
        self.qkv, self.dout = (q, k, v), dout
        self.dlse = torch.randn(q.shape[:3])
        self.sink = torch.randn(heads) if has_sink else None
        self.window = {"window_left": window[0], "window_right": window[1]}
        self.gap, self.is_padded, self.is_dense = gap, is_padded, is_dense
        sizes = {"b": len(lengths), "h": heads, "q": rows_q, "k": rows_k}
        self.changes: dict[str, Any] = {"softcap": softcap} if softcap else {}
        if slopes:
            self.changes["alibi_slopes"] = torch.rand([sizes[x] for x in slopes]) - 0.3
        if bias:
            shape = [n if name in bias else 1 for name, n in sizes.items()]
            values = 2 * torch.randn(shape)
            self.changes["bias"] = values.masked_fill(values < -3, -math.inf).to(bias_dtype)
        if hides_rows:  # of equal scores, which -1e10 swallows
            rows = slice(3, None, 7)
            self.changes["bias"][..., rows, :] = -1e10
            for x in (q, dout, self.dlse):
                x[:, :, rows] = 0

    @property
    def options(self) -> dict[str, Any]:
        """As the reference has them."""
        used = {"seqused_q": self.used_q, "seqused_k": self.used_k, "key_start": self.start}
        return {**self.window, **used, "learnable_sink": self.sink, **self.changes}

    def table(self) -> dict[str, Tensor]:
        """As the kernels have them. `gap` rows are ahead of each packed
        sequence, and twice as many behind the last. Of a dense call it is empty."""
        if self.is_dense:
            return {}
        table = {"seqused_q": self.used_q, "seqused_k": self.used_k, "key_start": self.start}
        if not self.is_padded:
            for name, used in (("cu_seqlens_q", self.used_q), ("cu_seqlens_k", self.used_k)):
                ends = itertools.accumulate((n + self.gap for n in used.tolist()), initial=self.gap)
                table[name] = int32(list(ends))
            if not self.gap:
                del table["seqused_q"], table["seqused_k"]
                if self.used_q.equal(self.used_k):  # as of `forward_varlen` without cu_seqlens_k
                    table["cu_seqlens_k"] = table["cu_seqlens_q"]
        return {name: x for name, x in table.items() if x is not None}

    def pack(self, x: Tensor, used: Tensor, fill: float = math.nan) -> Tensor:
        """(B, H, N, ...) -> (1, H, T, ...)"""
        if self.is_padded:
            return x
        hole = x.new_full((x.shape[1], self.gap, *x.shape[3:]), fill)
        parts = [part for b, n in enumerate(used.tolist()) for part in (x[b, :, :n], hole)]
        return torch.cat([hole, *parts, hole], 1)[None]

    def unpack(self, x: Tensor, used: Tensor, rows: int, fill: float = 0.0) -> Tensor:
        """The way back. Rows of no sequence must be `fill`."""
        if self.is_padded:
            return x
        result = x.new_full((len(used), x.shape[1], rows, *x.shape[3:]), fill)
        first = self.gap
        assert (x[0, :, :first] == fill).all()
        for b, n in enumerate(used.tolist()):
            result[b, :, :n] = x[0, :, first : first + n]
            assert (x[0, :, first + n : first + n + self.gap] == fill).all()
            first += n + self.gap
        assert (x[0, :, first:] == fill).all()
        return result

    def check(self, emulator: Emulator, seed: int = 0) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv
        scale = 1 / math.sqrt(q.shape[3])
        packed = self.pack(q, self.used_q), *(self.pack(x, self.used_k) for x in (k, v))
        asked = {"sequences": self.table(), "sink": self.sink, "changes": self.changes}
        asked["seed"] = seed
        out, lse, _ = emulator.forward(*packed, scale, **self.window, **asked)
        out = self.unpack(out, self.used_q, self.sizes[0])
        lse = self.unpack(lse, self.used_q, self.sizes[0], -math.inf)
        result = tolerance.compare(out, lse, q, k, v, False, scale, **self.options)
        assert result.passed, str(result)
        return out, lse

    def check_backward(self, emulator: Emulator, seed: int = 0, **options: int) -> None:
        q, k, v = self.qkv
        scale = 1 / math.sqrt(q.shape[3])
        out, lse = reference.attention(q, k, v, False, scale, **self.options)
        given = (self.dout, q, k, v, out.to(q.dtype), lse.float(), self.dlse)
        used = (self.used_q, self.used_q, self.used_k, self.used_k, *[self.used_q] * 3)
        *tensors, dlse = (self.pack(x, n) for x, n in zip(given, used, strict=True))
        asked = {"sequences": self.table(), "sink": self.sink, "changes": self.changes}
        asked |= {"seed": seed, **options}
        gradients, _ = emulator.backward(*tensors, scale, dlse=dlse, **self.window, **asked)
        dq = self.unpack(gradients[0], self.used_q, self.sizes[0])
        dk, dv = (self.unpack(x, self.used_k, self.sizes[1]) for x in gradients[1:3])
        for x in (dk, dv):
            assert (x[self.no_key[:, None, :, None].expand_as(x)] == 0).all()
        result = tolerance.compare_gradients(
            *((dq, dk, dv, *gradients[3:]), self.dout, q, k, v, False, scale),
            dlse=self.dlse,
            **self.options,
        )
        assert result.passed, str(result)


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"lengths": LENGTHS[0], "window": (-1, 0)},
    "full-sink": {"lengths": LENGTHS[0], "has_sink": True, "heads": 6, "heads_kv": 2},
    "window-gaps": {"lengths": LENGTHS[1], "window": (20, 7), "gap": 3, "starts": True},
    "left-sink": {"lengths": LENGTHS[2], "window": (40, 0), "has_sink": True, "heads": 6},
    "rooms": {"lengths": [(1, 3), (0, 9), (3, 300), (2, 65)], "gap": 40, "heads": 6},
    "one": {"lengths": [(1, 1)], "has_sink": True, "heads": 3},
    "padded": {"lengths": LENGTHS[0], "window": (-1, 0), "is_padded": True, "starts": True},
    "padded-sink": {"lengths": LENGTHS[1], "has_sink": True, "is_padded": True, "starts": True},
}

CALLS |= {
    "softcap": {"lengths": LENGTHS[0], "window": (-1, 0), "softcap": 1.5},
    "alibi": {"lengths": LENGTHS[1], "slopes": "h", "heads": 6, "heads_kv": 2, "starts": True},
    "alibi-one": {"lengths": LENGTHS[2], "window": (40, 0), "slopes": "bh", "heads": 6},
    "scored": {
        "lengths": LENGTHS[0], "window": (90, 0), "softcap": 3.0, "slopes": "bh", "has_sink": True,
        "is_padded": True, "starts": True,
    },
}  # fmt: skip
#: Of the kernels of sm80.
BIASED: dict[str, dict[str, Any]] = {
    "whole": {
        "lengths": LENGTHS[0],
        "bias": "bhqk",
        "starts": True,
        "bias_dtype": torch.bfloat16,
    },
    "hidden": {"lengths": LENGTHS[0], "bias": "hqk", "hides_rows": True},
    "heads": {"lengths": LENGTHS[1], "bias": "hqk", "window": (-1, 0), "softcap": 2.0},
    "dense": {"lengths": [(200, 200)] * 2, "is_dense": True, "bias": "hqk", "window": (-1, 0)},
    "splits": {
        "lengths": [(200, 200)] * 2,
        "is_dense": True,
        "bias": "qk",
        "heads": 6,
        "window": (-1, 0),
    },
    "keys": {"lengths": LENGTHS[2], "bias": "bk", "heads": 6, "bias_dtype": torch.bfloat16},
    "one": {"lengths": LENGTHS[1], "bias": "q", "slopes": "h", "bias_dtype": torch.bfloat16},
}


def check_sink(emulator: Emulator, **options: int) -> None:
    """Of a dense call."""
    q, k, v = random_inputs(2, 6, 70, 64, heads_kv=2, len_k=333, dtype=torch.bfloat16)
    sink = torch.tensor([-1e4, -3.0, 0.0, 3.0, 1e4, 1.0])
    out, lse, _ = emulator.forward(q, k, v, 0.125, window_right=0, sink=sink, **options)
    result = tolerance.compare(out, lse, q, k, v, False, 0.125, window_right=0, learnable_sink=sink)
    assert result.passed, str(result)
