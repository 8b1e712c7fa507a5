"""What the tests share: devices, inputs inside NaN, and the check by the one tolerance rule
(flash_cute/tolerance.py).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import flash_cute
from flash_cute import checks, ops, tolerance

_GPU = pytest.mark.gpu
_OTHER = (_GPU, pytest.mark.other_kernels)
DEVICES = ["cpu", pytest.param("cuda", marks=_GPU)]
#: Every (device, dtype) that is served, and one of each device for tests in which the dtype hardly
#: matters.
BACKENDS = [
    pytest.param("cpu", torch.float32, id="cpu-fp32"),
    pytest.param("cpu", torch.float64, id="cpu-fp64"),
    pytest.param("cpu", torch.float16, id="cpu-fp16"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
    pytest.param("cuda", torch.float16, id="cuda-fp16", marks=_GPU),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=_GPU),
    pytest.param("cuda", torch.float32, id="cuda-fp32", marks=_GPU),
]
ONE_BACKEND_EACH = [BACKENDS[0], BACKENDS[5]]
#: These, and the kernels that a GPU which runs both sm80's and sm90's does not get by default.
ALL_KERNELS = [
    *BACKENDS,
    pytest.param("cuda", torch.float16, id="cuda-fp16-other", marks=_OTHER),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16-other", marks=_OTHER),
]
ONE_KERNEL_EACH = [*ONE_BACKEND_EACH, BACKENDS[6], ALL_KERNELS[-1]]
#: For tests of the GPU alone.
GPU_KERNELS = pytest.mark.parametrize(
    "kernels", ["default", pytest.param("other", marks=pytest.mark.other_kernels)]
)
#: The kernels that `run` and the checks take where a test names none: with the marker
#: `other_kernels`, those. None: the default ones.
preferred_arch: str | None = None

HEAD_DIMS = [1, 3, 8, 20, 32, 40, 64, 72, 80, 96, 100, 128, 136, 160, 192, 200, 256]
#: Those in which operands come in chunks, on sm80's kernels, and without fp32.
LARGE_HEAD_DIMS = [257, 320, 384, 385, 512, 513, 640, 768, 1000, 1024]
#: (D, Dv): either the greater, in one bucket or in two, not whole chunks, V in a small part of the
#: bucket's columns.
HEAD_DIM_PAIRS = [
    *((64, 40), (40, 64), (192, 128), (128, 72), (72, 128), (20, 5), (1, 96), (100, 3)),
    *((128, 8), (8, 128), (256, 64), (64, 256), (200, 136)),
]
#: Likewise.
LARGE_HEAD_DIM_PAIRS = [(576, 512), (64, 512), (512, 64), (320, 1000), (1024, 8), (8, 1024)]


def serves_large_head_dims(device: str, dtype: torch.dtype) -> bool:
    return checks.max_head_dim(device, dtype) > 256


#: (Nq, Nk): around the tiles' sizes, ragged, longer on either side.
LENGTHS = [
    *((n, n) for n in (1, 63, 64, 65, 127, 128, 129, 300)),
    *((1, 300), (300, 1), (65, 200), (200, 65), (129, 700), (700, 129), (64, 65), (65, 64)),
]

#: (window_left, window_right, diagonal_offset) of the op: narrow, wide, off the tensor, enormous.
BANDS = [
    (10, 0, 0),
    (0, 10, 0),
    (64, 64, 30),
    (-1, 5, -20),
    (5, -1, 20),
    (0, 0, 0),
    (200, 3, 63),
    (3, 3, 500),
    (-1, 0, -500),
    (-1, 0, 500),
    (0, -1, -500),
    (2**31, 2**31, 0),
    (2**40, 0, 2**40),
    (7, 7, -(2**40)),
    (2**41, -1, 2**40),
    (-1, 2**40 + 10, -(2**40)),
    (2**61, 2**61, 2**61),
]


def gpu_has_sm90() -> bool:
    """Whether the current GPU runs the sm90 kernels, and this build has them."""
    is_built = any(tile["arch"] == "sm90" for tile in ops.build_info()["tiles"])
    return is_built and torch.cuda.get_device_capability()[0] == 9


def gpu_archs() -> tuple[str, str]:
    """The architecture whose kernels the current GPU gets by default, and the other one."""
    return ("sm90", "sm80") if gpu_has_sm90() else ("sm80", "sm90")


def random_inputs(
    batch: int = 2,
    heads_q: int = 2,
    len_q: int = 129,
    head_dim: int = 64,
    *,
    heads_kv: int | None = None,
    len_k: int | None = None,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random normal q, k, v, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape_q = (batch, heads_q, len_q, head_dim)
    shape_k = (batch, heads_kv or heads_q, len_q if len_k is None else len_k, head_dim)
    shape_v = (*shape_k[:3], head_dim_v or head_dim)
    q, k, v = (torch.randn(s, generator=generator) for s in (shape_q, shape_k, shape_v))
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def rising_inputs(*sizes: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `random_inputs`, with scores below 0 that are far greater with each 32 keys nearer to the
    first. The kernels come to that last, so rows rise with each block, to a limit below 0."""
    q, k, v = random_inputs(*sizes, **options)
    level = torch.arange(k.shape[2], device=k.device) // 32 + 1
    k = -(1 + 0.05 * k.abs()) * 0.25 * level[:, None].to(k.dtype)
    return 1 + 0.05 * q.abs(), k, v


