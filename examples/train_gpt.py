"""Trains a small GPT on `flash_cute.forward`. The text is the source of Python's standard library.

    python -m examples.train_gpt
    python -m examples.train_gpt --attention sdpa --compile --json sdpa.json
    python -m examples.train_gpt --pack

With --pack it trains on documents of different lengths, twice: padded, and packed without padding,
by `flash_cute.forward_varlen`.

The vocabulary is the 256 bytes. Sizes that are not given depend on the device: 32 million
parameters in bf16 on a GPU; on the CPU a tiny model in fp32, which takes two cores a good minute.
The initial weights and the batches depend on the seed and the sizes alone, so runs with different
attentions can be compared step by step.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import statistics
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

import flash_cute

ATTENTIONS = ("flash_cute", "sdpa", "math")
GPU_SIZES = {"steps": 2000, "length": 1024, "batch": 32, "layers": 10, "heads": 8, "width": 512}
CPU_SIZES = {"steps": 200, "length": 256, "batch": 4, "layers": 4, "heads": 4, "width": 128}
EVAL_BATCHES = 20


def causal_attention(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (B, H, N, D) -> (B, H, N, D)."""
    if name == "flash_cute":
        return flash_cute.forward(q, k, v, is_causal=True)[0]
    if name == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights: Tensor = scores.masked_fill(future, -torch.inf).softmax(-1)
    return weights @ v


class Block(nn.Module):
    """x (B, N, width), or packed (T, width) with `ends`, the cu_seqlens of its documents."""

    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, ends: Tensor | None) -> Tensor:
        qkv = self.qkv(self.norm1(x))
        if ends is None:
            q, k, v = rearrange(qkv, "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.heads)
            out = causal_attention(self.attention, q, k, v)
            out = rearrange(out, "b h n d -> b n (h d)")
        else:
            q, k, v = rearrange(qkv, "t (qkv h d) -> qkv t h d", qkv=3, h=self.heads)
            out = flash_cute.forward_varlen(q, k, v, ends, is_causal=True)[0].flatten(1)
        x = x + self.proj(out)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Tokens (B, N) -> logits (B, N, 256), of sequences that all begin at position 0. Or of packed
    documents: tokens and positions (T,), ends (B + 1,) -> logits (T, 256)."""

    def __init__(self, length: int, layers: int, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:  # neither a bias nor a norm
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None = None) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, ends)
        logits: Tensor = self.head(self.norm(x))
        return logits


def standard_library() -> tuple[Tensor, Tensor]:
    """The bytes to train on, and those held out: one file in ten, chosen by its name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    train, held_out = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if left_out.isdisjoint(name.parts):
            is_held_out = zlib.crc32(name.as_posix().encode()) % 10 == 0
            (held_out if is_held_out else train).extend(path.read_bytes())
    if not train or not held_out:
        raise SystemExit(f"train_gpt: {root} has no Python sources to train on")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def draw_lengths(count: int, args: argparse.Namespace, generator: torch.Generator) -> Tensor:
    """With --pack, lengths of documents as corpora have them: most short, a few long."""
    if not args.pack:
        return torch.full((count,), args.length)
    lengths = torch.empty(count).log_normal_(math.log(args.length / 4), generator=generator)
    return lengths.long().clamp(1, args.length)


def loss_of(
    model: nn.Module, text: Tensor, starts: Tensor, lengths: Tensor, is_packed: bool
) -> Tensor:
    """The mean cross entropy, in nats a byte, of the documents that begin at `starts`: one after
    the other, or padded to the longest. Both are on the CPU, so nothing waits for the GPU."""
    device, total, longest = text.device, int(lengths.sum()), int(lengths.max())
    starts, lengths = starts.to(device), lengths.to(device)
    if is_packed:
        document = torch.repeat_interleave(lengths, output_size=total)  # 0 0 0 1 2 2 ...
        ends = F.pad(lengths.cumsum(0), (1, 0)).int()
        positions = torch.arange(total, device=device) - ends[document]
        places, inputs = starts[document] + positions, (positions, ends)
        is_padding = torch.zeros_like(places, dtype=torch.bool)
    else:
        positions = torch.arange(longest, device=device)
        places, inputs = starts[:, None] + positions, (positions,)
        is_padding = positions >= lengths[:, None]  # behind all that a causal mask shows
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(text[places].long(), *inputs)
    targets = text[places + 1].long().masked_fill(is_padding, -100)  # which counts for nothing
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def factor(step: int, steps: int) -> float:
    """What the learning rate is multiplied by: linear warmup, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def check_finite(losses: Tensor) -> None:
    wrong = losses.isfinite().logical_not().nonzero().flatten().tolist()
    if wrong:
        step = wrong[0]
        sys.exit(f"train_gpt: the loss of step {step} is {losses[step]} (lower the --lr?)")


def train(
    model: nn.Module, text: Tensor, args: argparse.Namespace, is_packed: bool
) -> tuple[list[float], float]:
    """The loss of each step, and tokens a second after the first step (which compiles)."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, args.steps))
    generator = torch.Generator().manual_seed(args.seed)
    losses, tokens = torch.zeros(args.steps, device=text.device), 0
    bar = tqdm(range(args.steps), mininterval=0.1 if sys.stderr.isatty() else 10)
    for step in bar:
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
        lengths = draw_lengths(args.batch, args, generator)
        loss = loss_of(model, text, starts, lengths, is_packed)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step] = loss.detach()
        if step % 10 == 0:  # To read the loss is to wait for the GPU: not at each step.
            check_finite(losses[: step + 1])
            bar.set_postfix(loss=f"{losses[step]:.3f}", refresh=False)
        if step == 0:
            start = time.perf_counter()
        else:
            tokens += int(lengths.sum())
    check_finite(losses)
    return losses.tolist(), tokens / (time.perf_counter() - start)


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, args: argparse.Namespace, is_packed: bool) -> float:
    """The mean loss of documents that are spread evenly over the text."""
    count = EVAL_BATCHES * args.batch
    starts = torch.linspace(0, len(text) - args.length - 1, count).long()
    lengths = draw_lengths(count, args, torch.Generator().manual_seed(args.seed))
    batches = zip(starts.split(args.batch), lengths.split(args.batch), strict=True)
    return float(torch.stack([loss_of(model, text, *x, is_packed) for x in batches]).mean())


