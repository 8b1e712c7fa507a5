"""Rows as tables, in Markdown that reads well on a screen too: bench.run prints them, and
bench.results writes them to documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from bench.cases import Case, peers_backward

Row = dict[str, Any]

OURS = "flash_cute"
OWN = (OURS, "sm80")
LABELS = {
    "fa2": "SDPA flash (FA2)",
    "sm80": "flash_cute, sm80 kernels",
    "deterministic": "flash_cute, deterministic",
    "cudnn": "SDPA cuDNN",
    "efficient": "SDPA efficient",
    "math": "SDPA math",
    "flex": "FlexAttention",
    "triton": "Triton (bench/)",
}
#: Each row of `speed` has our speed as a multiple of theirs.
COMPARED = ("fa2", "cudnn")
#: What `means` says of each measure of a row.
SENTENCES = {
    "ms": "is {:.2f}x as fast as",
    "max_error": "has {:.2f}x the greatest error of",
    "rmse": "has {:.2f}x the RMSE of",
}
#: Of these `means` speaks apart.
PEERS_BACKWARD = {replace(x, op=op).name for x in peers_backward() for op in ("bwd", "fwdbwd")}


def label(provider: str) -> str:
    return LABELS.get(provider, provider)


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """{case name: {provider: row}}, in the order of the rows."""
    table: dict[str, dict[str, Row]] = {}
    for row in rows:
        table.setdefault(row["name"], {})[row["provider"]] = row
    return table


def providers_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["provider"] for row in rows if "provider" in row))


def ratio(cells: dict[str, Row], peer: str, ours: str = OURS, measure: str = "ms") -> float | None:
    """How many times as fast as the peer we are, or how many times its error we have; None where
    either has no such number."""
    mine, theirs = cells.get(ours, {}).get(measure), cells.get(peer, {}).get(measure)
    if not mine or not theirs:
        return None
    return theirs / mine if measure == "ms" else mine / theirs


def ratios(
    rows: Sequence[Row], peer: str, ours: str = OURS, measure: str = "ms"
) -> dict[str, float]:
    """By case, where both have a number."""
    found = {name: ratio(cells, peer, ours, measure) for name, cells in by_case(rows).items()}
    return {name: value for name, value in found.items() if value is not None}


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as their widest cell; all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]

    def text(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(text, [header, rule, *lines]))


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _rate(row: Row | None) -> str:
    if row is None or row.get("ms") is None:
        return "-"
    value, us = row.get("gbps", row["tflops"]), row["ms"] * 1e3
    text = f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return f"{text} ({us:.0f})" if us >= 100 else f"{text} ({us:.1f})"


def speed(rows: Sequence[Row], more: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """A line per case, a column per provider: its rate, and its time in microseconds. `more` has
    columns: {title: {case name: text}}."""
    providers = providers_of(rows)
    compared = [name for name in COMPARED if name in providers and OURS in providers]
    unit = "GB/s" if any("gbps" in row for row in rows) else "TFLOP/s"
    more = more or {}
    header = [f"{unit} (us)", *map(label, providers), *(f"to {name}" for name in compared), *more]
    lines = [
        [name, *(_rate(cells.get(provider)) for provider in providers)]
        + [_times(ratio(cells, peer)) for peer in compared]
        + [column.get(name, "-") for column in more.values()]
        for name, cells in by_case(rows).items()
    ]
    return grid(header, lines)


def windows(rows: Sequence[Row]) -> str:
    """`speed`, and our times as multiples of the ideal: of the whole mask's time the share of the
    blocks that are visited, or a copy of as many bytes if that takes longer."""
    more = {}
    for provider in OWN:
        timed = [row for row in rows if row["provider"] == provider and row.get("ms")]
        whole = {replace(case_of(row), window=-1): row for row in timed if "window" not in row}
        more[f"{provider} / ideal"] = column = {}
        for row in timed:
            causal = whole.get(replace(case_of(row), window=-1))
            if "window" in row and causal:
                pairs, of_all = (case_of(x).visited_pairs(*x["tile"]) for x in (row, causal))
                ideal = max(causal["ms"] * pairs / of_all, row["copy_ms"])
                column[row["name"]] = _times(row["ms"] / ideal)
    return speed(rows, {title: column for title, column in more.items() if column})


def scores(rows: Sequence[Row]) -> str:
    """`speed`, our times as multiples of the plain kernel's, and our speed as one of Flex's."""
    more: dict[str, dict[str, str]] = {}
    for provider in OWN:
        timed = [row for row in rows if row["provider"] == provider and row.get("ms")]
        plain = {case_of(row): row["ms"] for row in timed if "score" not in row}
        known = [(row["name"], row["ms"], replace(case_of(row), score="")) for row in timed]
        more[f"{provider} / plain"] = {
            name: _times(ms / plain[case]) for name, ms, case in known if case in plain
        }
        flex = ratios(rows, "flex", provider)
        more[f"{provider} to flex"] = {name: _times(value) for name, value in flex.items()}
    return speed(rows, {title: column for title, column in more.items() if column})


def case_of(row: Row) -> Case:
    given = {field.name: row[field.name] for field in fields(Case) if field.name in row}
    return Case(**given | {"documents": tuple(row.get("documents", ()))})


#: What shows a suite; the others have `speed`.
OF_SUITES = {"window": windows, "scores": scores}


def lengths(rows: Sequence[Row]) -> str:
    """A line per head dim and mask, a column per length: our TFLOP/s, and times FA2's speed."""
    cells = {}
    ours = providers_of(rows)[0]
    for columns in by_case(rows).values():
        row = columns[ours]
        key = row["head_dim"], row["causal"], row["kv_len"]
        cells[key] = f"{row['tflops']:.0f} ({_times(ratio(columns, 'fa2', ours))})"
    columns = sorted({length for _, _, length in cells})
    lines = [
        [f"D {head_dim}, {'causal' if causal else 'full'}"]
        + [cells.get((head_dim, causal, length), "") for length in columns]
        for head_dim, causal in sorted({key[:2] for key in cells})
    ]
    return grid(["TFLOP/s (to FA2)", *(f"N {length}" for length in columns)], lines)


