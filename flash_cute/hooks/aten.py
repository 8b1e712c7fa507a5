"""flash_cute behind PyTorch's flash attention on CUDA: `scaled_dot_product_attention` with that
backend, and `torch.nn.attention.varlen.varlen_attn`.

csrc/cute_fa2/torch/aten.cpp has what takes the place of PyTorch's kernels. A call that flash_cute
does not serve goes to PyTorch's kernel, through an op of ours of the same name. So does its
backward. Its arguments tell dropout, dtypes and head dims; where they tell nothing, as with ALiBi
slopes, the log-sum-exp that came back to it does, unless it is a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_FORWARD = "TTT T?T? iifbb f? i?i? T?T?"
#: The ops, with the types of their arguments in the torches that are known: T is a tensor, ? an
#: optional argument, and the others int, float and bool.
OPS = {
    "_scaled_dot_product_flash_attention": ["TTT fbb f?"],
    "_scaled_dot_product_flash_attention_backward": ["TTTT TT TTii fb TT f?"],
    "_flash_attention_forward": [_FORWARD, f"{_FORWARD} T?i?"],
    "_flash_attention_backward": ["TTTT TT TTii fb TT f? i?i?"],
    "_flash_attention_forward_no_dropout_inplace": [f"T {_FORWARD} T?i?"],  # new in torch 2.13
}


def _types(schema: Any) -> str:
    """As OPS has them."""
    words = [str(argument.type) for argument in schema.arguments]
    return "".join(f"{x[9]}?" if x.startswith("Optional") else x[0] for x in words)


def _define() -> torch.library.Library:
    """Ops of ours: those to which calls go that are not served, and one that says what libtorch's
    stable ABI does not."""
    library = torch.library.Library("flash_cute", "FRAGMENT")
    for name, known in OPS.items():
        if hasattr(torch.ops.aten, name):
            schema = getattr(torch.ops.aten, name).default._schema
            if _types(schema) not in [types.replace(" ", "") for types in known]:
                raise RuntimeError(f"flash_cute does not know torch {torch.__version__}'s {schema}")
            arguments, _, results = str(schema).removeprefix("aten::").partition(" -> ")
            # Tensors only: aten.cpp says why.
            results = results.replace("SymInt max_q, SymInt max_k, ", "")
            library.define(f"{arguments} -> {results}")
    library.define("deterministic() -> bool")
    library.impl("deterministic", _is_deterministic, "CompositeExplicitAutograd")
    return library


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


_definitions = _define()
_libraries: dict[str, torch.library.Library] = {}


def _kernel_below(name: str, key: str) -> Callable[..., Any]:
    """PyTorch's, for the op of ours with its name."""
    try:
        kernel = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        kernel = None  # this torch has none for `key`

    def call(keyset: Any, *args: Any, **keywords: Any) -> Any:
        if kernel is None:
            raise NotImplementedError(f"neither flash_cute nor this torch serves aten::{name} so")
        results = kernel.call_boxed(keyset, *args, **keywords)
        if isinstance(results, tuple):
            return tuple(x for x in results if not isinstance(x, int))
        return results

    return call


def register(key: str = "CUDA") -> None:
    """Overrides the ops for a dispatch key."""
    if key in _libraries:
        return
    library = torch.library.Library("flash_cute", "IMPL")
    names = [name for name in OPS if hasattr(torch.ops.aten, name)]
    for name in names:
        library.impl(name, _kernel_below(name, key), key, with_keyset=True)
    _quiet_the_dispatcher()
    for name in names:
        torch.ops.flash_cute.override_aten(name, key)
    _libraries[key] = library
    if key == "CUDA" and _cudnn_is_first():
        warnings.warn(
            "PyTorch takes cuDNN before its flash backend, which is flash_cute now, on this GPU: "
            "call torch.backends.cuda.enable_cudnn_sdp(False), or use torch.nn.attention."
            "sdpa_kernel(SDPBackend.FLASH_ATTENTION)",
            stacklevel=3,
        )


def _quiet_the_dispatcher() -> None:
    """It warns of the process's first override; ours are what was asked for."""
    library = torch.library.Library("flash_cute", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            library.impl("deterministic", _is_deterministic, "CPU", allow_override=True)
    library._destroy()


def unregister() -> None:
    """The kernels that were there are back."""
    torch.ops.flash_cute.restore_aten()
    for library in _libraries.values():
        library._destroy()
    _libraries.clear()


def _cudnn_is_first() -> bool:
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return torch.cuda.get_device_capability()[0] in (9, 10)
