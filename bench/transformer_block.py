"""A GPT-style transformer block on `flash_cute.forward`, checked against a reference.

    python -m bench.transformer_block
    python -m bench.transformer_block --B 4 --N 4096 --H 16 --D 128 --dtype bf16

Compared are the attention's output and LSE and the block's output, each with fp64, and how far the
same block with naive attention is from fp64: that is the yardstick. On a GPU the time and the peak
memory of both blocks are printed too. The exit status is 0 only if everything is within tolerance.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import flash_cute
from bench.baselines import naive_attention
from bench.cases import DTYPES
from bench.run import head_dim, positive, seed
from bench.tables import grid
from flash_cute import reference, tolerance

Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return flash_cute.forward(q, k, v, is_causal=True)


class TransformerBlock(nn.Module):
    """x (B, N, H*D) -> x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, heads: int, head_dim: int, attention: Attention = flash_attention) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, N, D): three views of one projection, nothing is copied."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = rearrange(qkv, "b n (three h d) -> three b h n d", three=3, h=self.heads)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(*self.project(x))
        # flash_cute keeps q's order of dims, so this is a view as well.
        x = x + self.proj(rearrange(out, "b h n d -> b n (h d)"))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def with_attention(block: TransformerBlock, attention: Attention) -> TransformerBlock:
    """The same weights with another attention."""
    other = copy.copy(block)
    other.attention = attention
    return other


def naive(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return naive_attention(q, k, v, True, q.shape[-1] ** -0.5)


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One batch entry at a time: fp64 scores of all of them would not fit a small GPU."""
    each = [
        reference.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], True, q.shape[-1] ** -0.5)
        for b in range(q.shape[0])
    ]
    return torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def compare(block: TransformerBlock, x: Tensor) -> list[tuple[str, float, float, float]]:
    """(what, our error, naive's error, allowed error); errors are the largest absolute ones."""

    q, k, v = block.project(x)
    ours = tolerance.compare(*flash_attention(q, k, v), q, k, v, is_causal=True)
    plain = tolerance.compare(*naive(q, k, v), q, k, v, is_causal=True)

    # The block's output by the same rule: twice naive's error, and a rounding of the largest value.
    exact_block = with_attention(copy.deepcopy(block).double(), exact)
    true_y = exact_block(x.double())
    error = distance(block(x), true_y)
    yardstick = distance(with_attention(block, naive)(x), true_y)
    allowed = 2 * yardstick + float(true_y.abs().max()) * torch.finfo(x.dtype).eps
    return [
        ("attention out", ours.out_error, plain.out_error, ours.out_bound),
        ("attention lse", ours.lse_error, plain.lse_error, ours.lse_bound),
        ("block output", error, yardstick, allowed),
    ]


def milliseconds(block: TransformerBlock, x: Tensor, iters: int = 20) -> float:
    for _ in range(3):
        block(x)
    times = []
    for _ in range(iters):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        block(x)
        stop.record()
        torch.cuda.synchronize(x.device)
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def peak_mib(block: TransformerBlock, x: Tensor) -> float:
    """What a call needs at its peak beyond the weights and x."""
    torch.cuda.synchronize(x.device)
    before = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    block(x)
    torch.cuda.synchronize(x.device)
    return (torch.cuda.max_memory_allocated(x.device) - before) / 2**20


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transformer_block", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--B", type=positive, help="batch (default 4; 2 on the CPU)")
    parser.add_argument("--N", type=positive, help="sequence length (default 2048; 256 on the CPU)")
    parser.add_argument("--H", type=positive, help="heads (default 16; 4 on the CPU)")
    parser.add_argument("--D", type=head_dim, default=64, help="head dim, up to 256 (default 64)")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--seed", type=seed, default=0)
    args = parser.parse_args(argv)
    available = torch.cuda.is_available()
    if args.device == "cuda" and not available:
        parser.error("--device cuda: torch sees no GPU here")
    args.device = args.device or ("cuda" if available else "cpu")
    defaults = (4, 2048, 16) if args.device == "cuda" else (2, 256, 4)
    given = (args.B, args.N, args.H)
    args.B, args.N, args.H = (g or d for g, d in zip(given, defaults, strict=True))
    return args


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    if device.type == "cuda":
        print(f"GPU: {torch.cuda.get_device_name(device)}")
    else:
        print("No GPU in use: running small on the CPU; time and memory are not compared.")
    print(f"GPT-style block, causal: x ({args.B}, {args.N}, {args.H}*{args.D}) {args.dtype}")

    torch.manual_seed(args.seed)
    block = TransformerBlock(args.H, args.D).to(device, dtype)
    x = torch.randn(args.B, args.N, args.H * args.D, device=device, dtype=dtype)

    lines, correct = [], True
    for what, error, yardstick, allowed in compare(block, x):
        ok = error <= allowed  # False for NaN
        correct = correct and ok
        cells = [f"{value:.2e}" for value in (error, yardstick, allowed)]
        lines.append([what, *cells, "pass" if ok else "FAIL"])
    print(grid(["largest error against fp64", "flash_cute", "naive", "allowed", ""], lines))

    if device.type == "cuda":
        lines = []
        for name, attention in (("flash_cute", flash_attention), ("naive", naive)):
            each = with_attention(block, attention)
            lines.append([name, f"{milliseconds(each, x):.2f}", f"{peak_mib(each, x):.0f}"])
        print(grid(["whole block with", "ms", "peak MiB"], lines))
    print("correct" if correct else "NOT CORRECT")
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