def host_time(rows: Sequence[Row]) -> str:
    providers = providers_of(rows)
    modes = [
        {**row, "name": f"{row['name']}, {'grad mode' if row['grad_mode'] else 'no_grad'}"}
        for row in rows
    ]
    lines = [
        [name, *(f"{cells[p]['host_us']:.1f}" if "host_us" in cells[p] else "-" for p in providers)]
        for name, cells in by_case(modes).items()
    ]
    return grid(["host time of a call, us", *map(label, providers)], lines)


def doors(rows: Sequence[Row]) -> str:
    """A line per door: host time with ours and with PyTorch's own kernel behind it."""
    lines = []
    for name, cells in by_case(rows).items():
        times = [cells[provider].get("host_us") for provider in (OURS, "torch")]
        ours, theirs = times
        text = _times(ours / theirs if ours and theirs else None)
        lines.append([name, *("-" if us is None else f"{us:.1f}" for us in times), text])
    return grid(["host time of a call, us", OURS, "PyTorch's own", "ratio"], lines)


def memory(rows: Sequence[Row]) -> str:
    def mib(count: int | None) -> str:
        return "-" if count is None else f"{count / 2**20:.1f}"

    providers = providers_of(rows)
    lines = [
        [name, mib(next(iter(cells.values()))["output_bytes"])]
        + [mib(cells[p].get("extra_bytes")) for p in providers]
        for name, cells in by_case(rows).items()
    ]
    forward = all(row.get("op", "fwd") == "fwd" for row in rows)
    results = "out + LSE" if forward else "results"
    return grid(["peak extra memory, MiB", results, *map(label, providers)], lines)


def training(rows: Sequence[Row]) -> str:
    head = ["attention", "last 100 steps", "held out", "tokens a second", "peak memory, MiB"]
    lines = [
        [
            row["attention"],
            *(f"{row[name]:.4f}" for name in ("last_loss", "held_out_loss")),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['peak_memory_bytes'] / 2**20:,.0f}",
        ]
        for row in rows
    ]
    return grid(head, lines)


