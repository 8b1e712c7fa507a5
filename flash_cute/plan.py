"""`python -m flash_cute plan`: which kernel a dense call would run, with which tile, splits, waves.

The library plans as it does for a real call (`torch.ops.flash_cute.plan`), for the GPU that is
there or for one of a table, so no GPU is needed.
"""

from __future__ import annotations

import argparse
import string
from dataclasses import dataclass
from typing import Any

import torch

from flash_cute import ops


@dataclass(frozen=True)
class Device:
    """What a plan depends on, as CUDA reports it."""

    compute_capability: int  #: 10 * major + minor
    multiprocessors: int
    l2_bytes: int
    smem_per_cta: int  #: bytes of shared memory that a CTA may have at most


KB, MB = 1024, 1024 * 1024
#: Compute capabilities and shared memory: CUDA C++ Programming Guide, Technical Specifications per
#: Compute Capability. Multiprocessors and L2: NVIDIA's white papers of A100, H100, Ada, GA102 and
#: RTX Blackwell, and the data sheets of L4 and L40S. L2 of H100 and H200: bench/results. B200: as
#: its driver reports.
DEVICES = {
    "a100": Device(80, 108, 40 * MB, 163 * KB),
    "h100": Device(90, 132, 50 * MB, 227 * KB),
    "h200": Device(90, 132, 60 * MB, 227 * KB),
    "l4": Device(89, 58, 48 * MB, 99 * KB),
    "l40s": Device(89, 142, 96 * MB, 99 * KB),
    "rtx3090": Device(86, 82, 6 * MB, 99 * KB),
    "rtx4090": Device(89, 128, 72 * MB, 99 * KB),
    "rtx5090": Device(120, 170, 96 * MB, 99 * KB),
    "b200": Device(100, 148, 132_644_864, 227 * KB),
}
DTYPES = ("fp16", "bf16", "fp32")
BUILT = ops.build_info()
#: Name, default (a number, or the size that it is equal to), and what it is.
SIZES = (
    ("B", 1, "batch size"),
    ("H", 32, "query heads"),
    ("Hkv", "H", "heads of k and v"),
    ("Nq", 4096, "queries"),
    ("Nk", "Nq", "keys"),
    ("D", min(128, max(BUILT["head_dims"] or BUILT["large_head_dims"])), "head dim"),
    ("Dv", "D", "head dim of v"),
)

KERNEL = (
    ("kernel", "{arch} for head dims up to {head_dim} (v: {head_dim_v}), mask: {kernel_mask}"),
    ("tile", "{block_m} queries x {block_n} keys, {warps} warps, {walks} in memory: {stages}"),
    ("shared memory", "{smem_bytes:,} bytes a CTA, CTAs of a multiprocessor: {ctas_per_sm}"),
)
#: What the plan is printed as: titles, and texts with names from the op's answer.
FORWARD = (
    *KERNEL,
    ("GQA packing", "query heads that share a tile: {packed_heads}"),
    (
        "split-KV",
        "splits: {splits}, keys of each: {split_keys:,}, workspace: {workspace_bytes:,} bytes",
    ),
    ("work tiles", "{tiles:,}; tail split: {tail_tiles} tiles, {subtiles} subtiles of each"),
    ("launch", "{ctas:,} CTAs, {waves:.2f} waves"),
    ("scheduler", "{scheduler}, heads in groups of {head_group}"),
    ("not sm90", "{why_not_sm90}"),
)
BACKWARD = (
    *KERNEL,
    ("query heads", "CTAs that share the heads of a group: {head_splits}"),
    ("blocks", "of queries: {m_blocks:,}; of keys: {n_blocks:,}"),
    ("launch", "{ctas:,} CTAs, {waves:.2f} waves, heads in groups of {head_group}"),
    ("workspace", "{workspace_bytes:,} bytes"),
)
#: What else the answer has of the tile's entry. Not for people.
UNSEEN = {
    *("op", "mask", "column_warps", "max_registers", "split_kv", "q_stages"),
    "q_in_registers",
    *("k_columns", "v_keys", "v_columns", "columns"),
    *("ping_pong", "producer_registers", "consumer_registers", "rows_per_query"),
    *("column_groups", "scores_registers", "packed", "bias", "dense_only"),
    *("chunk_columns", "chunk_rows"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_cute plan",
        description="Which kernel a dense call would run, with which tile, splits and waves.",
    )
    for name, default, what in SIZES:
        parser.add_argument(
            f"--{name}",
            type=int,
            metavar="N",
            default=None if isinstance(default, str) else default,
            help=f"{what} (default: {default})",
        )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(default: bf16)")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="aligned to the bottom right corner")
    mask.add_argument(
        "--window",
        nargs=2,
        type=int,
        metavar=("L", "R"),
        default=(-1, -1),
        help="keys before and after the diagonal, -1 for all",
    )
    parser.add_argument("--backward", action="store_true", help="of the gradients")
    parser.add_argument("--deterministic", action="store_true", help="the same bits each time")
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--gpu",
        choices=DEVICES,
        help=f"(default here: {torch.cuda.get_device_name() if has_gpu else 'h100'})",
    )
    parser.add_argument("--tuning", default="", help='overrides, as "arch=80,splits=4"')
    args = parser.parse_args(argv)
    if args.Dv is not None and args.Dv < 1:  # to the op 0 is D
        parser.error(f"--Dv is {args.Dv}: it must be 1 or more")
    for name, default, _ in SIZES:
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, str(default)))

    is_here = has_gpu and args.gpu is None
    device = device_here() if is_here else DEVICES[args.gpu or "h100"]
    gpu_name = torch.cuda.get_device_name() if is_here else args.gpu or "h100"
    try:
        answer = ops.plan(request(args, device), args.tuning)
    except RuntimeError as error:
        print(f"Not served: {str(error).splitlines()[0]}")
        return 1
    rows = [("call", _call(args)), ("GPU", _gpu(gpu_name, device)), *description(answer)]
    width = max(len(row[0]) for row in rows)
    for title, text in rows:
        print(f"{title:{width}}  {text}")
    return 0