def plot(losses: list[float], held_out: float, title: str, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.add_subplot(xlabel="step", ylabel="loss (nats a byte)", title=title)
    axis.plot(losses, linewidth=0.8, label="training")
    axis.axhline(held_out, color="#d55e00", linestyle="--", label="held-out text, at the end")
    axis.legend(frameon=False)
    axis.grid(linewidth=0.5, alpha=0.5)
    figure.savefig(path, dpi=150)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parse(argv: list[str] | None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m examples.train_gpt")
    parser.add_argument("--attention", default="flash_cute", choices=ATTENTIONS)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--pack", action="store_true", help="documents, padded and packed")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True)")
    for name, gpu_size in GPU_SIZES.items():
        text = f"{gpu_size} on a GPU, {CPU_SIZES[name]} on the CPU, if not given"
        parser.add_argument(f"--{name}", type=positive, help=text)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/train_gpt.png"), metavar="PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results and all losses")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not on_gpu:
        parser.error("--device cuda: torch sees no GPU here")
    for name, size in (GPU_SIZES if args.device == "cuda" else CPU_SIZES).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    if args.pack and args.attention != "flash_cute":
        parser.error(f"--pack takes flash_cute's attention, not {args.attention}'s")
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first is not timed")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    if args.width // args.heads > 1024:
        parser.error(f"--width / --heads is {args.width // args.heads}: a head dim is at most 1024")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr} is not positive and finite")
    if args.out.suffix != ".png":
        parser.error(f"--out {args.out} does not end in .png")
    for path in filter(None, (args.out, args.json)):
        try:  # now, rather than after the training
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            parser.error(f"{path} cannot be written: {error.strerror}")
    return args


def run(
    text: Tensor, held_out: Tensor, args: argparse.Namespace, is_packed: bool
) -> dict[str, Any]:
    """Trains a model of its own; what is known of it."""
    torch.manual_seed(args.seed)  # weights and batches are drawn on the CPU, alike on every device
    model = GPT(args.length, args.layers, args.width, args.heads, args.attention).to(args.device)
    if args.compile:
        model.compile(fullgraph=True)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, speed = train(model, text, args, is_packed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of the whole process
    if args.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    last, held_out_loss = losses[-100:], evaluate(model, held_out, args, is_packed)
    print(f"{speed:,.0f} tokens a second, peak memory {peak / 2**20:,.0f} MiB")
    print(f"mean loss of the last {len(last)} steps {statistics.mean(last):.4f}")
    print(f"loss on held-out text {held_out_loss:.4f}", flush=True)
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "tokens_per_second": speed,
        "peak_memory_bytes": peak, "last_loss": statistics.mean(last),
        "held_out_loss": held_out_loss, "losses": losses,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    text, held_out = (x.to(args.device) for x in standard_library())
    if args.length >= min(len(text), len(held_out)):
        sys.exit(f"train_gpt: --length {args.length}: only {len(held_out)} bytes are held out")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU"
    print(f"{len(text):,} bytes of text, and {len(held_out):,} held out, on {device}", flush=True)
    padded = {}
    if args.pack:
        print("documents, padded:")
        padded = {"padded": run(text, held_out, args, is_packed=False)}
        print("documents, packed:")
    result = run(text, held_out, args, args.pack)
    size = f"GPT of {result['parameters'] / 1e6:.1f}M parameters"
    title = f"{size} on {device}, attention {args.attention}{', packed' if args.pack else ''}"
    plot(result["losses"], result["held_out_loss"], title, args.out)
    if args.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        result = vars(args) | {"device": device} | versions | result | padded
        args.json.write_text(json.dumps(result, default=str) + "\n")
    print("wrote", *filter(None, (args.out, args.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
