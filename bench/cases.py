"""What is measured: one `Case` is one attention problem; a suite is a list of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
#: What a call computes, and of a head its products Nq x Nk x D, and Nq x Nk x Dv.
OPS = {"fwd": (1, 1), "bwd": (3, 2), "fwdbwd": (4, 3)}
#: What changes the scores. A bias is (1, heads, q_len, kv_len), one of keys (batch, 1, 1, kv_len);
#: with "trained", a backward makes its gradient, too.
SCORES = ("softcap", "alibi", "bias", "key bias", "trained bias", "trained key bias")
SOFTCAP = 30.0


@dataclass(frozen=True)
class Case:
    """q is (batch, heads, q_len, head_dim); k and v are (batch, kv_heads, kv_len, head_dim). With
    `documents` they are (q_len, heads, head_dim) and so on: sequences one after the other."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    #: Order in memory: "bhnd" (dense) or "bnhd" (a projection's output, heads transposed).
    layout: str = "bhnd"
    #: "fwd", "bwd" (of a forward that has run) or "fwdbwd" (both).
    op: str = "fwd"
    #: With a causal mask: keys that a query sees beside its own; -1: all before it.
    window: int = -1
    #: The lengths of packed sequences; empty: dense. With fewer queries than keys all have as many
    #: queries, which are their last rows.
    documents: tuple[int, ...] = ()
    #: One of SCORES, or "" for plain ones.
    score: str = ""
    #: Of v, whose head dim may differ; 0: as `head_dim`.
    head_dim_v: int = 0

    @property
    def columns_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def name(self) -> str:
        heads = f"H{self.heads}"
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        length = f"N{self.q_len}"
        if self.kv_len != self.q_len:
            length = f"Nq{self.q_len} Nk{self.kv_len}"
        if self.documents:
            several = len(self.documents) > 1 and len(set(self.documents)) > 1
            length = f"T{self.q_len} in {len(self.documents)}" + (" mixed" if several else "")
            if self.kv_len != self.q_len:
                length = f"Tq{self.q_len} Tk{self.kv_len}" + length.removeprefix(f"T{self.q_len}")
        mask = "causal" if self.causal else "full"
        if self.window >= 0:
            mask = f"window {self.window + 1}"
        if self.score:
            mask += f" {self.score}"
        rest = (f" {self.layout}" if self.layout != "bhnd" else "") + (
            f" {self.op}" if self.op != "fwd" else ""
        )
        head_dim = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        return f"{self.dtype} B{self.batch} {length} {heads} {head_dim} {mask}{rest}"

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def causal_is_full(self) -> bool:
        """One query aligned to the bottom right corner sees every key."""
        return self.causal and self.q_len == 1

    @property
    def is_aligned_right(self) -> bool:
        """Causal, where the two ways to align the mask differ."""
        return self.causal and self.q_len not in (1, self.kv_len)

    @property
    def documents_q(self) -> tuple[int, ...]:
        """The queries of each of the documents."""
        count = len(self.documents)
        assert not count or self.q_len == self.kv_len or self.q_len % count == 0
        return self.documents if self.q_len == self.kv_len else (self.q_len // count,) * count

    def parts(self) -> list[Case]:
        """Each of the documents, as a dense case."""
        lengths = zip(self.documents_q, self.documents, strict=True)
        return [replace(self, q_len=n, kv_len=of_k, documents=()) for n, of_k in lengths]

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the mask lets through, counted exactly."""
        if self.documents:
            return sum(part.visible_pairs() for part in self.parts())
        if self.window >= 0:
            first = min(self.q_len, self.window + 1)  # rows with fewer keys than the window
            return first * (first + 1) // 2 + (self.q_len - first) * (self.window + 1)
        if not self.causal:
            return self.q_len * self.kv_len
        # Query i sees keys j <= i + kv_len - q_len: the last `rows` queries see at least one.
        rows = min(self.q_len, self.kv_len)
        return rows * self.kv_len - rows * (rows - 1) // 2

    def flops(self) -> int:
        """4 B H Nq Nk D, of a backward 10; for causal half of that if Nq = Nk (the field's
        convention), else the exact count of visible pairs."""
        of_qk, of_v = OPS[self.op]
        columns = of_qk * self.head_dim + of_v * self.columns_v
        work = self.batch * self.heads * columns
        if self.documents:
            return sum(part.flops() for part in self.parts())
        if self.causal and self.window < 0 and self.q_len == self.kv_len:
            return work * self.q_len * self.kv_len
        return 2 * work * self.visible_pairs()

    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once: what decoding has to move."""
        element = DTYPES[self.dtype].itemsize
        columns = self.head_dim + self.columns_v
        return self.batch * self.kv_heads * self.kv_len * columns * element

    def bytes(self) -> int:
        """Bytes of the tensors of a call: q, k, v and out, in a backward also their gradients; and
        the log-sum-exp."""
        element = DTYPES[self.dtype].itemsize
        rows = self.batch * (self.heads * self.q_len + self.kv_heads * self.kv_len)
        pairs = {"fwd": 1, "bwd": 2, "fwdbwd": 3}[self.op]  # of q and out, and of k and v
        columns = pairs * (self.head_dim + self.columns_v)
        return rows * columns * element + 4 * self.batch * self.heads * self.q_len

    def visited_pairs(self, block_m: int, block_n: int) -> int:
        """As `visible_pairs`, of all blocks (block_m queries, block_n keys) that the mask touches;
        dense and causal."""
        pairs = 0
        for first in range(0, self.q_len, block_m):
            diagonal = self.kv_len - self.q_len
            last = min(first + block_m, self.q_len) - 1
            begin = max(0, first + diagonal - self.window) // block_n if self.window >= 0 else 0
            pairs += max(0, (last + diagonal) // block_n + 1 - begin) * block_m * block_n
        return pairs

    def bias_shape(self) -> tuple[int, ...] | None:
        if "key bias" in self.score:
            return self.batch, 1, 1, self.kv_len
        return (1, self.heads, self.q_len, self.kv_len) if "bias" in self.score else None

    def changes(self, device: torch.device) -> dict[str, Any]:
        """What changes the scores, but a bias: arguments of `flash_cute.forward`."""
        if self.score == "softcap":
            return {"softcap": SOFTCAP}
        if self.score == "alibi":  # the slopes of its paper, arXiv:2108.12409
            powers = torch.arange(1, self.heads + 1, device=device) * (-8 / self.heads)
            return {"alibi_slopes": powers.exp2()}
        return {}

    def to_dict(self) -> dict[str, Any]:
        late = ("window", "documents", "score", "head_dim_v")
        given = {k: v for k, v in asdict(self).items() if k not in late}
        if self.window >= 0:
            given["window"] = self.window
        if self.documents:
            given["documents"] = list(self.documents)
        given |= {key: value for key in late[2:] if (value := getattr(self, key))}
        return {"name": self.name, **given}


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random normal q, k, v, a bias if there is one, and for a backward dout, drawn on the device.
    Never zeros: they run faster than real data."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, length: int, head_dim: int) -> torch.Tensor:
        if case.documents:
            shape = length, heads, head_dim
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype])
        bnhd = case.layout == "bnhd"
        inner = (length, heads) if bnhd else (heads, length)
        shape = (case.batch, *inner, head_dim)
        dtype = DTYPES[case.dtype]
        x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return x.transpose(1, 2) if bnhd else x

    q, kv = (case.heads, case.q_len), (case.kv_heads, case.kv_len)
    d, dv = case.head_dim, case.columns_v
    tensors = [draw(*q, d), draw(*kv, d), draw(*kv, dv)]
    if (shape := case.bias_shape()) is not None:
        dtype = DTYPES[case.dtype]
        tensors.append(torch.randn(shape, generator=generator, device=device, dtype=dtype))
    return *tensors, *([] if case.op == "fwd" else [draw(*q, dv)])