def device_here() -> Device:
    """The current GPU."""
    gpu: Any = torch.cuda.get_device_properties()
    return Device(
        10 * gpu.major + gpu.minor,
        gpu.multi_processor_count,
        gpu.L2_cache_size,
        gpu.shared_memory_per_block_optin,
    )


def request(args: argparse.Namespace, device: Device) -> str:
    """The question as the op takes it: names and numbers."""
    window_left, window_right = (-1, 0) if args.causal else args.window
    items = {
        "batch": args.B,
        "heads_q": args.H,
        "heads_kv": args.Hkv,
        "len_q": args.Nq,
        "len_k": args.Nk,
        "head_dim": args.D,
        "head_dim_v": args.Dv,
        "window_left": window_left,
        "window_right": window_right,
        "backward": int(args.backward),
        "deterministic": int(args.deterministic),
        "is_fp32": int(args.dtype == "fp32"),
        **vars(device),
    }
    return ",".join(f"{name}={value}" for name, value in items.items())


def description(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The plan for a person: titles and texts. What no line has comes last."""
    rows = []
    rest = {key: value for key, value in answer.items() if key not in UNSEEN}
    is_forward = answer.get("op") != "bwd"
    walks = "key blocks" if is_forward else "query blocks"
    if answer.get("k_columns") or answer.get("columns"):  # the large head dims'
        walks = "chunks of a block"
    names = {**answer, "walks": walks}
    for title, text in FORWARD if is_forward else BACKWARD:
        keys = [key for _, key, _, _ in string.Formatter().parse(text) if key]
        if all(names.get(key, "") != "" for key in keys):
            rows.append((title, text.format(**names)))
            rest = {key: value for key, value in rest.items() if key not in keys}
    others = ", ".join(f"{key} {value}" for key, value in rest.items() if value != "")
    return [*rows, ("others", others)] if others else rows


def _call(args: argparse.Namespace) -> str:
    sizes = ", ".join(f"{name} {getattr(args, name)}" for name, _, _ in SIZES)
    left, right = args.window
    window = f", window {left} {right}" if max(left, right) >= 0 else ""
    op = f"{', deterministic' if args.deterministic else ''}{', backward' if args.backward else ''}"
    return f"{sizes}, {args.dtype}{', causal' if args.causal else window}{op}"


def _gpu(name: str, device: Device) -> str:
    major, minor = divmod(device.compute_capability, 10)
    return (
        f"{name}: compute capability {major}.{minor}, {device.multiprocessors} multiprocessors, "
        f"{device.l2_bytes / MB:.0f} MB L2, {device.smem_per_cta / KB:.0f} KB shared memory a CTA"
    )