def inputs_with_outliers(*sizes: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1), and on one element in a thousand N(0, 100) on top: those of FlashAttention-3's paper
    (arXiv:2407.08608, section 4.3)."""
    inputs, more = random_inputs(*sizes, **options), random_inputs(*sizes, **options, seed=1)
    generator = torch.Generator().manual_seed(2)
    outliers = [torch.rand(x.shape, generator=generator) < 1e-3 for x in inputs]
    q, k, v = (x + 10 * y * o.to(x) for x, y, o in zip(inputs, more, outliers, strict=True))
    return q, k, v


def check_rms_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Asserts that all keys' fp16 output is as exact as FlashAttention-3's on such inputs, 1.9e-4;
    and within twice of what rounding the exact output makes."""
    exact = flash_cute.reference.attention(q, k, v)[0]

    def rms_error(x: Tensor) -> float:
        return (x.double() - exact).square().mean().sqrt().item()

    assert rms_error(out) <= min(1.9e-4, 2 * rms_error(exact.to(out.dtype)))


def poisoned(
    x: Tensor, order: str = "bhnd", *, gap: int = 8, before: int = 8, step: int = 1
) -> Tensor:
    """A copy of x that lies in the midst of NaN: a view of a storage in which all else is NaN.

    `order` names its dimensions from the outermost in memory to the innermost. Behind each outer
    dimension there is one NaN slice, behind each innermost one `gap` NaN elements. `before` NaN
    elements come before everything. Innermost elements are `step` apart.
    """
    dims = ["bhnd".index(letter) for letter in order]
    sizes = [x.shape[dim] for dim in dims]
    room = [*(size + 1 for size in sizes[:-1]), sizes[-1] * step + gap]
    storage = torch.full((before + math.prod(room) + 64,), math.nan, dtype=x.dtype, device=x.device)
    view = storage[before : before + math.prod(room)].view(room)
    for dim, size in enumerate(sizes[:-1]):
        view = view.narrow(dim, 0, size)
    view = view[..., : sizes[-1] * step : step]
    return view.permute([dims.index(dim) for dim in range(4)]).copy_(x)


#: What to make of a dense tensor: name -> (storage in memory, as in the arguments of `poisoned`).
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows with gaps": {},
    "(B, N, H, D) transposed": {"order": "bnhd"},
    "(N, B, H, D) transposed": {"order": "nbhd"},
    "heads outermost": {"order": "hbnd"},
    "misaligned by one element": {"before": 1},
    "misaligned rows": {"gap": 3},
    "every second element": {"step": 2, "gap": 16},
    "columns": {"order": "bhdn"},
    "head dim outermost": {"order": "dbhn"},
}


