"""Whether results reach the project's goals: how fast the kernels of each architecture are to be
beside their peer on an H200.

    for suite in train fp16 doc gqa tuning; do
        python -m bench.run --suite $suite --arch sm90 --baselines sm80,fa2,cudnn --json $suite.json
    done
    python -m bench.goals train.json fp16.json doc.json gqa.json tuning.json

It reads what `bench.run --json` saved and measures nothing. Rates are compared within a run; of
several that have a point, the last named counts. A goal for which points are missing, or wrong, is
not reached. Exit status 1 unless all are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cases import SUITES, Case
from bench.plot import load
from bench.tables import geometric_mean, grid

#: What two runs of the same thing may differ by.
NOISE = 0.01

#: Of each run, {(architecture or peer, case): TFLOP/s, or None of a wrong result}.
Runs = list[dict[tuple[str, Case], "float | None"]]
#: Of a goal, each point's name and its value, or None where it was not measured.
Values = Iterator[tuple[str, float | None]]


@dataclass(frozen=True)
class Goal:
    """That a statistic of some values is at least so much."""

    text: str
    statistic: str  #: "mean" (geometric) or "lowest"
    least: float
    values: Callable[[Runs], Values]

    def judge(self, runs: Runs) -> tuple[str, str, str]:
        """What was measured, whether that is enough, and the lowest point."""
        values = list(self.values(runs))
        known = {name: value for name, value in values if value is not None}
        if len(known) < len(values):
            return "-", f"{len(values) - len(known)} of {len(values)} points not measured", ""
        low = min(known, key=lambda name: known[name])
        value = known[low] if self.statistic == "lowest" else geometric_mean([*known.values()])
        verdict = "reached" if value >= self.least else "missed"
        if abs(value / self.least - 1) < NOISE:
            verdict += ", within noise"
        return f"{value:.3f}", verdict, f"{known[low]:.3f} {low}"


def kernels_of(row: dict[str, Any], meta: dict[str, Any]) -> str:
    """Which architecture's kernels ran, as on this GPU; of a peer, and of other choices, a name."""
    if row["provider"] != "flash_cute" or meta["device"] != "cuda" or meta.get("smem_limit"):
        return str(row["provider"])
    on_hopper = meta["capability"].startswith("9.")
    is_sm90 = on_hopper and "sm_90a" in meta["flash_cute"]["archs"]
    return str(meta.get("arch") or ("sm90" if is_sm90 else "sm80"))


def runs_of(results: Iterable[dict[str, Any]]) -> Runs:
    fields = Case.__dataclass_fields__
    return [
        {
            (kernels_of(row, meta), Case(**{key: row[key] for key in fields})): (
                row["tflops"] if row.get("correct", True) else None
            )
            for row in rows
            if "tflops" in row
        }
        for meta, rows in ((result["meta"], result["rows"]) for result in results)
    ]


def _ratio(runs: Runs, a: tuple[str, Case], *b: tuple[str, Case]) -> float | None:
    """a's rate over the mean of b's, in the last run that has them all: rates of different runs do
    not compare. None if one of them is wrong there."""
    for run in reversed(runs):
        if all(point in run for point in (a, *b)):
            known = [rate for rate in (run[point] for point in (a, *b)) if rate is not None]
            return known[0] * len(b) / sum(known[1:]) if len(known) == 1 + len(b) else None
    return None


def beside(arch: str, peer: str, suite: str, where: Callable[[Case], bool] = lambda _: True) -> Any:
    """How many times as fast as the peer, over a suite's cases."""
    return lambda runs: (
        (case.name, _ratio(runs, (arch, case), (peer, case)))
        for case in SUITES[suite]()
        if where(case)
    )


def fp16_as_bf16(runs: Runs) -> Values:
    """The speed beside cuDNN in fp16, over that in bf16 in the same run."""
    for case in SUITES["fp16"]():
        if case.dtype == "fp16":
            twin = replace(case, dtype="bf16")
            has_both = [run for run in runs if {("sm90", case), ("sm90", twin)} <= run.keys()]
            of_fp16, of_bf16 = (_ratio(has_both, ("sm90", c), ("cudnn", c)) for c in (case, twin))
            yield case.name, of_fp16 / of_bf16 if of_fp16 and of_bf16 else None