def square(batch: int, length: int, heads: int, head_dim: int, causal: bool, **more: Any) -> Case:
    """Self-attention: as many queries as keys; as many key heads as query heads unless told."""
    kv_heads = more.pop("kv_heads", heads)
    return Case(batch, heads, kv_heads, length, length, head_dim, causal, **more)


def train() -> Iterator[Case]:
    """36 training shapes: B x N = 16384 tokens, H x D = 2048."""
    for head_dim in (64, 128, 256):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                yield square(16384 // length, length, 2048 // head_dim, head_dim, causal)


def quick() -> Iterator[Case]:
    """A few training shapes for a look while working."""
    for head_dim in (64, 128, 256):
        for length in (512, 4096):
            yield square(16384 // length, length, 2048 // head_dim, head_dim, causal=True)
        yield square(4, 4096, 2048 // head_dim, head_dim, causal=False)


def decode() -> Iterator[Case]:
    """One new token against a long context, four query heads to a key head."""
    for kv_len in (4096, 32768, 131072):
        for batch in (1, 8, 64):
            yield Case(batch, 32, 8, 1, kv_len, 128, causal=True)


def fp16() -> Iterator[Case]:
    """fp16, each time behind the same in bf16: clocks drift in the course of a run."""
    for heads, head_dim in ((16, 128), (32, 64), (8, 256)):
        for causal in (False, True):
            for dtype in ("bf16", "fp16"):
                yield square(4, 4096, heads, head_dim, causal, dtype=dtype)


def prefill() -> Iterator[Case]:
    """One prompt at a time: few tiles for a large GPU."""
    for length in (256, 512, 1024, 2048, 4096):
        yield square(1, length, 32, 128, causal=True, kv_heads=8)
        for causal in (False, True):
            yield square(1, length, 16, 64, causal)


def doc() -> Iterator[Case]:
    """One long document with few heads: little parallelism over batch and heads."""
    for causal in (False, True):
        yield square(1, 8192, 8, 64, causal, dtype="fp16")


def gqa() -> Iterator[Case]:
    """Grouped and multi-query heads beside as many heads of k and v, which is the same work; and
    queries that continue a longer context. Of the backward, grouped heads beside as many."""
    for kv_heads in (32, 8, 1):
        for causal in (False, True):
            yield square(4, 4096, 32, 128, causal, kv_heads=kv_heads)
    yield square(1, 16384, 32, 128, causal=True, kv_heads=8)
    yield Case(1, 32, 8, 1024, 16384, 128, causal=True)
    for causal in (False, True):
        for kv_heads in (32, 8):
            yield square(4, 4096, 32, 128, causal, kv_heads=kv_heads, op="bwd")


def layouts() -> Iterator[Case]:
    """The (B, N, H, D) projections of a transformer, transposed to (B, H, N, D) as views."""
    for head_dim in (64, 128):
        for length in (1024, 4096):
            heads = 2048 // head_dim
            yield square(16384 // length, length, heads, head_dim, causal=True, layout="bnhd")


def tuning() -> Iterator[Case]:
    """Every head-dim bucket, short and long, for choosing an entry of the tile table."""
    for head_dim in (32, 64, 96, 128, 192, 256):
        for length in (512, 4096):
            for causal in (False, True):
                yield square(16384 // length, length, 2048 // head_dim, head_dim, causal)


def peers_backward() -> Iterator[Case]:
    """The 14 points whose backward has been measured of peers that are not here, too."""
    for head_dim, length in ((64, 1024), (64, 4096), (64, 16384), (128, 1024), (128, 4096),
                             (128, 16384), (256, 4096)):  # fmt: skip
        for causal in (False, True):
            yield square(16384 // length, length, 2048 // head_dim, head_dim, causal, op="bwd")


def bwd() -> Iterator[Case]:
    """The backward: those 14; then short ones, the other head dims, and shared key heads."""
    yield from peers_backward()
    for head_dim, length in ((64, 512), (128, 512), (32, 4096), (96, 4096), (192, 4096)):
        for causal in (False, True):
            yield square(16384 // length, length, 2048 // head_dim, head_dim, causal, op="bwd")
    for batch, kv_heads in ((4, 8), (1, 1)):
        for causal in (False, True):
            yield square(batch, 4096, 32, 128, causal, kv_heads=kv_heads, op="bwd")


def fwdbwd() -> Iterator[Case]:
    """Forward and backward at the same points."""
    return (replace(case, op="fwdbwd") for case in bwd())


def packed(documents: Sequence[int], head_dim: int, **more: Any) -> Case:
    heads, length = 2048 // head_dim, sum(documents)
    documents = tuple(documents)
    return Case(1, heads, heads, length, length, head_dim, True, documents=documents, **more)


def log_normal(tokens: int, seed: int = 0) -> list[int]:
    """Lengths of documents, as corpora have them: a median of 600 tokens, and a few long ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = math.exp(math.log(600) + 1.2 * torch.randn((), generator=generator).item())
        lengths.append(min(left, max(16, int(drawn))))
    return lengths


def varlen() -> Iterator[Case]:
    """Packed documents: of equal lengths, of which there is a dense call too, and of mixed ones."""
    for op in ("fwd", "bwd"):
        for head_dim in (64, 128):
            for length in (1024, 4096, 16384):
                yield packed([length] * (16384 // length), head_dim, op=op)
            for tokens in (16384, 65536):
                yield packed(log_normal(tokens), head_dim, op=op)


def window() -> Iterator[Case]:
    """Causal windows, beside the whole causal mask."""
    for op in ("fwd", "bwd"):
        for length in (8192, 32768):
            for width in (0, 128, 512, 1024, 4096):
                yield square(1, length, 16, 128, True, window=width - 1, op=op)


def chunks() -> Iterator[Case]:
    """Some queries against a longer context: prompts in chunks, and speculation. Then the same
    packed: contexts of one length, and of several."""
    for heads, kv_heads, head_dim in ((32, 8, 128), (16, 16, 128), (32, 32, 64)):
        for kv_len in (2048, 8192, 32768):
            for q_len in (128, 256, 1000):
                for batch in (1, 2):
                    for causal in (False, True):
                        yield Case(batch, heads, kv_heads, q_len, kv_len, head_dim, causal)
    for head_dim in (64, 128):
        for documents in ((8192,) * 2, (8192,) * 8, (2048, 32768, 8192, 4096)):
            for q_len in (16, 128, 1000):
                case = packed(documents, head_dim)
                yield replace(case, q_len=q_len * len(documents))


def scores() -> Iterator[Case]:
    """What changes the scores, beside the plain call."""
    for op in ("fwd", "bwd"):
        for head_dim in (64, 128):
            for score in ("", *SCORES):
                if op == "bwd" or "trained" not in score:
                    yield square(4, 4096, 16, head_dim, True, score=score, op=op)


def large_d() -> Iterator[Case]:
    """Head dims that FlashAttention-2 and cuDNN do not have: one long document with few heads."""
    for op, length in (("fwd", 8192), ("bwd", 4096)):
        for head_dim in (320, 384, 512, 640, 1024):
            for causal in (False, True):
                yield square(1, length, 8, head_dim, causal, dtype="fp16", op=op)


def unequal() -> Iterator[Case]:
    """V with fewer columns than q and k, as in multi-head latent attention, beside as many."""
    for op in ("fwd", "bwd"):
        for head_dim_v in (0, 128):
            for causal in (False, True):
                yield square(4, 4096, 16, 192, causal, head_dim_v=head_dim_v, op=op)


def fp32() -> Iterator[Case]:
    """Inputs in fp32: one long document, and training shapes."""
    for op in ("fwd", "bwd"):
        yield square(1, 8192, 8, 64, causal=False, dtype="fp32", op=op)
        for head_dim in (64, 128):
            for causal in (False, True):
                yield square(8, 2048, 2048 // head_dim, head_dim, causal, dtype="fp32", op=op)


SUITES = {
    suite.__name__: suite
    for suite in (
        *(train, quick, decode, prefill, fp16, doc, gqa, layouts, tuning, bwd, fwdbwd),
        *(varlen, window, chunks, scores, large_d, unequal, fp32),
    )
}
