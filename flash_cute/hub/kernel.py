"""What the kernel has: FlashAttention-2's functions, and FlashAttention-3's in the module
`flash_attn_interface`.

transformers reads from a function's parameters what it can do. `flash_attn_with_kvcache` is not
here: transformers would bring it caches in pages. Without it, it calls the others.
"""

from flash_cute import flash_attn_interface
from flash_cute.flash_attn import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_interface", "flash_attn_varlen_func"]
