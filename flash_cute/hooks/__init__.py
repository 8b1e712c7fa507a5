"""`register`: flash_cute in programs that call PyTorch's attention, or transformers'."""

from __future__ import annotations

import re
import sys
from types import ModuleType


def register(*, torch: bool | None = None, transformers: bool | None = None) -> None:
    """Puts flash_cute behind the attention of other libraries, until `unregister`.

    Args:
        torch: PyTorch's flash backend on CUDA: `scaled_dot_product_attention` where it takes that
            backend, and `torch.nn.attention.varlen.varlen_attn`. What flash_cute does not serve,
            such as dropout, goes to the kernel that was there. Warns if PyTorch takes cuDNN first.
        transformers: Hugging Face's transformers, 5.17 and newer, has the attention "cute_fa" then:
            `model.set_attn_implementation("cute_fa")`. What it does not serve raises a ValueError.
            A model with an attention of its own raises one while it is made with "cute_fa";
            `set_attn_implementation` leaves it as it is, of which transformers warns.

    Raises:
        ValueError: neither is given.
        ImportError: transformers is not installed, or too old. Nothing is registered then.
    """
    if torch is None and transformers is None:
        raise ValueError("register needs torch=True, transformers=True, or both")
    asked: list[ModuleType] = []
    if transformers:
        _check_transformers()
        from flash_cute.hooks import hf

        asked.append(hf)
    if torch:
        from flash_cute.hooks import aten

        asked.append(aten)
    for hook in asked:
        hook.register()


def unregister(*, torch: bool | None = None, transformers: bool | None = None) -> None:
    """Takes back what `register` did; without arguments all of it.

    Set another attention first for a model that has "cute_fa".
    """
    everything = torch is None and transformers is None
    for asked, name in ((torch, "aten"), (transformers, "hf")):
        hook = sys.modules.get(f"flash_cute.hooks.{name}")
        if hook is not None and (asked or everything):
            hook.unregister()


def _check_transformers() -> None:
    needed = "register: transformers=True needs transformers 5.17 or newer"
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"{needed}; it is not installed") from error
    version = transformers.__version__
    # From 5.5 on it calls masks as `hf` has them.
    if [int(x) for x in re.findall(r"\d+", version)[:2]] < [5, 5]:
        raise ImportError(f"{needed}; {version} is installed")
