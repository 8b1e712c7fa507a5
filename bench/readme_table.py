"""Writes the numbers of README.md from bench/results/*.json, so that none is typed by hand.

    python -m bench.readme_table            # rewrites README.md
    python -m bench.readme_table --check    # exit status 1 if README.md is not up to date

README.md has a pair of comments for each table: <!-- numbers:train --> ... <!-- end:train -->.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.environment import REPOSITORY
from bench.plot import LABELS, load
from bench.tables import by_case, geometric_mean, mib, providers_of, ratio

PLACEHOLDER = "TODO-numbers: not measured yet."
Result = dict[str, Any]


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)


def source(result: Result) -> str:
    meta = result["meta"]
    driver = f", driver {meta['driver']}" if meta.get("driver") else ""
    commit = f", commit `{meta['commit'][:10]}`" if meta.get("commit") else ""
    machine = meta.get("gpu") or "CPU"
    return f"{machine}{driver}, torch {meta['torch']}{commit}, {meta['date'][:10]}."


def _label(provider: str) -> str:
    return LABELS.get(provider, provider)


def speed(result: Result) -> str:
    """A line per head dim and mask, a column per length: our TFLOP/s (times as fast as FA2)."""
    cases = by_case(result["rows"])
    cells = {}
    for columns in cases.values():
        ours = columns["flash_cute"]
        times = ratio(columns, "flash_cute")
        text = f"{ours['tflops']:.0f}" + (f" ({times:.2f}x)" if times else "")
        cells[ours["head_dim"], ours["causal"], ours["kv_len"]] = text
    lengths = sorted({length for _, _, length in cells})
    lines = [
        [f"D {head_dim}, {'causal' if causal else 'full'}"]
        + [cells.get((head_dim, causal, length), "") for length in lengths]
        for head_dim, causal in sorted({key[:2] for key in cells})
    ]
    parts = []
    for provider in providers_of(result["rows"]):
        if provider == "flash_cute":
            continue
        ratios = [ratio(columns, "flash_cute", provider) for columns in cases.values()]
        known = [value for value in ratios if value is not None]
        if known:
            parts.append(
                f"{geometric_mean(known):.2f}x {_label(provider)} (lowest {min(known):.2f}x, "
                f"highest {max(known):.2f}x, {len(known)} points)"
            )
    table = markdown(["", *(f"N {length}" for length in lengths)], lines)
    return f"{table}\n\nGeometric mean of the speed: {'; '.join(parts)}. {source(result)}"


def points(result: Result) -> str:
    """A line per case, a column per provider: microseconds."""
    providers = providers_of(result["rows"])

    def text(row: dict[str, Any] | None) -> str:
        if row is None or row.get("ms") is None:
            return "-"
        microseconds = row["ms"] * 1e3
        return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"

    lines = [
        [name, *(text(cells.get(provider)) for provider in providers)]
        for name, cells in by_case(result["rows"]).items()
    ]
    return f"{markdown(['microseconds', *map(_label, providers)], lines)}\n\n{source(result)}"


def host_time(result: Result) -> str:
    rows = [row for row in result["rows"] if not row["grad_mode"]]
    providers = providers_of(rows)
    lines = [
        [name, *(f"{cells[p]['host_us']:.1f}" if "host_us" in cells[p] else "-" for p in providers)]
        for name, cells in by_case(rows).items()
    ]
    header = ["microseconds a call", *map(_label, providers)]
    return f"{markdown(header, lines)}\n\n{source(result)}"


def memory(result: Result) -> str:
    providers = providers_of(result["rows"])
    lines = [
        [name, mib(next(iter(cells.values()))["output_bytes"])]
        + [mib(cells[p].get("extra_bytes")) for p in providers]
        for name, cells in by_case(result["rows"]).items()
    ]
    header = ["MiB", "out + LSE", *map(_label, providers)]
    return f"{markdown(header, lines)}\n\n{source(result)}"


RENDERERS: dict[str, Callable[[Result], str]] = {
    "train": speed,
    "train_h100": speed,
    "small_smem": speed,
    "prefill": points,
    "decode": points,
    "host_time": host_time,
    "memory": memory,
}


def render(text: str, results: Path) -> str:
    """README's text with every numbered section filled from `results`/<name>.json."""

    def section(match: re.Match[str]) -> str:
        name = match["name"]
        path = results / f"{name}.json"
        body = RENDERERS[name](load(path)) if path.exists() else PLACEHOLDER
        if name == "train" and (results / "train.png").exists():
            body += "\n\n![Speed beside its peers](bench/results/train.png)"
        return f"<!-- numbers:{name} -->\n\n{body}\n\n<!-- end:{name} -->"

    pattern = r"<!-- numbers:(?P<name>\w+) -->.*?<!-- end:(?P=name) -->"
    return re.sub(pattern, section, text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme_table", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--readme", type=Path, default=REPOSITORY / "README.md")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "bench" / "results")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args(argv)
    before = args.readme.read_text()
    after = render(before, args.results)
    if args.check:
        print("up to date" if after == before else f"{args.readme} is not up to date")
        return int(after != before)
    args.readme.write_text(after)
    print(f"wrote {args.readme}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
