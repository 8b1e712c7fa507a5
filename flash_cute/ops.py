"""Loads the compiled library and gives its op what only Python can: fake tensors, the CPU,
autocast, a word on gradients, and vmap.

`torch.ops.flash_cute.fwd` is defined, and implemented for CUDA, in csrc/cute_fa2/torch_binding.cpp.
Its arguments are those of `cpu.attention` here, which is the same function for CPU tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn, TypedDict, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from flash_cute import checks, cpu

LIBRARY = Path(__file__).parent / "_flash_cute.so"


def _load(library: Path) -> None:
    if sys.platform == "win32":
        raise ImportError(
            "flash_cute does not run on Windows: use it under WSL 2, or use "
            "torch.nn.functional.scaled_dot_product_attention instead"
        )
    if not library.exists():
        raise ImportError(
            f"flash_cute's compiled library is missing ({library}): install the package with `pip "
            "install .` in the source tree, or, if it is installed, run Python outside of that tree"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise ImportError(
            f"flash_cute's compiled library does not load under torch {torch.__version__} (it "
            "needs 2.10 or newer, and the operating system and processor that it was built for): "
            f"{error}"
        ) from error


_load(LIBRARY)

#: The op, without the look-ups that `torch.ops.flash_cute.fwd(...)` would repeat at each call.
fwd = torch.ops.flash_cute.fwd.default


Shape = tuple[int, ...]


class TileOfAnyArch(TypedDict):
    arch: str
    op: str
    mask: str  #: full, banded, any or none: the calls that it serves with whole keys
    head_dim: int  #: serves head dims up to this one
    block_m: int  #: query rows of a tile
    block_n: int  #: keys of a tile
    warps: int
    stages: int  #: key blocks in shared memory
    smem_bytes: int
    blocks_per_sm: int  #: thread blocks that fit a multiprocessor together
    max_registers: int  #: what the register file leaves to a thread then


class Tile(TileOfAnyArch, total=False):
    """A row of the kernels' tile table (csrc/cute_fa2/config.h)."""

    # Of sm80 alone.
    column_warps: int  #: how many of the warps share their query rows
    # Of sm90 alone.
    splits: int  #: 1 if it serves keys in parts, else 0
    q_stages: int  #: query tiles in shared memory
    producer_registers: int  #: what the warpgroup that loads keeps of a thread's registers
    consumer_registers: int  #: and what the others make of theirs


class BuildInfo(TypedDict):
    """What the compiled library holds."""

    cuda_runtime: int  #: as CUDA counts: 13000 is 13.0
    archs: list[str]
    head_dims: list[int]
    left_out: str  #: what FLASH_CUTE_HEAD_DIMS and FLASH_CUTE_ARCHS left out
    tiles: list[Tile]


def build_info() -> BuildInfo:
    return cast(BuildInfo, json.loads(torch.ops.flash_cute.build_info()))


def tiles_for(smem_limit: int) -> list[Tile]:
    """The rows of sm80 that serve a device which lends a block `smem_limit` bytes of shared memory,
    one for each head dim.
    """
    return cast("list[Tile]", json.loads(torch.ops.flash_cute.tiles_for(smem_limit)))


torch.library.impl("flash_cute::fwd", "CPU", cpu.attention)


@torch.library.register_fake("flash_cute::fwd")
def _fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    diagonal_offset: int | None = 0,
    smem_limit: int = 0,
    arch: int = 0,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fwd_flops(q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    """For torch.utils.flop_counter, by PyTorch's rule for SDPA: masks spare nothing."""
    batch, heads, len_q, head_dim = q
    return 4 * batch * heads * len_q * k[2] * head_dim


if torch.ops.flash_cute.fwd not in flop_registry:  # it is where the package is imported again
    register_flop_formula(torch.ops.flash_cute.fwd)(_fwd_flops)


def autocast(x: Any) -> Any:
    """x as PyTorch's SDPA takes it under `torch.autocast`: floating-point tensors but for fp64 in
    autocast's dtype. Without autocast, x."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _fwd_autocast(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    q, k, v = autocast(q), autocast(k), autocast(v)
    with torch.autocast(q.device.type, enabled=False):
        return fwd(q, k, v, *args)


torch.library.impl("flash_cute::fwd", "AutocastCUDA", _fwd_autocast)
torch.library.impl("flash_cute::fwd", "AutocastCPU", _fwd_autocast)


_below_autograd = torch._C._AutoDispatchBelowAutograd  # a context


class _NoBackward(torch.autograd.Function):
    """Results whose derivatives are refused once somebody takes them."""

    @staticmethod
    def forward(*args: Any) -> Any:
        with _below_autograd():
            return fwd(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(f"a gradient is taken: {checks.NO_BACKWARD}")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(f"a tangent is carried on: {checks.NO_TANGENT}")


def _fwd_autograd(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    """`forward` refuses derivatives at once. This is for where the op stands without it, as in an
    exported program, which may be run in grad mode with no gradient in mind (but not compiled so:
    torch.compile takes gradients ahead); and for where less is seen than there is, as by
    torch.compile of torch.func's gradients, or within vmap."""
    if not checks.wants_derivative(q, k, v):
        with _below_autograd():
            return fwd(q, k, v, *args)
    if torch._C._are_functorch_transforms_active():  # to which _NoBackward would be a riddle
        raise NotImplementedError(f"torch.func takes a derivative: {checks.NO_BACKWARD}")
    return _NoBackward.apply(q, k, v, *args)


torch.library.impl("flash_cute::fwd", "Autograd", _fwd_autograd)


# Looked up once, for the sake of every call.
_is_compiling = torch.compiler.is_compiling
_functorch_level = torch._C._functorch.maybe_current_level
_has_function_mode = torch._C._is_torch_function_mode_enabled


def fast_fwd(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    """The op for tensors that want no derivative: past its autograd, which takes microseconds, if
    the tensors are all that they seem to be, and no mode or transform stands between."""
    if (
        _is_compiling()  # first: it cannot trace the others
        or not type(q) is type(k) is type(v) is Tensor
        or _functorch_level() is not None
        or _has_function_mode()
    ):
        return fwd(q, k, v, *args)
    with _below_autograd():
        return fwd(q, k, v, *args)


def _fwd_vmap(
    info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """One call for the whole map: the mapped dimension joins the batch."""

    def fold(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    batch = q.shape[0] if in_dims[0] is None else q.movedim(in_dims[0], 0).shape[1]
    out, lse = fwd(*(fold(x, dim) for x, dim in zip((q, k, v), in_dims, strict=False)), *args)
    shape = (info.batch_size, batch)
    return (out.unflatten(0, shape), lse.unflatten(0, shape)), (0, 0)


torch.library.register_vmap("flash_cute::fwd", _fwd_vmap)
