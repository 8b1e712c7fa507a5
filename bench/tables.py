"""Rows as text: the tables on the screen. (readme_table.py writes those of the README.)"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

BASE = "fa2"


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """{case name: {provider: row}}, in the order of the rows."""
    table: dict[str, dict[str, Row]] = {}
    for row in rows:
        table.setdefault(row["name"], {})[row["provider"]] = row
    return table


def providers_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["provider"] for row in rows))


def ratio(cells: dict[str, Row], provider: str, base: str = BASE) -> float | None:
    """How many times as fast as the base; None where either has no time."""
    ours, theirs = cells.get(provider, {}).get("ms"), cells.get(base, {}).get("ms")
    return theirs / ours if ours and theirs else None


def rate(row: Row | None) -> str:
    """TFLOP/s, or for decoding GB/s of K and V and the time."""
    if row is None or row.get("ms") is None:
        return "-"
    if "gbps" in row:
        return f"{row['gbps']:.0f} ({row['ms'] * 1e3:.1f} us)"
    return f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.2g}"


def ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell: the first to the left, the others to the right."""
    every = [header, *lines]
    widths = [max(len(line[i]) for line in every) for i in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([text(header), "-" * len(text(header)), *map(text, lines)])


def speed_table(rows: Sequence[Row]) -> str:
    providers = providers_of(rows)
    compared = [name for name in providers if name != BASE] if BASE in providers else []
    unit = "GB/s" if all("gbps" in row for row in rows if "ms" in row) else "TFLOP/s"
    header = [unit, *providers, *(f"{name}/{BASE}" for name in compared)]
    lines = []
    for name, cells in by_case(rows).items():
        rates = [rate(cells.get(provider)) for provider in providers]
        ratios = [ratio_text(ratio(cells, provider)) for provider in compared]
        lines.append([name, *rates, *ratios])
    return grid(header, lines)


def summary(rows: Sequence[Row]) -> str:
    """Per provider: geometric mean and worst point against the base, checks, what was left out."""
    lines = []
    cases = by_case(rows)
    for provider in providers_of(rows):
        own = [row for row in rows if row["provider"] == provider]
        parts = []
        ratios = {name: ratio(cells, provider) for name, cells in cases.items()}
        known = {name: value for name, value in ratios.items() if value is not None}
        if known and provider != BASE:
            low = min(known, key=lambda name: known[name])
            mean = geometric_mean(list(known.values()))
            parts.append(f"{mean:.3f}x {BASE} (geometric mean of {len(known)})")
            parts.append(f"lowest {known[low]:.3f}x at {low}")
        checked = [row for row in own if "correct" in row]
        if checked:
            right = sum(row["correct"] for row in checked)
            parts.append(f"{right} of {len(checked)} correct")
        for status in ("skipped", "failed"):
            notes = [row["note"] for row in own if row["status"] == status]
            for note in dict.fromkeys(notes):
                parts.append(f"{status} {notes.count(note)} of {len(own)}: {note}")
        lines.append(f"{provider}: " + ("; ".join(parts) or "measured"))
    clocks = [row["sm_mhz"] for row in rows if row.get("sm_mhz")]
    if clocks:
        lines.insert(0, f"SM clock {min(clocks)} to {max(clocks)} MHz")
    return "\n".join(lines)


def host_time_table(rows: Sequence[Row]) -> str:
    providers = providers_of(rows)
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        mode = "grad mode" if row["grad_mode"] else "no_grad"
        value = f"{row['host_us']:.1f}" if "host_us" in row else "-"
        table.setdefault(f"{row['name']}, {mode}", {})[row["provider"]] = value
    lines = [[name, *(cells.get(p, "-") for p in providers)] for name, cells in table.items()]
    return grid(["host time of a call, us", *providers], lines)


def memory_table(rows: Sequence[Row]) -> str:
    providers = providers_of(rows)
    lines = []
    for name, cells in by_case(rows).items():
        needed = mib(next(iter(cells.values()))["output_bytes"])
        lines.append([name, needed, *(mib(cells[p].get("extra_bytes")) for p in providers)])
    return grid(["peak extra memory, MiB", "out + LSE", *providers], lines)
