"""FlashAttention-2's functions. transformers reads from their parameters what they can do.

`flash_attn_with_kvcache` is not here: transformers would bring it caches in pages. Without it, it
calls the others.
"""

from flash_cute.flash_attn import flash_attn_func, flash_attn_interface, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_interface", "flash_attn_varlen_func"]
