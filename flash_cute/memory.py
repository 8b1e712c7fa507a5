"""Which tensors share memory, by strides alone: no values are looked at."""

from __future__ import annotations

import torch
from torch import Tensor


def is_expanded(x: Tensor) -> bool:
    steps = zip(x.shape, x.stride(), strict=True)
    return x.numel() > 0 and any(n > 1 and step == 0 for n, step in steps)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of x share memory, or may: each dimension is to step over the smaller
    ones. All views but those of as_strided do, unless they are expanded."""
    if torch._debug_has_internal_overlap(x) == 0:  # fast, but of padded rows it does not know
        return False
    reach = 0
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step <= reach:
            return x.numel() > 0
        reach += step * (size - 1)
    return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether elements of a and b share memory, or may. Of slices of one tensor, along any
    dimension, the answer is exact. So q, k and v of a fused projection do not."""
    is_alias: bool = torch._C._is_alias_of(a, b)  # type: ignore[attr-defined, unused-ignore]
    if not is_alias or a.numel() == 0 or b.numel() == 0:
        return False  # in nearly all calls there are two storages
    dims = [
        [
            (step * x.element_size(), size - 1)
            for step, size in zip(x.stride(), x.shape, strict=True)
            if size > 1
        ]
        for x in (a, b)
    ]
    steps = {step for step, _ in dims[0] + dims[1] if step > 0}
    for period in (1 << 64, *steps):
        # Whether both are within a window of each period, and the windows do not meet.
        if any(step >= period and step % period for step, _ in dims[0] + dims[1]):
            continue
        size_a, size_b = (
            x.element_size() + sum(step * most for step, most in of_x if step < period)
            for x, of_x in ((a, dims[0]), (b, dims[1]))
        )
        distance = (b.data_ptr() - a.data_ptr()) % period
        if size_a <= distance <= period - size_b:
            return False
    return True
