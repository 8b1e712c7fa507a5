"""A GPT-style transformer block on `flash_cute.forward`, checked against the plain formula.

    python -m examples.transformer_block
    python -m examples.transformer_block --B 4 --N 4096 --H 16 --D 128 --dtype fp16

`TransformerBlock` is the code to copy. The rest compares it with the plain formula in fp64, and on
a GPU with the plain formula's time and memory. The exit status is 0 only if all results are right.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import flash_cute
from flash_cute import tolerance


class TransformerBlock(nn.Module):
    """x (B, N, H*D) -> x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (B, H, N, D): three views of one projection, nothing is copied."""
        qkv = self.qkv(self.norm1(x))
        return tuple(rearrange(qkv, "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.heads))

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_cute.forward(q, k, v, is_causal=True)[0]

    def forward(self, x: Tensor) -> Tensor:
        out = self.attention(*self.project(x))
        # flash_cute keeps q's order of dims, so this is a view as well.
        x = x + self.proj(rearrange(out, "b h n d -> b n (h d)"))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainBlock(TransformerBlock):
    """The same block with the plain formula. In fp64 it is the reference."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def errors(block: TransformerBlock, plain: PlainBlock, x: Tensor) -> dict[str, tuple[float, float]]:
    """What is compared: its largest error, and the largest that is allowed."""
    q, k, v = block.project(x)
    result = tolerance.compare(
        *flash_cute.forward(q, k, v, is_causal=True), q, k, v, is_causal=True
    )
    in_fp64 = copy.deepcopy(plain).double()
    # One sequence at a time: the fp64 scores of all of them would not fit a small GPU.
    exact = torch.cat([in_fp64(sequence[None].double()) for sequence in x])
    error, plain_error = (float((b(x) - exact).abs().max()) for b in (block, plain))
    rounding = float(exact.abs().max()) * torch.finfo(x.dtype).eps
    return {
        "attention out": (result.out_error, result.out_bound),
        "attention lse": (result.lse_error, result.lse_bound),
        "block": (error, 2 * plain_error + rounding),
    }


def milliseconds_and_mib(block: TransformerBlock, x: Tensor) -> tuple[float, float]:
    """The median time of a call, and the memory that it takes beyond the weights and x."""
    times = []
    for _ in range(23):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        block(x)
        stop.record()
        torch.cuda.synchronize(x.device)
        times.append(start.elapsed_time(stop))
    before = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    block(x)
    peak = torch.cuda.max_memory_allocated(x.device)
    return statistics.median(times[3:]), (peak - before) / 2**20  # the first three warm up


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m examples.transformer_block")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--B", type=int, default=4 if on_gpu else 2, help="batch")
    parser.add_argument("--N", type=int, default=2048 if on_gpu else 256, help="sequence length")
    parser.add_argument("--H", type=int, default=16 if on_gpu else 4, help="heads")
    parser.add_argument("--D", type=int, default=64, help="head dim, 1 to 1024")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    args = parser.parse_args(argv)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float16

    torch.manual_seed(0)
    block = TransformerBlock(args.H, args.D).to(args.device, dtype)
    plain = PlainBlock(args.H, args.D).to(args.device, dtype)
    plain.load_state_dict(block.state_dict())
    x = torch.randn(args.B, args.N, args.H * args.D, device=args.device, dtype=dtype)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU (no time, no memory)"
    print(f"Causal block on {where}: x ({args.B}, {args.N}, {args.H} * {args.D}) {args.dtype}")

    print(f"{'':14}  {'error':>8}  {'allowed':>8}")
    correct = True
    for what, (error, allowed) in errors(block, plain, x).items():
        right = error <= allowed  # False for NaN
        correct = correct and right
        print(f"{what:14}  {error:8.1e}  {allowed:8.1e}  {'right' if right else 'WRONG'}")
    if args.device == "cuda":
        print(f"{'':14}  {'ms':>8}  {'peak MiB':>8}")
        for name, each in (("flash_cute", block), ("plain formula", plain)):
            ms, mib = milliseconds_and_mib(each, x)
            print(f"{name:14}  {ms:8.2f}  {mib:8.0f}")
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
