from flash_cute.hub.kernel import flash_attn_func, flash_attn_interface, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_interface", "flash_attn_varlen_func"]