def random_call(
    seed: int, dtype: torch.dtype, device: str = "cpu", *, large: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v, and the other arguments of `check`, drawn at random around the tiles' sizes: all
    at once what other tests change one at a time. `large`: the head dim is above 256."""
    dice = random.Random(seed)
    least, most, some = (257, 1024, LARGE_HEAD_DIMS) if large else (1, 256, HEAD_DIMS)
    head_dim = dice.choice([dice.randint(least, most), dice.choice(some)])
    head_dim_v = dice.choice([head_dim, dice.randint(1, most), dice.choice(HEAD_DIMS)])
    heads_kv, group = dice.randint(1, 3), dice.choice([1, 1, 2, 3, 5, 8])
    len_q = dice.choice([1, dice.randint(2, 20), dice.randint(20, 140), dice.randint(100, 330)])
    len_k = dice.choice([dice.randint(0, 5), dice.randint(1, 140), dice.randint(100, 420), len_q])
    inputs = [
        poisoned(x, **dice.choice([{}, *LAYOUTS.values()]))
        for x in random_inputs(
            *(dice.choice([1, 1, 2]), heads_kv * group, len_q, head_dim),
            heads_kv=heads_kv, len_k=len_k, head_dim_v=head_dim_v,
            dtype=dtype, device=device, seed=seed,
        )
    ]  # fmt: skip
    for i in range(3):
        if dice.random() < 0.2:  # expanded over the batch or the heads
            dim = dice.choice([0, 1])
            inputs[i] = inputs[i].narrow(dim, 0, 1).expand_as(inputs[i])
    scale = dice.choice([None, None, 1.0, 4.0, 1e-3, 0.0, -0.5])
    call: dict[str, Any] = {"softmax_scale": scale, "is_causal": dice.random() < 0.3}
    if not call["is_causal"] and dice.random() < 0.6:
        sides = [-1, 0, dice.randint(0, 30), dice.randint(0, 300)]
        call["window_left"], call["window_right"] = dice.choice(sides), dice.choice(sides)
        call["diagonal_offset"] = dice.choice([0, len_k - len_q, dice.randint(-300, 300)])
    return inputs, call


def _with_steps(x: Tensor, **steps: int) -> Tensor:
    """x's elements with other strides for some of b, h and n, over each other or expanded."""
    strides = [steps.get(dim, stride) for dim, stride in zip("bhnd", x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


#: Calls that the sm90 kernels leave to those of sm80: name -> (what to make of q, k and v,
#: softmax_scale, what the refusal says where `arch` names sm90).
NOT_FOR_SM90: dict[str, tuple[Callable[..., tuple[Tensor, ...]], float | None, str]] = {
    **{
        f"{what} of {'qkv'[i]}": (
            lambda *qkv, i=i, steps=steps: (*qkv[:i], _with_steps(qkv[i], **steps), *qkv[i + 1 :]),
            None,
            reason.format("qkv"[i]),
        )
        for i, (what, steps, reason) in itertools.product(
            range(3),
            [
                ("expanded rows", {"n": 0}, "the rows of {} are expanded"),
                ("rows over each other", {"n": 8}, "rows of {} overlap"),
                ("rows that overlap", {"n": 56}, "rows of {} overlap"),
                ("heads over each other", {"h": 8}, "rows of {} overlap"),
                ("sequences over each other", {"b": 8}, "rows of {} overlap"),
            ],
        )
    },
    "no keys": (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), None, "k has no keys"),
    "scale 0": (lambda *qkv: qkv, 0.0, "softmax_scale is not above 0"),
    "scale below 0": (lambda *qkv: qkv, -0.1, "softmax_scale is not above 0"),
}


@contextmanager
def nan_in_new_memory(deterministic: bool = False) -> Iterator[None]:
    """Fills what torch.empty and its like return with NaN, so that an output that is not written
    shows. PyTorch does so in its deterministic mode alone; our gradients take the mode of
    `deterministic`, but for those of the ops that `register` overrides.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        with mock.patch.object(
            torch, "are_deterministic_algorithms_enabled", lambda: deterministic
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def tuning_of(arch: str | None = None, **choices: int) -> str:
    """The op's `tuning`, of the preferred kernels where `arch` names none."""
    arch = arch or preferred_arch
    choices["arch"] = int(arch[2:]) if arch else 0
    return ",".join(f"{name}={value}" for name, value in choices.items() if value)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    arch: str | None = None,
    smem_limit: int = 0,
    splits: int = 0,
    head_splits: int = 0,
    **band: int,
) -> tuple[Tensor, Tensor]:
    """`forward`, or the op where arguments are given that only the op has."""
    if not band and not smem_limit and not splits and not head_splits:
        return flash_cute.forward(q, k, v, is_causal, softmax_scale, arch=arch or preferred_arch)
    if is_causal:
        band = {"window_right": 0}
    tuning = tuning_of(arch, smem_limit=smem_limit, splits=splits, head_splits=head_splits)
    out, lse = ops.fwd(q, k, v, softmax_scale=softmax_scale, **band, tuning=tuning)
    return out, lse


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    arch: str | None = None,
    smem_limit: int = 0,
    splits: int = 0,
    **band: int,
) -> tuple[Tensor, Tensor]:
    """Runs and asserts all that the contract says of the results; returns them."""
    with nan_in_new_memory():
        options = {"arch": arch, "smem_limit": smem_limit, "splits": splits, **band}
        out, lse = run(q, k, v, is_causal, softmax_scale, **options)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype and out.device == q.device
    # q's order of dimensions; where the head dims differ, v's lies innermost.
    like = q if q.shape[3] == v.shape[3] else q[..., :1].expand(out.shape)
    assert out.stride() == torch.empty_like(like).stride()
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and lse.device == q.device
    assert lse.is_contiguous()
    result = tolerance.compare(out, lse, q, k, v, is_causal, softmax_scale, **band)
    assert result.passed, str(result)
    return out, lse


