"""Runs one case of the forward on the emulated machine, alone and on one core: the thing to run
under a debugger.

    python tests/emulator/run_case.py --head-dim 64 --len-q 150 --causal
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path += [str(TESTS), str(TESTS.parent)]

import torch  # noqa: E402
from build_emulator import Library, build, variants  # noqa: E402
from cases import check  # noqa: E402
from emulator import Emulator  # noqa: E402
from support import poisoned, random_inputs  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, choices=(80, 90), default=80)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--len-q", type=int, default=150)
    parser.add_argument("--len-k", type=int, default=200)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--heads-kv", type=int, help="if there are fewer")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--scale", type=float)
    parser.add_argument("--seed", type=int, default=0, help="decides the order of threads")
    parser.add_argument("--smem-limit", type=int, default=0, help="chooses sm80's row of the table")
    parser.add_argument("--splits", type=int, default=0, help="into how many parts keys are split")
    parser.add_argument("--multiprocessors", type=int, default=132, help="few: many tiles a block")
    parser.add_argument("--optimised", action="store_true", help="as the tests compile it")
    args = parser.parse_args()

    bucket = next(d for d in variants.ALL_HEAD_DIMS if d >= args.head_dim)
    name = f"case/sm{args.arch}_{'O2' if args.optimised else 'O0'}_{bucket}_{args.dtype}"
    library = Library(
        name, args.arch, head_dims=(bucket,), dtypes=(args.dtype,), debug=not args.optimised
    )
    emulator = Emulator(build(library)[0], workers=1, arch=args.arch)
    inputs = random_inputs(
        1,
        args.heads,
        args.len_q,
        args.head_dim,
        heads_kv=args.heads_kv,
        len_k=args.len_k,
        dtype=DTYPES[args.dtype],
    )
    options = {
        "seed": args.seed,
        "smem_limit": args.smem_limit,
        "splits": args.splits,
        "multiprocessors": args.multiprocessors,
    }
    print(check(emulator, *map(poisoned, inputs), args.causal, args.scale, **options)[2])


if __name__ == "__main__":
    main()
