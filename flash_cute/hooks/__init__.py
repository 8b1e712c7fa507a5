"""`register`: flash_cute in programs that call PyTorch's attention, or transformers'."""

from __future__ import annotations

import sys


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
        ImportError: transformers is not installed, or too old.
    """
    if torch is None and transformers is None:
        raise ValueError("register needs torch=True, transformers=True, or both")
    if transformers:
        try:
            from flash_cute.hooks import hf
        except ImportError as error:
            raise ImportError("register: transformers=True needs transformers 5.17+") from error

        hf.register()
    if torch:
        from flash_cute.hooks import aten

        aten.register()


def unregister(*, torch: bool = False, transformers: bool = False) -> None:
    """Takes back what `register` did; without arguments all of it."""
    everything = not (torch or transformers)
    if torch or everything:
        from flash_cute.hooks import aten

        aten.unregister()
    if transformers or everything:
        hf = sys.modules.get("flash_cute.hooks.hf")
        if hf is not None:
            hf.unregister()
