"""What a saved result says about where it came from."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str | None:
    """The checkout's commit, with "-dirty" where tracked files differ; None outside git, or where
    another flash_cute is measured than the checkout's."""
    import flash_cute

    if not Path(flash_cute.__file__).resolve().is_relative_to(REPOSITORY / "flash_cute"):
        return None
    head = _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _output("git", "-C", str(REPOSITORY), "status", "--porcelain", "-uno")
    return head + ("-dirty" if changed else "")


def nvidia_smi(device: torch.device, fields: str) -> list[str]:
    """The values of a query; empty where there is no answer. Nothing is ever set."""
    if device.type != "cuda":
        return []
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    line = _output("nvidia-smi", gpu, f"--query-gpu={fields}", "--format=csv,noheader")
    return line.split(", ") if line else []


def clocks(device: torch.device) -> dict[str, str]:
    fields = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    return dict(zip(fields.split(","), nvidia_smi(device, fields), strict=False))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sm_clock(device: torch.device) -> int | None:
    """MHz, or None where it cannot be read (no GPU, no NVML bindings)."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:  # NVML is optional, and a missing clock is no reason to lose a run
        return None


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def build() -> dict[str, Any]:
    """What was measured: flash_cute's version, and the kernels and tiles inside."""
    import flash_cute
    from flash_cute.ops import build_info

    return {"version": flash_cute.__version__, **build_info()}


def describe(device: torch.device, argv: list[str] | None = None) -> dict[str, Any]:
    info: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "argv": sys.argv[1:] if argv is None else argv,
        "commit": commit(),
        "device": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "flash_cute": build(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        info |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": next(iter(nvidia_smi(device, "driver_version")), None),
            "clocks_before": clocks(device),
        }
    else:
        info["cpu_threads"] = torch.get_num_threads()
    return info
