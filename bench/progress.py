"""A progress bar where somebody watches, a few plain lines where the output goes to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            yield from tqdm(items, desc=label, dynamic_ncols=True, leave=False)
            return
    start = last = time.monotonic()
    for index, item in enumerate(items):
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{label}: {index} of {len(items)}, {last - start:.0f} s", file=sys.stderr)
        yield item
