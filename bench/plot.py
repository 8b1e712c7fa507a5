"""Figure of a saved result: a panel per head dim and mask, sequence length against TFLOP/s.

    python -m bench.plot bench/results/train.json -o bench/results/train.png

It reads what `bench.run --json` saved and measures nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.results import load
from bench.tables import label, providers_of

#: Colours that stay apart for colour-blind readers; ours is the strong one.
COLOURS = {
    "flash_cute": "#d55e00",
    "sm80": "#f0b799",
    "deterministic": "#8c3b00",
    "fa2": "#0072b2",
    "cudnn": "#009e73",
    "efficient": "#cc79a7",
    "flex": "#e69f00",
    "triton": "#56b4e9",
    "math": "#7f7f7f",
}


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row.get("tflops") is not None]
    if not rows:
        raise ValueError("no timed rows to plot")
    providers = providers_of(rows)
    head_dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure, axes = plt.subplots(
        len(masks), len(head_dims), figsize=(1 + 4 * len(head_dims), 1 + 3 * len(masks)),
        sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for line, causal in enumerate(masks):
        for column, head_dim in enumerate(head_dims):
            here = [r for r in rows if (r["causal"], r["head_dim"]) == (causal, head_dim)]
            _panel(axes[line][column], here, providers)
            mask = "causal" if causal else "full"
            axes[line][column].set_title(f"head dim {head_dim}, {mask}", fontsize=10)
        axes[line][0].set_ylabel("TFLOP/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    meta = result["meta"]
    dtypes = ", ".join(sorted({row["dtype"] for row in rows}))
    op_names = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward and backward"}
    ops = ", ".join(sorted({op_names[row.get("op", "fwd")] for row in rows}))
    where = meta.get("gpu") or f"{meta.get('device')}, wall clock"
    figure.suptitle(
        f"Attention {ops}, {dtypes}, {where}, torch {meta.get('torch')} "
        f"({meta.get('suite') or 'custom'}, {meta.get('date', '')[:10]})",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axis: Any, rows: list[dict[str, Any]], providers: list[str]) -> None:
    """Bars in groups: one group per shape, one bar per provider."""
    shapes = list(dict.fromkeys((row["kv_len"], row["name"]) for row in rows))
    shapes.sort()
    width = 0.8 / len(providers)
    for index, provider in enumerate(providers):
        values = {r["name"]: r["tflops"] for r in rows if r["provider"] == provider}
        positions = [
            place + (index - (len(providers) - 1) / 2) * width for place in range(len(shapes))
        ]
        heights = [values.get(name, 0.0) for _, name in shapes]
        axis.bar(
            positions, heights, width * 0.95, color=COLOURS.get(provider),
            label=label(provider),
        )  # fmt: skip
    axis.set_xticks(range(len(shapes)), [_length(kv_len) for kv_len, _ in shapes], fontsize=8)
    axis.set_xlabel("sequence length", fontsize=9)
    axis.grid(axis="y", linewidth=0.5, alpha=0.5)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("result", type=Path, help="JSON written by bench.run --json")
    parser.add_argument("-o", "--output", type=Path, help="PNG, SVG, PDF (default: PNG beside it)")
    args = parser.parse_args(argv)
    output = args.output or args.result.with_suffix(".png")
    try:
        plot(load(args.result), output)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
