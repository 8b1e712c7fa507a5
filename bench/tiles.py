"""Tiles that have no row in csrc/cute_fa2/config.h, to be timed before one is written.

    python -m bench.tiles sm90 64,2,128,4,2,true 64,3,128,3,2,false
    python -m bench.tiles sm80 64,128,48,4,true --blocks-per-sm 3
    python -m bench.run --suite train --D 64 --check --tiles build/tiles/*.so

A tile is given by the members of `FwdSm90Config` or `FwdConfig` in csrc/cute_fa2/config.h:

    sm90    head_dim,consumers,block_n,stages,q_stages,in_turns
    sm80    head_dim,block_m,block_n,row_warps,scores_ahead[,column_warps]

The first two commands need no GPU: they compile each tile, for Hopper, to a library of its own, and
say how many registers it takes, whether it spills, and of sm80 how busy it should keep the tensor
cores, by simulation (bench/simulate.py). These tiles never split the keys, as flash_cute does where
tiles are few: in decoding they compare with `bench.run --splits 1` alone.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from bench import simulate
from bench.baselines import Call as BoundCall
from bench.baselines import Provider, Result
from bench.cases import Case

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
CPP_DTYPES = {"fp16": "kHalf", "bf16": "kBFloat16"}


# -- compiling -----------------------------------------------------------------------------------


def flags_for(arch: str, tile: str) -> list[str]:
    if arch == "sm90":
        # Products of any multiple of 8 columns, which the library has where it needs them.
        extended = "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"
        return [extended, "-gencode=arch=compute_90a,code=sm_90a"]
    from build_library import variants

    head_dim = int(tile.split(",")[0])
    return ["-gencode=arch=compute_80,code=sm_90", *variants.ptxas_flags(head_dim)]


def compile_tile(arch: str, tile: str, dtype: str, blocks_per_sm: int, folder: Path) -> bool:
    sys.path.insert(0, str(SOURCES))
    from build_library import find_cuda, find_cutlass

    cuda, cutlass = find_cuda(), find_cutlass()
    if not cuda or not cutlass:
        sys.exit("this needs nvcc and CUTLASS: `make setup` brings them")
    name = f"{arch}_{tile.replace(',', '_')}_{dtype}"
    if blocks_per_sm:
        name += f"_x{blocks_per_sm}"
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / f"{name}.cu", folder / f"{name}.so"
    macros = {
        "ARCH": arch[2:],
        "TILE": tile,
        "DTYPE": CPP_DTYPES[dtype],
        "BLOCKS": blocks_per_sm,
    }
    lines = [f"#define FLASH_CUTE_{macro} {value}" for macro, value in macros.items()]
    source.write_text("\n".join([*lines, f'#include "{ROOT}/bench/tile.cu"\n']))
    command = [str(Path(cuda.root, "bin/nvcc")), "-std=c++20", "-O3", "-DNDEBUG", "-shared"]
    command += ["--expt-relaxed-constexpr", "-cudart=static", "-Xptxas=-v"]
    command += ["-Xcompiler=-fPIC,-fvisibility=hidden", f"-I{SOURCES}/cute_fa2", f"-I{cutlass}"]
    command += ['-DFLASH_CUTE_ARCHS="sm_90"', *flags_for(arch, tile)]
    command += ["-o", str(target), str(source), f"{SOURCES}/cute_fa2/device.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    report = done.stdout + done.stderr
    if done.returncode != 0:
        errors = [line for line in report.splitlines() if "error" in line]
        print(f"{name}: cannot be compiled: {(errors or [report])[0]}", flush=True)
        return False
    registers = "/".join(re.findall(r"Used (\d+) registers", report))
    spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    line = f"{target}: {registers} registers, {spills} bytes spilled"
    if "Potential Performance Loss" in report:
        line += "; wgmma serialized"
    if arch == "sm80":
        of_kernel = dict(re.findall(r"entry function '(\S+)'.*?Used (\d+) registers", report, re.S))
        line += simulated(target, {name: int(used) for name, used in of_kernel.items()})
    print(line, flush=True)
    return True


def simulated(library: Path, registers: Mapping[str, int]) -> str:
    """What to say of the simulation of its kernel without a mask; nothing without cuobjdump."""
    threads, smem_bytes = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(str(library)).tile_needs(ctypes.byref(threads), ctypes.byref(smem_bytes))
    text = simulate.cuobjdump(library, "-sass", "-arch", "sm_90")
    if text is None or threads.value % 128:
        return ""
    kernels = simulate.sm80_kernels(text)
    (name,) = (name for name in kernels if "MaskKindE0" in name)
    blocks = simulate.blocks_on_multiprocessor(threads.value, registers[name], smem_bytes.value)
    if blocks == 0:
        return "; too large for a multiprocessor"
    step = simulate.usual_step(kernels[name])
    share = simulate.share_of_products(step, blocks, threads.value)
    return f"; {blocks} block(s) on a multiprocessor, tensor cores busy {share:.0%} (simulated)"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiles", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("arch", choices=("sm80", "sm90"))
    parser.add_argument("tiles", nargs="+", metavar="TILE")
    parser.add_argument("--dtype", choices=CPP_DTYPES, default="bf16")
    parser.add_argument("--blocks-per-sm", type=int, default=0, metavar="N",
                        help="keep to registers that leave room for N blocks (sm80)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "build/tiles", metavar="FOLDER")
    args = parser.parse_args(argv)
    for tile in args.tiles:
        members, example = {
            "sm80": (r"(\d+,){4}(true|false)(,\d+)?", "64,128,64,4,true"),
            "sm90": (r"(\d+,){5}(true|false)", "64,3,128,3,2,true"),
        }[args.arch]
        if not re.fullmatch(members, tile):
            parser.error(f"{tile!r} is not a tile of {args.arch}, as {example} is one")
    done = [
        compile_tile(args.arch, tile, args.dtype, args.blocks_per_sm, args.out)
        for tile in args.tiles
    ]
    return 0 if all(done) else 1


# -- timing --------------------------------------------------------------------------------------


class Call(ctypes.Structure):
    """As in tile.cu."""

    _fields_ = [
        ("data", ctypes.c_void_p * 4),
        ("lse", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 3 * 4),
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
        ),
        ("scale", ctypes.c_double),
        ("is_causal", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
    ]


def provider(path: Path) -> Provider:
    """The tile in a library that `main` has made, by the file's name. Raises ValueError for a file
    of another name, OSError or AttributeError for one of another kind."""
    name = path.stem
    parts = re.fullmatch(rf"sm\d+_(\d+)_.*_({'|'.join(CPP_DTYPES)})(_x\d+)?", name)
    if parts is None:
        raise ValueError(f"{path} is no library made by bench.tiles, by its name")
    bucket, dtype = int(parts[1]), parts[2]
    forward = ctypes.CDLL(str(path)).forward
    forward.restype = ctypes.c_char_p

    def why_not(case: Case, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a GPU"
        if case.dtype != dtype or not bucket // 2 < case.head_dim <= bucket or case.head_dim % 8:
            return f"a tile for head dim {bucket}, {dtype}"
        return None

    def bind(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> BoundCall:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], device=q.device)
        tensors = (q, k, v, out)
        call = Call(
            (ctypes.c_void_p * 4)(*(x.data_ptr() for x in tensors)),
            lse.data_ptr(),
            (ctypes.c_int64 * 3 * 4)(*((ctypes.c_int64 * 3)(*x.stride()[:3]) for x in tensors)),
            *(case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.head_dim),
            case.scale,
            case.causal,
            q.device.index or 0,
        )

        def run() -> Result:
            call.stream = torch.cuda.current_stream(q.device).cuda_stream
            error = forward(ctypes.byref(call))
            if error is not None:
                raise RuntimeError(error.decode())
            return out, lse

        return run

    return Provider(name, f"the tile in {path}", bind, why_not)


if __name__ == "__main__":
    raise SystemExit(main())