def grouped_as_many(runs: Runs) -> Values:
    """The speed of heads that share keys, over that of as many heads with keys of their own."""
    for case in SUITES["gqa"]():
        if case.kv_heads == 8 and case.q_len == case.kv_len == 4096:
            many = replace(case, kv_heads=case.heads)
            yield case.name, _ratio(runs, ("sm90", case), ("sm90", many))


def between(head_dim: int, below: int, above: int) -> Any:
    """The rate at a head dim over the mean of its neighbours'."""

    def values(runs: Runs) -> Values:
        for case in SUITES["tuning"]():
            if case.head_dim == head_dim:
                neighbours = [replace(case, head_dim=d, heads=2048 // d, kv_heads=2048 // d)
                              for d in (below, above)]  # fmt: skip
                yield case.name, _ratio(runs, ("sm90", case), *(("sm90", c) for c in neighbours))

    return values


def _goals() -> Iterator[Goal]:
    over = "sm90 over cuDNN"
    yield Goal(f"{over}, 36 points", "mean", 1.12, beside("sm90", "cudnn", "train"))
    yield Goal(f"{over}, 36 points", "lowest", 1.0, beside("sm90", "cudnn", "train"))
    short = beside("sm90", "cudnn", "train", lambda case: case.q_len <= 1024)
    yield Goal(f"{over}, N up to 1024", "mean", 1.03, short)
    long = beside(
        *("sm90", "cudnn", "train"),
        lambda case: case.head_dim == 64 and case.q_len >= 4096 and not case.causal,
    )
    yield Goal(f"{over}, D 64 full, N from 4096", "lowest", 1.2, long)
    yield Goal("sm90: fp16's ratios over bf16's", "lowest", 1.0, fp16_as_bf16)
    yield Goal("sm90: 32/8 heads over 32, D 128", "lowest", 1.0, grouped_as_many)
    yield Goal("sm90: D 96 over D 64 and 128", "mean", 1.0, between(96, 64, 128))
    yield Goal("sm90: D 192 over D 128 and 256", "mean", 1.0, between(192, 128, 256))

    over = "sm80 over FlashAttention-2"
    small = beside("sm80", "fa2", "train", lambda case: case.head_dim <= 128)
    yield Goal(f"{over}, D 64 and 128", "mean", 1.2, small)
    large = beside("sm80", "fa2", "train", lambda case: case.head_dim == 256)
    yield Goal(f"{over}, D 256", "mean", 1.05, large)
    yield Goal(f"{over}, 36 points", "mean", 1.15, beside("sm80", "fa2", "train"))
    yield Goal(f"{over}, 36 points", "lowest", 1.0, beside("sm80", "fa2", "train"))
    document = beside("sm80", "fa2", "doc", lambda case: case.causal)
    yield Goal(f"{over}, a long document, causal", "lowest", 1.2, document)
    document = beside("sm80", "fa2", "doc", lambda case: not case.causal)
    yield Goal(f"{over}, a long document, full", "lowest", 1.1, document)


GOALS = tuple(_goals())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goals", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    args = parser.parse_args(argv)
    try:
        results = [load(path) for path in args.results]
        runs = runs_of(results)
        gpus = dict.fromkeys(result["meta"].get("gpu", "no GPU") for result in results)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except (AttributeError, KeyError, TypeError) as error:
        parser.error(f"a result is not as bench.run saves it: {error!r}")
    judged = [(goal, *goal.judge(runs)) for goal in GOALS]
    lines = [
        [goal.text, goal.statistic, f"{goal.least:.2f}", value, verdict, low]
        for goal, value, verdict, low in judged
    ]
    print(grid(["goal", "of its points", "at least", "measured", "", "lowest point"], lines))
    reached = sum(verdict.startswith("reached") for _, _, verdict, _ in judged)
    print(f"{reached} of {len(GOALS)} reached on {', '.join(gpus)}; the goals are those of an H200")
    return 0 if reached == len(GOALS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
