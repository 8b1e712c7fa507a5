"""Measure flash_cute beside its peers.

    python -m bench.run --suite quick --check
    python -m bench.run --B 4 --H 16 --N 4096 --D 128 --causal --baselines fa2,cudnn
    python -m bench.run --suite train --json bench/results/train.json
    python -m bench.run --suite decode --tuning splits=1 splits=4
    python -m bench.run --host-time
    python -m bench.run --doors
    python -m bench.run --suite bwd --check
    python -m bench.run --memory
    python -m bench.run --accuracy --baselines fa2

With --suite, the shape options pick from the suite: --suite tuning --D 128 --causal.
--host-time, --doors, --memory and --accuracy have cases of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import environment, tables
from bench.accuracy import CASES, FP32_CASES, measure_accuracy
from bench.baselines import DEFAULT_PROVIDERS, PROVIDERS, Provider, tuned
from bench.cases import DTYPES, OPS, SUITES, Case
from bench.harness import Options, Row, Timer, default_device, measure, wake_up
from bench.host_time import measure_doors, measure_host_time
from bench.memory import measure_memory
from bench.tables import OURS
from flash_cute.checks import MAX_HEAD_DIM


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def head_dim(text: str) -> int:
    value = positive(text)
    if value > MAX_HEAD_DIM:
        raise argparse.ArgumentTypeError(f"{value} is above {MAX_HEAD_DIM}")
    return value


def seed(text: str) -> int:
    """As torch takes it."""
    if not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"{text} is not from -2**63 to 2**64 - 1")
    return int(text)


def tuning(text: str) -> str:
    if not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form splits=4,arch=90")
    return text


def provider_names(text: str) -> list[str]:
    if text == "all":
        return list(PROVIDERS)
    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    for name in names:
        if name not in PROVIDERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PROVIDERS)}")
    return list(dict.fromkeys([OURS, *names]))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = parser.add_argument_group("what is measured")
    suites = "; ".join(f"{name} ({len(list(suite()))} points)" for name, suite in SUITES.items())
    what.add_argument("--suite", choices=SUITES, help=suites)
    what.add_argument("--B", type=positive, help="batch (default 4)")
    what.add_argument("--H", type=positive, help="query heads (default 16)")
    what.add_argument("--Hkv", type=positive, help="key and value heads (default H)")
    what.add_argument("--N", type=positive, help="queries (default 4096)")
    what.add_argument("--Nk", type=positive, help="keys (default N)")
    what.add_argument("--D", type=head_dim, help="head dim, up to 1024 (default 128)")
    what.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: no")
    what.add_argument("--dtype", choices=DTYPES, help="default bf16; a suite's own is replaced")
    what.add_argument("--layout", choices=("bhnd", "bnhd"),
                      help="order in memory (default bhnd); a suite's own is replaced")  # fmt: skip
    what.add_argument(
        "--op", choices=OPS, help="default fwd; replaces a suite's, and that of --memory"
    )
    other = what.add_mutually_exclusive_group()
    other.add_argument("--host-time", action="store_true", help="host time of a call instead")
    other.add_argument("--doors", action="store_true", help="host time behind PyTorch's functions")
    other.add_argument("--memory", action="store_true", help="peak extra memory instead")
    other.add_argument(
        "--accuracy",
        action="store_true",
        help="errors of gradients instead; with --dtype fp32 of outputs, too",
    )

    how = parser.add_argument_group("how")
    how.add_argument("--baselines", type=provider_names, metavar="A,B",
                     default=list(DEFAULT_PROVIDERS),
                     help=f"beside {OURS}: " + "; ".join(
                         f"{p.name} = {p.about}" for p in PROVIDERS.values() if p.name != OURS
                     ) + "; or all, or none (default fa2,cudnn)")  # fmt: skip
    how.add_argument("--tuning", type=tuning, nargs="+", default=[], metavar="KEY=N,..",
                     help="flash_cute with overrides, beside itself: arch=80 or arch=90, splits=N, "
                          "smem_limit=BYTES (101376: as on sm_86, sm_89, sm_120)")  # fmt: skip
    how.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default 5)")
    how.add_argument("--iters", type=positive, help="calls a round (default: by --time-budget)")
    how.add_argument("--time-budget", type=positive, default=150, metavar="SECONDS",
                     help="roughly, for everything together (default 150)")  # fmt: skip
    how.add_argument("--check", action="store_true", help="against fp64 before the clock starts")
    how.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    how.add_argument("--seed", type=seed, default=0)

    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="PATH",
                        help="save the rows (bench.plot draws them)")  # fmt: skip
    output.add_argument("--commit", help="recorded in place of the checkout's, as of an installed "
                        "flash_cute")  # fmt: skip
    return parser


def select_cases(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Case]:
    if args.suite is None:
        heads, length = args.H or 16, args.N or 4096
        kv_heads = args.Hkv or heads
        if heads % kv_heads:
            parser.error(f"--H {heads} is no multiple of --Hkv {kv_heads}")
        return [
            Case(
                args.B or 4, heads, kv_heads, length, args.Nk or length, args.D or 128,
                bool(args.causal), args.dtype or "bf16", args.layout or "bhnd", args.op or "fwd",
            )
        ]  # fmt: skip
    wanted = {
        "batch": args.B, "heads": args.H, "kv_heads": args.Hkv, "q_len": args.N,
        "kv_len": args.Nk, "head_dim": args.D, "causal": args.causal,
    }  # fmt: skip
    wanted = {key: value for key, value in wanted.items() if value is not None}
    cases = [
        case
        for case in SUITES[args.suite]()
        if all(getattr(case, key) == value for key, value in wanted.items())
    ]
    if not cases:
        parser.error(f"no case of suite {args.suite} has {wanted}")
    keys = ("dtype", "layout", "op")
    replaced = {key: getattr(args, key) for key in keys if getattr(args, key)}
    return [dataclasses.replace(case, **replaced) for case in cases]


def save(path: Path, result: dict[str, Any]) -> None:
    """A row a line, so that files stay short; in one step, so that an interrupted run leaves a
    whole file."""
    unfinished = path.with_name(path.name + ".unfinished")
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    unfinished.write_text(f'{{"meta": {json.dumps(result["meta"])},\n"rows": [\n{rows}\n]}}\n')
    unfinished.replace(path)


def check_arguments(
    parser: argparse.ArgumentParser, args: argparse.Namespace, device: torch.device
) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if args.memory and device.type != "cuda":
        parser.error("--memory reads the GPU's allocator: it needs --device cuda")
    if args.tuning and device.type != "cuda":
        parser.error("--tuning is of the GPU's kernels: it needs --device cuda")
    if args.json is not None:
        # Better to fail now than after the measurement.
        try:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=args.json.parent):
                pass
        except OSError as error:
            parser.error(f"--json {args.json} cannot be written: {error.strerror}")
        if args.json.is_dir():
            parser.error(f"--json {args.json} is a folder")


def without_folders(argv: list[str] | None) -> list[str]:
    """The command line to record; where somebody keeps results is no part of it."""
    argv = sys.argv[1:] if argv is None else argv
    return [
        Path(text).name if before == "--json" else text
        for before, text in zip(["", *argv], argv, strict=False)
    ]


def run_cases(
    cases: list[Case], providers: list[Provider], options: Options, result: dict[str, Any],
    path: Path | None,
) -> None:  # fmt: skip
    timer = Timer(options.device)
    wake_up(options.device)
    for case in tqdm(cases, mininterval=10 if not sys.stderr.isatty() else 0.1):
        result["rows"] += measure(case, providers, options, timer)
        if path is not None:
            save(path, result)


def went_wrong(rows: list[Row], providers: list[Provider]) -> bool:
    """Ours must be right wherever they run, and `forward` runs everywhere; what a peer cannot do is
    only reported."""
    ours = {provider.name for provider in providers if provider.is_ours}
    return any(
        row["status"] == "failed"
        or row.get("correct") is False
        or (row["status"] == "skipped" and row["provider"] == OURS)
        for row in rows
        if row["provider"] in ours
    )


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    device = torch.device(args.device) if args.device else default_device()
    cases = select_cases(parser, args)
    check_arguments(parser, args, device)
    providers = [PROVIDERS[name] for name in args.baselines]
    providers += [tuned(text) for text in dict.fromkeys(args.tuning)]
    # Half of the time goes to flushing the cache, drawing inputs and warming up.
    turns = len(cases) * len(providers) * args.rounds
    options = Options(
        device=device, rounds=args.rounds, iters=args.iters, check=args.check, seed=args.seed,
        budget_ms=min(20.0, 0.5e3 * args.time_budget / turns),
    )  # fmt: skip

    meta = environment.describe(device, without_folders(argv))
    meta |= {"suite": args.suite, "rounds": args.rounds}
    meta["commit"] = args.commit or meta["commit"]
    result: dict[str, Any] = {"meta": meta, "rows": []}
    options_of_what = ("host_time", "doors", "memory", "accuracy")
    what = next((x for x in options_of_what if getattr(args, x)), f"{len(cases)} case(s)")
    names = ", ".join(provider.name for provider in providers)
    print(f"{meta.get('gpu', 'CPU, wall clock')}, torch {meta['torch']}: {what} of {names}")

    if args.host_time:
        wake_up(device)
        result["rows"] = measure_host_time(providers, options)
        text = tables.host_time(result["rows"])
    elif args.doors:
        wake_up(device)
        result["rows"] = measure_doors(options)
        text = tables.doors(result["rows"])
    elif args.memory:
        result["rows"] = measure_memory(providers, options, op=args.op or "fwd")
        text = tables.memory(result["rows"])
    elif args.accuracy:
        of_dtype = FP32_CASES if args.dtype == "fp32" else CASES
        result["rows"] = measure_accuracy(providers, options, of_dtype)
        text = tables.accuracy(result["rows"])
    else:
        run_cases(cases, providers, options, result, args.json)
        text = tables.OF_SUITES.get(args.suite, tables.speed)(result["rows"])
    meta["clocks_after"] = environment.clocks(device)
    print("\n".join([text, *tables.means(result["rows"]), *tables.notes(result["rows"])]))
    if args.json:
        save(args.json, result)
        print(f"wrote {args.json}")
    return 1 if went_wrong(result["rows"], providers) else 0


if __name__ == "__main__":
    raise SystemExit(main())
