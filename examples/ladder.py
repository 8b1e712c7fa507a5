"""A walk from naive attention to FlashAttention-2, for readers of csrc/cute_fa2/sm80/fwd.

    python -m examples.ladder
    python -m examples.ladder --longest 8192 --out ladder.png

The rungs are the functions of `flash_cute.ladder`: read them along. The walk shows each with its
formula, its paper and the lines of the kernels that do the same. Then it runs all of them on a
small problem, and measures how memory grows with the length. Everything runs on the CPU.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import ladder

COLOURS = ("#7f7f7f", "#d55e00")  # as in bench/plot.py
SHORTEST = 256  # the first N of the measurement
KERNELS = Path(__file__).parent.parent / "csrc" / "cute_fa2"

Attention = Callable[..., tuple[Tensor, Tensor]]


class Place(NamedTuple):
    """The first line of a file of KERNELS that has this text, and what it does there."""

    file: str
    text: str
    what: str

    def line(self) -> int:
        lines = (KERNELS / self.file).read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if self.text in line)


MAINLOOP, KERNEL, EPILOGUE = (f"sm80/fwd/{name}.h" for name in ("mainloop", "kernel", "epilogue"))
SOFTMAX, POLICY = "common/online_softmax.h", "common/softmax_policy.h"
PLACES = {
    ladder.naive: (
        Place(MAINLOOP, "gemm_qk<Rows>(thread_here", "S = Q K^T of a block, in registers alone"),
        Place(MAINLOOP, "apply_mask<kStepM>(row0", "-inf where the mask hides a key"),
    ),
    ladder.three_passes: (
        Place(SOFTMAX, "row_max[r] = fmaxf(", "the maximum of a thread's columns"),
        Place(SOFTMAX, "allreduce.max(row_max)", "the maximum of the row, from its threads"),
        Place(SOFTMAX, "score = platform::exp2(", "e^(S - m), as a power of 2"),
    ),
    ladder.two_passes: (
        Place(SOFTMAX, "policy_.rescale(limit_[r], limit)", "e^(m - m')"),
        Place(SOFTMAX, "sum_[r] *= rescale_[r]", "l e^(m - m')"),
        Place(SOFTMAX, "sum_[kFirstRow + r] += weigh(", "and the sum of the block's weights"),
    ),
    ladder.one_pass: (
        Place(MAINLOOP, "rescale<Rows::kFirstRow>(out)", "O e^(m - m')"),
        Place(MAINLOOP, "convert<Element>(tSrS)", "P in 16 bits, for the tensor cores"),
        Place(MAINLOOP, "as_a_operand(tSrP)", "from here to the end of `step`: O += P V"),
        Place(KERNEL, "softmax.normalize(out", "O / l"),
    ),
    ladder.chunks: (
        Place(EPILOGUE, "void run_split(", "split-KV: O, m and l of a split go to memory"),
        Place(
            "combine/kernel.h", "policy.rescale(row.limit, limit)", "l_c e^(m_c - m), for e^LSE_c"
        ),
        Place(
            "combine/kernel.h", "out(c) += weight[i] * of_splits(c, i)", "the sum over the splits"
        ),
    ),
    ladder.flash_attention_1: (
        Place("sm80/fwd/mainloop_base.h", "auto sK(int n_block)", "a block of K on the chip"),
        Place(MAINLOOP, "load_v<false>(n_block)", "V comes while Q K^T is computed"),
        Place(MAINLOOP, "void load_next_k(", "the next K comes during softmax and P V"),
    ),
    ladder.flash_attention_2: (
        Place(KERNEL, "const TileCoord tile = tile_of(", "a CTA has one tile of rows"),
        Place(MAINLOOP, "mask_.visible_blocks(row0_", "the key blocks that the tile sees"),
        Place(MAINLOOP, "while (has_next(n_block--))", "the loop, from the last to the first"),
        Place(EPILOGUE, "softmax.template lse<", "LSE = m + log l"),
        Place(POLICY, "float limit_above(", "beyond the paper: m has slack, so few blocks rescale"),
    ),
}


def walk() -> None:
    for number, (rung, places) in enumerate(PLACES.items(), 1):
        print(f"{number}. {rung.__name__}: {inspect.getdoc(rung)}\n\nIn csrc/cute_fa2:")
        for place in places:
            print(f"    {f'{place.file}:{place.line()}':32}  {place.what}")
        print()


def peak_bytes(attention: Attention, *inputs: Tensor) -> int:
    """The most that a call has allocated at one time, its results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = attention(*inputs)
    del results  # only now, so that the profile has nothing but what the call itself frees
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in changes), default=0)


