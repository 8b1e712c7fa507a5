"""Shows what serves this machine, and checks its results. Exit status 0: all are right.
`python -m flash_cute plan --help`: which kernel a dense call would run.
`python -m flash_cute hub --help`: how to make it a kernel of Hugging Face's hub.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys

import torch

import flash_cute
from flash_cute import checks, hub, ops, plan, tolerance
from flash_cute.checks import CPU_DTYPES, why_not

#: Shapes of the check: ragged lengths, grouped heads.
BATCH, HEADS_Q, HEADS_KV = 2, 4, 2
LENGTHS = {"cuda": (1000, 1029), "cpu": (200, 229)}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["plan"]:
        return plan.main(argv[1:])
    if argv[:1] == ["hub"]:
        return hub.main(argv[1:])
    return check(argv[1:] if argv[:1] == ["check"] else argv)


def check(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_cute [check]", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device",
        type=_device,
        default=default,
        help=f"cpu, cuda or cuda:N (default here: {default})",
    )
    device: torch.device = parser.parse_args(argv).device
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: this torch ({torch.__version__}) sees no GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {device}: there are {torch.cuda.device_count()} GPUs")

    for name, text in _description(device):
        print(f"{name:14} {text}")
    print()
    if (reason := why_not(device, torch.float16)) is not None:
        print(f"Not served: {reason[1]}")
        return 1
    return 0 if _check(device) else 1


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in LENGTHS:
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    return device


def _description(device: torch.device) -> list[tuple[str, str]]:
    build = ops.build_info()
    rows = [
        ("flash_cute", flash_cute.__version__),
        ("torch", torch.__version__),
        ("kernels for", " ".join(build["archs"])),
        ("CUDA runtime", f"{_cuda_version(build['cuda_runtime'])} (inside flash_cute)"),
        ("driver", _driver()),
    ]
    if build["left_out"]:
        what = f"{build['left_out']} (FLASH_CUTE_HEAD_DIMS, _DTYPES, _ARCHS; `make build` has all)"
        rows.append(("left out", what))
    if device.type == "cpu":
        why = "no GPU here" if not torch.cuda.is_available() else "as asked"
        served_by = "PyTorch's own flash attention for the CPU"
        return [*rows, ("device", f"cpu ({why}): served by {served_by}")]
    props = torch.cuda.get_device_properties(device)
    smem: int = props.shared_memory_per_block_optin  # type: ignore[attr-defined, unused-ignore]
    rows += [
        ("device", f"{props.name}, compute capability {props.major}.{props.minor}"),
        ("shared memory", f"{smem / 1024:.0f} KB for a CTA"),
    ]
    tiles = ops.tiles_for(smem)
    if props.major == 9:
        # These come before those of sm80. Of several for a head dim, the call decides.
        tiles = [t for t in build["tiles"] if (t["arch"], t["op"]) == ("sm90", "fwd")] + tiles
    for tile in tiles:
        mask = {"any": "", "none": " (split-KV)"}.get(tile["mask"], f" ({tile['mask']})")
        of_v = f", Dv <= {tile['head_dim_v']}" if tile["head_dim_v"] < tile["head_dim"] else ""
        rows.append(
            (
                f"D <= {tile['head_dim']}{of_v}",
                f"{tile['arch']} kernel{mask}, {tile['block_m']} queries x {tile['block_n']} keys, "
                f"{tile['warps']} warps, {tile['smem_bytes'] / 1024:.0f} KB",
            )
        )
    return rows


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver() -> str:
    """The newest CUDA that the installed driver serves."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "none"
    return f"for CUDA up to {_cuda_version(version.value)}"


def _check(device: torch.device) -> bool:
    """Compares dtype x head dim x mask with the reference, printing a line for each."""
    names = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    built = [names[name] for name in ops.build_info()["dtypes"]]
    dtypes = built if device.type == "cuda" else CPU_DTYPES
    head_dims = [*ops.build_info()["head_dims"], *ops.build_info()["large_head_dims"]]
    cases = [
        (dtype, head_dim, is_causal)
        for dtype, head_dim, is_causal in itertools.product(dtypes, head_dims, (False, True))
        if head_dim <= checks.max_head_dim(device.type, dtype)
    ]
    len_q, len_k = LENGTHS[device.type]
    shape = f"B {BATCH}, Hq {HEADS_Q}, Hkv {HEADS_KV}, Nq {len_q}, Nk {len_k}"
    print(f"Checking against the plain formula in fp64: {shape}")
    columns = ("out error", "at most", "lse error", "at most")
    print(f"{'dtype':9} {'D':>4} {'mask':7}", *(f"{column:>10}" for column in columns))
    failures = 0
    for done, (dtype, head_dim, is_causal) in enumerate(cases):
        _progress(done, len(cases))
        generator = torch.Generator().manual_seed(done)
        q, k, v = (
            torch.randn(BATCH, heads, length, head_dim, generator=generator).to(device, dtype)
            for heads, length in ((HEADS_Q, len_q), (HEADS_KV, len_k), (HEADS_KV, len_k))
        )
        out, lse = flash_cute.forward(q, k, v, is_causal)
        result = tolerance.compare(out, lse, q, k, v, is_causal)
        failures += not result.passed
        _progress(None, len(cases))
        numbers = (result.out_error, result.out_bound, result.lse_error, result.lse_bound)
        print(
            f"{str(dtype).removeprefix('torch.'):9} {head_dim:4}",
            f"{'causal' if is_causal else 'full':7}",
            *(f"{number:10.2e}" for number in numbers),
            "pass" if result.passed else "FAIL",
        )
    where = str(device) if device.type == "cuda" else "the CPU (no GPU kernel ran)"
    print(f"\n{len(cases) - failures} of {len(cases)} passed on {where}.")
    return failures == 0


def _progress(done: int | None, total: int, width: int = 40) -> None:
    """Draws a bar on stderr, or wipes it for None; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        return
    if done is None:
        text = "\r\033[K"
    else:
        filled = width * done // total
        text = f"\r[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"
    print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
