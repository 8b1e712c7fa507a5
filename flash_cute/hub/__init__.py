"""Folders as Hugging Face's `kernels` loads them, for programs that take their attention from a
kernel of the hub: transformers, diffusers, and what uses these. Nothing is downloaded.

    python -m flash_cute hub
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: What has FlashAttention-2's functions, and what has FlashAttention-3's.
FOLDERS = {version: Path(__file__).resolve().parent / version for version in ("fa2", "fa3")}
#: The name for transformers' `attn_implementation`.
NAME = "flash_cute/flash-attention"


def local_kernels(names: Mapping[str, str] | None = None, others: str = "") -> str:
    """A value of LOCAL_KERNELS: each of `names` is "fa2" or "fa3" of `FOLDERS`. `others`, such a
    value, is kept but for these."""
    names = names or {NAME: "fa2"}
    kept = [entry for entry in others.split(":") if entry and entry.split("=")[0] not in names]
    return ":".join([*kept, *(f"{name}={FOLDERS[version]}" for name, version in names.items())])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_cute hub",
        description=f"Prints the line that makes {NAME!r} a kernel for Hugging Face's kernels "
        'package. eval "$(python -m flash_cute hub)" sets it in a shell.',
    )
    for version in FOLDERS:
        parser.add_argument(
            f"--{version}",
            action="append",
            default=[],
            metavar="ORG/NAME",
            help=f"a kernel of the hub with FlashAttention-{version[-1]}'s functions that is to be "
            "flash_cute too, where a program has its name built in, such as "
            f"kernels-community/flash-attn{version[-1]}",
        )
    given = vars(parser.parse_args(argv))
    names = {NAME: "fa2"} | {name: version for version in FOLDERS for name in given[version]}
    for name in names:
        if name.count("/") != 1 or set(name) & set(":=\"' "):
            parser.error(f"{name!r} is no name of a kernel, as in org/name")
    print(f'export LOCAL_KERNELS="{local_kernels(names, os.environ.get("LOCAL_KERNELS", ""))}"')
    return 0
