"""FlashAttention-2's functions (the package flash_attn, 2.8) on flash_cute's kernels.

    from flash_cute.flash_attn import flash_attn_func
    from flash_cute.flash_attn.bert_padding import pad_input, unpad_input

Signatures, layouts and results are the package's. What flash_cute does not serve raises a
NotImplementedError; nothing is dropped.
"""

from flash_cute.flash_attn import bert_padding, flash_attn_interface
from flash_cute.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"  #: Of the package whose functions these are: programs ask for it.

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
