"""Trains a small GPT on `flash_cute.forward`. The text is the source of Python's standard library.

    python -m examples.train_gpt
    python -m examples.train_gpt --attention sdpa --compile --json sdpa.json

The vocabulary is the 256 bytes. Sizes that are not given depend on the device: 32 million
parameters on a GPU, a tiny model on the CPU. The initial weights and the batches depend on the
seed and the sizes alone, so runs with different attentions can be compared step by step.
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

import torch
import torch.nn.functional as F
from einops import rearrange
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

import flash_cute

ATTENTIONS = ("flash_cute", "sdpa", "math")
GPU_SIZES = {"steps": 2000, "length": 1024, "batch": 32, "layers": 10, "heads": 8, "width": 512}
CPU_SIZES = {"steps": 300, "length": 256, "batch": 8, "layers": 4, "heads": 4, "width": 128}
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
    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x))
        q, k, v = rearrange(qkv, "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.heads)
        out = causal_attention(self.attention, q, k, v)
        x = x + self.proj(rearrange(out, "b h n d -> b n (h d)"))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Tokens (B, N) -> logits (B, N, 256)."""

    def __init__(self, length: int, layers: int, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:  # neither a bias nor a norm
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
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


def loss_of(model: nn.Module, text: Tensor, starts: Tensor, length: int) -> Tensor:
    """The mean cross entropy, in nats a byte, of the sequences that begin at `starts`."""
    places = starts.to(text.device)[:, None] + torch.arange(length + 1, device=text.device)
    sequences = text[places].long()
    with torch.autocast(text.device.type, torch.bfloat16):
        logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())


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


def train(model: nn.Module, text: Tensor, args: argparse.Namespace) -> tuple[list[float], float]:
    """The loss of each step, and tokens a second after the first step (which compiles)."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, args.steps))
    generator = torch.Generator().manual_seed(args.seed)
    losses = torch.zeros(args.steps, device=text.device)
    bar = tqdm(range(args.steps), mininterval=0.1 if sys.stderr.isatty() else 10)
    for step in bar:
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
        loss = loss_of(model, text, starts, args.length)
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
    check_finite(losses)
    seconds = time.perf_counter() - start
    return losses.tolist(), (args.steps - 1) * args.batch * args.length / seconds


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, args: argparse.Namespace) -> float:
    """The mean loss of sequences that are spread evenly over the text."""
    starts = torch.linspace(0, len(text) - args.length - 1, EVAL_BATCHES * args.batch).long()
    losses = [loss_of(model, text, batch, args.length) for batch in starts.split(args.batch)]
    return float(torch.stack(losses).mean())


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
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first is not timed")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    if args.width // args.heads > 256:
        parser.error(f"--width / --heads is {args.width // args.heads}: a head dim is at most 256")
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


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    text, held_out = (x.to(args.device) for x in standard_library())
    if args.length >= min(len(text), len(held_out)):
        sys.exit(f"train_gpt: --length {args.length}: only {len(held_out)} bytes are held out")
    torch.manual_seed(args.seed)  # weights and batches are drawn on the CPU, alike on every device
    model = GPT(args.length, args.layers, args.width, args.heads, args.attention).to(args.device)
    parameters = sum(p.numel() for p in model.parameters())
    device = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU"
    title = f"GPT of {parameters / 1e6:.1f}M parameters on {device}, attention {args.attention}"
    print(f"{title}\n{len(text):,} bytes of text, and {len(held_out):,} held out", flush=True)
    if args.compile:
        model.compile(fullgraph=True)

    losses, speed = train(model, text, args)
    last = losses[-100:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of the whole process
    if args.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    held_out_loss = evaluate(model, held_out, args)
    print(f"{speed:,.0f} tokens a second, peak memory {peak / 2**20:,.0f} MiB")
    print(f"mean loss of the last {len(last)} steps {statistics.mean(last):.4f}")
    print(f"loss on held-out text {held_out_loss:.4f}")
    plot(losses, held_out_loss, title, args.out)
    if args.json:
        result = vars(args) | {
            "device": device, "torch": torch.__version__, "python": platform.python_version(),
            "parameters": parameters, "tokens_per_second": speed, "peak_memory_bytes": peak,
            "last_loss": statistics.mean(last), "held_out_loss": held_out_loss, "losses": losses,
        }  # fmt: skip
        args.json.write_text(json.dumps(result, default=str) + "\n")
    print("wrote", *filter(None, (args.out, args.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