def passes_over_keys(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> float:
    """How often a score is computed, by the FLOPs. The product with V has those of one pass."""
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v)
    flops: int = counter.get_total_flops()
    return flops / (2 * q.numel() * k.shape[2]) - 1


def compare(length: int) -> None:
    inputs = torch.randn(3, 1, 2, length, 32, dtype=torch.float64)
    print(f"All rungs, with {length} queries and keys, 2 heads of 32, fp64:")
    print(f"{'':18} passes over K  extra memory, KiB  greatest difference to the rung before")
    before = None
    for rung in ladder.RUNGS:
        out, lse = rung(*inputs)
        here = torch.cat([out, lse[..., None]], -1)
        difference = "-" if before is None else f"{float((here - before).abs().max()):.1e}"
        before = here
        passes, kib = passes_over_keys(rung, *inputs), peak_bytes(rung, *inputs) / 1024
        print(f"{rung.__name__:18} {passes:13.0f}  {kib:17,.0f}  {difference:>38}")


def measure(lengths: list[int]) -> dict[str, list[int]]:
    """Bytes beyond q, k and v. On one thread: PyTorch's kernel has scratch memory for each."""
    calls = {"naive attention": ladder.naive, "flash_cute.forward": flash_cute.forward}
    peaks: dict[str, list[int]] = {name: [] for name in calls}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print("\nPeak memory beyond q, k and v, 4 heads of 64, fp32, in MiB:")
    print(f"{'N':>6}", *calls, sep="  ")
    for length in lengths:
        inputs = torch.randn(3, 1, 4, length, 64)
        for name, call in calls.items():
            peaks[name].append(peak_bytes(call, *inputs))
        cells = (f"{peaks[name][-1] / 2**20:{len(name)}.1f}" for name in calls)
        print(f"{length:6}", *cells, sep="  ", flush=True)
    torch.set_num_threads(threads)
    return peaks


def plot(lengths: list[int], peaks: dict[str, list[int]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.add_subplot(
        xlabel="sequence length N",
        ylabel="MiB beyond q, k and v",
        title="Peak memory of a forward on the CPU, 4 heads of 64, fp32",
    )
    for (name, bytes_), colour, power in zip(peaks.items(), COLOURS, (2, 1), strict=True):
        mib = [peak / 2**20 for peak in bytes_]
        axis.loglog(lengths, mib, "o", color=colour, label=f"{name}, measured")
        grown = [mib[-1] * (length / lengths[-1]) ** power for length in lengths]
        law = "grows with N" if power == 1 else f"grows with $N^{power}$"
        axis.loglog(lengths, grown, color=colour, linewidth=6, alpha=0.25, label=law)
    axis.set_xticks(lengths, [str(length) for length in lengths], minor=False)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(frameon=False)
    axis.grid(linewidth=0.5, alpha=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.ladder")
    parser.add_argument("--length", type=int, default=512, help="of the comparison of all rungs")
    parser.add_argument(
        "--longest", type=int, default=4096, help="N up to which memory is measured"
    )
    parser.add_argument("--out", type=Path, default=Path("build/ladder.png"), metavar="PNG")
    args = parser.parse_args(argv)
    if args.length < 1:
        parser.error(f"--length {args.length} is not positive")
    if args.longest < SHORTEST:
        parser.error(f"--longest {args.longest} is below {SHORTEST}, where the measurement begins")
    return args


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each profile logs its start and end
    torch.manual_seed(0)
    walk()
    compare(args.length)
    lengths = [SHORTEST]
    while 2 * lengths[-1] <= args.longest:
        lengths.append(2 * lengths[-1])
    peaks = measure(lengths)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plot(lengths, peaks, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
