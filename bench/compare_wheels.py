"""Is a new wheel as fast as an old one? Processes of both take turns on one GPU.

    pip install --no-deps --target /tmp/old OLD.whl; pip install --no-deps --target /tmp/new NEW.whl
    python -m bench.compare_wheels /tmp/old /tmp/new --json wheels.json
    python -m bench.compare_wheels /tmp/old /tmp/new --suite prefill
    python -m bench.compare_wheels /tmp/old /tmp/new --host-time

Of each point the medians over a wheel's processes are compared. The exit status is 1 where the new
wheel's speed is below 0.995 of the old one's in the geometric mean, or below 0.97 at a point.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.baselines import PROVIDERS
from bench.cases import SUITES, make_inputs
from bench.environment import REPOSITORY
from bench.harness import Options, Timer, default_device, turn_order, wake_up
from bench.host_time import measure_host_time
from bench.tables import geometric_mean, grid

LEAST_MEAN, LEAST = 0.995, 0.97
WARMUP, CALLS = 3, 30
#: Of a process, {point: median}: milliseconds, or of host time microseconds.
Medians = dict[str, float]


@torch.no_grad()
def measure(suite: str | None) -> Medians:
    """What a process measures, of the flash_cute that it finds: the forwards of a suite, or without
    one the host time of a call."""
    device = default_device()
    wake_up(device)
    if suite is None:
        rows = measure_host_time([PROVIDERS["flash_cute"], PROVIDERS["fa2"]], Options(device))
        return {f"{r['name']}, {r['provider']}": r["host_us"] for r in rows if not r["grad_mode"]}
    timer, medians = Timer(device), {}
    for case in filter(lambda case: case.op == "fwd", SUITES[suite]()):
        call = PROVIDERS["flash_cute"].bind(case, *make_inputs(case, device))
        medians[case.name] = statistics.median(timer(call, WARMUP + CALLS)[WARMUP:])
    return medians


def process(folder: Path, suite: str | None) -> Medians:
    """`measure` in a process of its own, which takes the flash_cute in `folder`."""
    command = [sys.executable, "-m", "bench.compare_wheels", "--worker", str(folder)]
    command += ["--suite", suite] if suite else ["--host-time"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    medians: Medians = json.loads(done.stdout.splitlines()[-1])
    return medians


def worker(folder: Path, suite: str | None) -> None:
    import flash_cute

    found = Path(flash_cute.__file__).resolve()
    assert found.is_relative_to(folder), f"{found} is not in {folder}"
    print(json.dumps(measure(suite)))


def summarize(old: list[Medians], new: list[Medians]) -> list[dict[str, Any]]:
    """A row per point: each wheel's median and the new one's speed as a multiple of the old."""
    rows = []
    for point in old[0]:
        before, after = (statistics.median(m[point] for m in samples) for samples in (old, new))
        rows.append({"point": point, "old": before, "new": after, "ratio": before / after})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare_wheels", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folders", nargs="+", type=lambda text: Path(text).resolve(),
                        metavar="FOLDER", help="old and new: each has a flash_cute")  # fmt: skip
    with_forwards = sorted(name for name, cases in SUITES.items()
                           if any(case.op == "fwd" for case in cases()))  # fmt: skip
    parser.add_argument("--suite", choices=with_forwards, default="train",
                        help="whose forwards are timed (default train)")  # fmt: skip
    parser.add_argument("--host-time", action="store_const", const=None, dest="suite",
                        help="of a call, beside SDPA flash")  # fmt: skip
    parser.add_argument("--processes", type=int, default=7, help="of each wheel (default 7)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save all medians")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        worker(args.folders[0], args.suite)
        return 0
    if len(args.folders) != 2:
        parser.error("two folders are compared")
    samples: list[list[Medians]] = [[], []]
    for turn in range(args.processes):
        for wheel in turn_order([0, 1], turn):
            samples[wheel].append(process(args.folders[wheel], args.suite))
    rows = summarize(*samples)
    unit = "ms" if args.suite else "us"
    lines = [[r["point"], *(f"{r[k]:.4g}" for k in ("old", "new")), f"{r['ratio']:.3f}"]
             for r in rows]  # fmt: skip
    print(grid([f"medians, {unit}", "old", "new", "old/new"], lines))
    if args.json:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        meta = {"gpu": gpu, "suite": args.suite, "torch": torch.__version__, "unit": unit}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows, "samples": samples}) + "\n")
    ratios = [row["ratio"] for row in rows]
    mean, least = geometric_mean(ratios), min(ratios)
    print(f"new to old: geometric mean {mean:.4f}, lowest {least:.4f}, of {len(rows)} points")
    return int(args.suite is not None and (mean < LEAST_MEAN or least < LEAST))


if __name__ == "__main__":
    raise SystemExit(main())