def llama(rows: Sequence[Row]) -> str:
    lines = [
        [
            name,
            *(f"{x[field]:.{digits}f}" for field, digits in (("loss", 4), ("ms", 1)) for x in both),
            *(f"{x['gradient_error']:.2e}" for x in both),
            _times(ratio(cells, "sdpa")),
        ]
        for name, cells in by_case(rows).items()
        for both in [(cells[OURS], cells["sdpa"])]
    ]
    measures = ("loss", "ms", "error of gradients")
    names = (OURS, "SDPA")
    header = [f"{measure}, {name}" for measure in measures for name in names]
    return grid(["a step", *header, "to SDPA"], lines)


def context_parallel(rows: Sequence[Row]) -> str:
    lines = [
        [
            name,
            *(f"{x['ms']:.1f}" for x in both),
            *(f"{max(x['errors'].values()):.1e}" for x in both),
            _times(ratio(cells, "torch")),
        ]
        for name, cells in by_case(rows).items()
        for both in [(cells[OURS], cells["torch"])]
    ]
    header = [f"{measure}, {x}" for measure in ("ms", "error") for x in (OURS, "PyTorch's own")]
    return grid(["forward and backward", *header, "to PyTorch's"], lines)


def accuracy(rows: Sequence[Row]) -> str:
    """A line per case and gradient: greatest error and RMSE, and ours as multiples of theirs."""
    ours, *peers = providers_of(rows)

    def errors(row: Row) -> str:
        return f"{row['max_error']:.1e} ({row['rmse']:.1e})" if "rmse" in row else "-"

    def multiples(cells: dict[str, Row], peer: str) -> str:
        greatest, rmse = (ratio(cells, peer, ours, of) for of in ("max_error", "rmse"))
        return f"{_times(greatest)} ({_times(rmse)})"

    lines = [
        [name, *(errors(cells[p]) for p in (ours, *peers)), *(multiples(cells, p) for p in peers)]
        for name, cells in by_case(rows).items()
    ]
    header = ["greatest error (RMSE)", *map(label, (ours, *peers)), *(f"to {p}" for p in peers)]
    return grid(header, lines)


def means(rows: Sequence[Row]) -> list[str]:
    """A sentence for each peer of several points: our speed beside it."""
    ours, *peers = providers_of(rows) or [""]
    lines = []
    for peer in peers:
        for measure, sentence in SENTENCES.items():
            every = ratios(rows, peer, ours, measure)
            first = {name: every[name] for name in every if name in PEERS_BACKWARD}
            for known in (every, first) if len(first) < len(every) else (every,):
                if len(known) > 1:
                    low, high = (function(known, key=known.__getitem__) for function in (min, max))
                    mean = sentence.format(geometric_mean(known.values()))
                    lines.append(
                        f"{ours} {mean} {label(peer)} in the geometric mean of {len(known)} "
                        f"points. Lowest {known[low]:.2f}x ({low}), "
                        f"highest {known[high]:.2f}x ({high})."
                    )
    return lines


def notes(rows: Sequence[Row]) -> list[str]:
    """Per provider, what was checked and what was left out; and the clocks."""
    lines = []
    for provider in providers_of(rows):
        own = [row for row in rows if row["provider"] == provider]
        checked = [row["correct"] for row in own if "correct" in row]
        said = [f"{sum(checked)} of {len(checked)} correct"] if checked else []
        for status in ("skipped", "failed"):
            reasons = [row["note"] for row in own if row["status"] == status]
            for reason in dict.fromkeys(reasons):
                said.append(f"{status} {reasons.count(reason)} of {len(own)}: {reason}")
        if said:
            lines.append(f"{provider}: {'; '.join(said)}")
    clocks = [row["sm_mhz"] for row in rows if row.get("sm_mhz")]
    return [*lines, *([f"SM clock {min(clocks)} to {max(clocks)} MHz"] if clocks else [])]
