"""flash_cute: exact attention for PyTorch, on CUTLASS/CuTe kernels (NVIDIA Ampere or newer) and on
the CPU.

    out, softmax_lse = flash_cute.forward(q, k, v, is_causal=True)

`flash_cute.forward_varlen` takes packed sequences, `flash_cute.merge` merges results over parts of
the keys.

`flash_cute.register` puts it behind PyTorch's and transformers' attention. `flash_cute.flash_attn`
and `flash_cute.flash_attn_interface` have the functions of FlashAttention-2 and 3.

`flash_cute.reference` holds the same function as a plain formula and block by block, and `python -m
flash_cute` shows what serves this machine and checks it against the formula.
"""

import importlib
from typing import Any

from flash_cute import reference
from flash_cute.hooks import register, unregister
from flash_cute.interface import forward, forward_varlen
from flash_cute.merge import merge
from flash_cute.version import __version__

__all__ = [
    "__version__",
    "forward",
    "forward_varlen",
    "merge",
    "reference",
    "register",
    "unregister",
]


def __getattr__(name: str) -> Any:
    """The modules with FlashAttention's functions, imported when they are asked for."""
    if name in ("flash_attn", "flash_attn_interface"):
        return importlib.import_module(f"flash_cute.{name}")
    raise AttributeError(f"module 'flash_cute' has no attribute {name!r}")