def check_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    smem_limit: int = 0,
    head_splits: int = 0,
    deterministic: bool = False,
    **band: int,
) -> tuple[Tensor, ...]:
    """As `check`, of the gradients; by default those of random dout and dlse, the latter NaN where
    a row sees no key. Returns (dq, dk, dv)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if dout is None and dlse is None:
        torch.manual_seed(0)
        shapes = ((*q.shape[:3], v.shape[3]), q.shape[:3])
        dout, dlse = (torch.randn(shape, device=q.device) for shape in shapes)
        dout = poisoned(dout.to(q.dtype))
    with nan_in_new_memory(deterministic):
        tuning = {"smem_limit": smem_limit, "head_splits": head_splits}
        out, lse = run(q, k, v, is_causal, softmax_scale, **tuning, **band)
        if dlse is not None:
            dlse = dlse.masked_fill(lse == -math.inf, math.nan)
        given = [pair for pair in ((out, dout), (lse, dlse)) if pair[1] is not None]
        gradients = torch.autograd.grad([x for x, _ in given], (q, k, v), [dx for _, dx in given])
    for x, dx in zip((q, k, v), gradients, strict=True):
        assert dx.shape == x.shape and dx.dtype == x.dtype and dx.device == x.device
        assert dx.stride() == torch.empty_like(x).stride()
    result = tolerance.compare_gradients(
        gradients, dout, q.detach(), k.detach(), v.detach(), is_causal, softmax_scale,
        dlse=dlse, **band,
    )  # fmt: skip
    assert result.passed, str(result)
    return gradients


def launched(function) -> list[str]:
    """The names of all that `function` puts on the GPU: kernels, copies, fills."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
