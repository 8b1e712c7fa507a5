"""Runs one case on the emulated machine, alone and on one core: the thing to run
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
from emulator import Emulator  # noqa: E402
from support import poisoned, random_inputs  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, choices=(80, 90), default=80)
    parser.add_argument("--backward", action="store_true", help="of sm80, whatever --arch is")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--len-q", type=int, default=150)
    parser.add_argument("--len-k", type=int, default=200)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--heads-kv", type=int, help="as many as --heads by default")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--scale", type=float)
    parser.add_argument(
        "--seed", type=int, default=0, help="changes the order in which threads and CTAs run"
    )
    parser.add_argument(
        "--smem-limit",
        type=int,
        default=0,
        help="bytes of shared memory a CTA: selects the tile of sm80",
    )
    parser.add_argument(
        "--splits",
        type=int,
        default=0,
        help="split the keys into so many (split-KV); 0: the plan decides",
    )
    parser.add_argument(
        "--head-splits",
        type=int,
        default=0,
        help="of the backward: so many CTAs share the heads of a group; 0: the plan decides",
    )
    parser.add_argument("--deterministic", action="store_true", help="of the backward")
    parser.add_argument("--dlse", action="store_true", help="of the backward: give it one")
    parser.add_argument(
        "--multiprocessors",
        type=int,
        default=132,
        help="of the device; with few, a CTA has many tiles",
    )
    parser.add_argument(
        "--optimised", action="store_true", help="compile with -O2, as the tests do"
    )
    args = parser.parse_args()

    bucket = next(d for d in variants.ALL_HEAD_DIMS if d >= args.head_dim)
    if args.backward and bucket > 512:  # which has the kernels of half of it
        bucket //= 2
    op_and_arch = "bwd_sm80" if args.backward else f"fwd_sm{args.arch}"
    kernels = f"{op_and_arch}_hdim{bucket}_{args.dtype}"
    flags = "-O2 -g1" if args.optimised else "-O0 -g"
    library = Library(f"case/{kernels}_{flags[1:3]}", (f"{kernels}*",), flags=flags)
    options = {"smem_limit": args.smem_limit}
    if args.backward:
        options |= {"head_splits": args.head_splits, "deterministic": args.deterministic}
        options["has_dlse"] = args.dlse
    else:
        options["splits"] = args.splits
    options["multiprocessors"] = args.multiprocessors
    emulator = Emulator(build(library), args.arch, workers=1)
    inputs = random_inputs(
        *(1, args.heads, args.len_q, args.head_dim),
        heads_kv=args.heads_kv,
        len_k=args.len_k,
        dtype=DTYPES[args.dtype],
    )
    check = emulator.check_backward if args.backward else emulator.check
    print(check(*map(poisoned, inputs), args.causal, args.scale, seed=args.seed, **options)[-1])


if __name__ == "__main__":
    main()
