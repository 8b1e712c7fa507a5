"""A folder as Hugging Face's `kernels` loads it, for programs that take their attention from a
kernel of the hub: transformers, diffusers, and what uses these. Nothing is downloaded.

    python -m flash_cute hub
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

#: What holds build/torch-cuda and build/torch-cpu.
FOLDER = Path(__file__).resolve().parent
#: The name for transformers' `attn_implementation`.
NAME = "flash_cute/flash-attention"


def local_kernels(names: Sequence[str] = (NAME,), others: str = "") -> str:
    """The value of LOCAL_KERNELS in which `names` are this folder; `others` are kept."""
    kept = [entry for entry in others.split(":") if entry and entry.split("=")[0] not in names]
    return ":".join([*kept, *(f"{name}={FOLDER}" for name in names)])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_cute hub",
        description=f"Prints the line that makes {NAME} a kernel for Hugging Face's kernels "
        "package: source it, or put it in front of a command.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=[NAME],
        metavar="ORG/NAME",
        help="kernels of the hub that are to be flash_cute too, such as "
        "kernels-community/flash-attn3, where a program has that name built in",
    )
    names = list(dict.fromkeys([NAME, *parser.parse_args(argv).names]))
    if wrong := [name for name in names if name.count("/") != 1 or set(name) & set(":=\"' ")]:
        parser.error(f"{wrong[0]!r} is no name of a kernel, as in org/name")
    print(f'export LOCAL_KERNELS="{local_kernels(names, os.environ.get("LOCAL_KERNELS", ""))}"')
    return 0
