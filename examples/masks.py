"""Draws which keys a query sees: examples/masks.png, for examples/masks.md.

    python -m examples.masks
    python -m examples.masks --out masks.png

Nothing is drawn by a rule of its own: each picture asks `flash_cute.forward`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import flash_cute

PICTURE = Path(__file__).parent / "masks.png"
SEEN, UNUSED = "#56b4e9", "#d9d9d9"


class Call(NamedTuple):
    queries: int
    keys: int
    arguments: dict[str, Any]  # of `forward`
    says: str


CALLS = (
    Call(8, 8, {"is_causal": True}, "as many queries as keys"),
    Call(4, 8, {"is_causal": True}, "the last query sees all keys"),
    Call(8, 4, {"is_causal": True}, "the first 4 see no key"),
    Call(8, 8, {"window_size": (2, 1)}, "2 keys before, 1 after"),
    Call(8, 8, {"window_size": (2, -1)}, "-1: all on that side"),
    Call(8, 8, {"window_size": (0, 0)}, "0: none on that side"),
    Call(4, 8, {"is_causal": True, "window_size": (2, 0)}, "W = 3 keys"),
    Call(4, 8, {"is_causal": True, "key_start": 1, "seqused_k": 7}, "keys 1 to 6 are in use"),
)


def seen(call: Call, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """(queries, keys), bool. The values are unit vectors: a row of `out` has its keys' weights."""
    q, k = (torch.zeros(1, 1, n, call.keys, device=device, dtype=dtype) for n in call[:2])
    v = torch.eye(call.keys, device=device, dtype=dtype)[None, None]
    given = dict(call.arguments)
    for name in given.keys() & {"key_start", "seqused_k"}:
        given[name] = torch.tensor([given[name]], device=device)
    return flash_cute.forward(q, k, v, **given)[0][0, 0] > 0


def draw(axis: Axes, call: Call) -> None:
    """Rows are queries, columns are keys. A dot stands where a query's diagonal is."""
    used = call.arguments.get("seqused_k", call.keys)
    start = call.arguments.get("key_start", 0)
    for i, row in enumerate(seen(call).tolist()):
        for j, is_seen in enumerate(row):
            colour = SEEN if is_seen else "white" if start <= j < used else UNUSED
            axis.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="#999999"))
        if 0 <= (diagonal := i + used - call.queries) < call.keys:
            axis.plot(diagonal + 0.5, i + 0.5, "k.", markersize=5)
    axis.set(xlim=(0, call.keys), ylim=(call.queries, 0), aspect="equal")
    axis.set_xticks([j + 0.5 for j in range(call.keys)], range(call.keys))
    axis.set_yticks([i + 0.5 for i in range(call.queries)], range(call.queries))
    axis.tick_params(length=0, labelsize=7)
    title = ", ".join(f"{name}={value}" for name, value in call.arguments.items())
    axis.set_title(title.replace(", window", ",\nwindow").replace(", key", ",\nkey"), fontsize=8)
    axis.set_xlabel(call.says, fontsize=8)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.masks")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="PNG")
    args = parser.parse_args(argv)
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    for axis, call in zip(figure.subplots(2, 4).flat, CALLS, strict=True):
        draw(axis, call)
    figure.savefig(args.out, dpi=110)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
