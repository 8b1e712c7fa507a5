"""A fault to be planted in a copy of the kernels, and what is to catch it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from build_emulator import BUILD, ROOT, SOURCES, COMBINE_LAUNCH, Library, write
from emulator import Emulator

# Headers that have faults.
MAINLOOP = "sm80/fwd/mainloop.h"
EPILOGUE = "sm80/fwd/epilogue.h"
TRAITS = "sm80/fwd/traits.h"
HOLDERS = "sm80/row_allreduce.h"
COPY = "common/copy.h"
MASK = "common/mask.h"
TILE = "common/tile.h"
ORDER = "common/tile_order.h"
SEQUENCE = "common/sequence.h"
COMBINE = "combine/kernel.h"
SOFTMAX = "common/online_softmax.h"
SM90_KERNEL = "sm90/fwd/kernel.h"
SM90_SCHEDULE = "sm90/tile_scheduler.h"
SM90_MAINLOOP = "sm90/fwd/mainloop.h"
SM90_PRODUCER = "sm90/fwd/producer.h"
SM90_RINGS = "sm90/pipeline.h"
SM90_EPILOGUE = "sm90/fwd/epilogue.h"
SM90_TRAITS = "sm90/fwd/traits.h"
SM90_OPERAND = "sm90/shared_operand.h"
SM90_MAP = "sm90/tensor_map.h"
SM90_LAUNCH = "sm90/fwd/launch.h"

# What catches a fault, as regular expressions.
RACE = "with no barrier in between"
UNWRITTEN = "which nobody has written"
UNFINISHED = "has not waited for"
BOUNDS = "in no row of any tensor"
WRONG = "out error"  # or the LSE's
CONFLICTS = "bank conflicts"
IN_USE = "which a product of warp .* (still reads|has read)"
OUT_IN_USE = "which a box of warp .* (still reads|has read)"
NO_FENCE = "with no fence.proxy.async ahead"
WRITTEN = "has been written already"
STUCK = "every thread waits"


@dataclass(frozen=True)
class Fault:
    name: str
    caught_by: str
    # Header in sm80/, sm90/ or common/, text that stands there once, what takes its place.
    edits: Sequence[tuple[str, str, str]]
    head_dim: int = 64
    arch: int = 80
    kinds: Sequence[str] = ("banded",)  # of sm90's kernels, those that are built

    @property
    def library(self) -> Library:
        folder = f"{BUILD}/faults/{self.name.replace(' ', '_')}"
        return Library(
            name=folder.removeprefix(f"{BUILD}/"),
            sources=f"{folder}/cute_fa2",
            arch=self.arch,
            head_dims=(self.head_dim,),
            dtypes=("bf16",),
            kinds=self.kinds,
            combines=any(file == COMBINE for file, _, _ in self.edits),
        )

    def emulator(self, path: Path) -> Emulator:
        """Of one block at a time, so that it is the same objection each time that comes first."""
        return Emulator(path, workers=1, arch=self.arch)

    def plant(self) -> Library:
        """Writes the copy with the fault in it."""
        edited = {file for file, _, _ in self.edits}
        for source in sorted([*(ROOT / SOURCES).rglob("*.h"), ROOT / SOURCES / COMBINE_LAUNCH]):
            name = source.relative_to(ROOT / SOURCES).as_posix()
            text = source.read_text()
            for file, old, new in self.edits:
                if file != name:
                    continue
                if text.count(old) != 1:
                    raise LookupError(
                        f"{self.name!r} cannot be planted: {file} has {text.count(old)} times "
                        f"{old!r}; bring the fault up to date"
                    )
                text = text.replace(old, new)
                edited.discard(file)
            write(f"{self.library.sources}/{name}", text)
        if edited:
            raise LookupError(f"{self.name!r} cannot be planted: there is no {edited}")
        return self.library


def of_sm90(
    name: str,
    caught_by: str,
    file: str,
    old: str,
    new: str,
    *more: tuple[str, str, str],
    head_dim: int = 64,
    kinds: Sequence[str] = ("banded",),
) -> Fault:
    return Fault(f"sm90 {name}", caught_by, [(file, old, new), *more], head_dim, 90, kinds)
