"""`register(torch=True)`: PyTorch's flash attention on our kernels. Without a GPU the overrides are
on the CPU's key, where no kernel of PyTorch's is, in front of stand-ins."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import random_inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.functional import scaled_dot_product_attention

import flash_cute
from flash_cute import cpu
from flash_cute.hooks import aten

OP = torch.ops.aten._scaled_dot_product_flash_attention
BEGINS = [0, 3, 3, 29]


@pytest.fixture(autouse=True)
def unregister() -> Iterator[None]:
    yield
    flash_cute.unregister(torch=True)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Our overrides on the CPU, and the calls that reach the kernels below them."""
    reached: list[str] = []

    def stand_in(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        reached.append("forward")
        lse, state = q[..., 0].float(), torch.zeros(2, dtype=torch.uint64)
        return q + 1, lse, None, None, q.shape[2], k.shape[2], state, state[0], q.new_empty(0)

    def stand_in_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        reached.append("backward")
        return q * 7, k * 7, v * 7

    def stand_in_packed(q: Tensor, *_: Any, **options: Any) -> tuple[Any, ...]:
        reached.append(",".join(name for name, value in options.items() if value is not None))
        # As torch's meta kernel has them, on which a compiler relies.
        lse = q[..., 0].float().transpose(-1, -2).contiguous()
        state = torch.zeros(2, dtype=torch.uint64)
        return q + 1, lse, state, state[0].clone(), q.new_empty(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", stand_in, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", stand_in_backward, "CPU")
    # Of this op, what the overrides must tell it.
    library.impl("_flash_attention_forward", stand_in_packed, "CPU")
    aten.register("CPU")
    yield reached
    aten.unregister()
    library._destroy()


def inputs(**options: Any) -> list[Tensor]:
    made = random_inputs(2, 4, 29, 24, dtype=torch.float16, **options)
    return [x.requires_grad_() for x in made]


def gradients(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return torch.autograd.grad(out, (q, k, v), dout)


def check_same(results: Any, expected: Any) -> None:
    for x, right in zip(results, expected, strict=True):
        torch.testing.assert_close(x, right, rtol=0, atol=0)


def test_register_without_an_argument_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="torch=True, transformers=True, or both"):
        flash_cute.register()
    flash_cute.register(torch=False)  # as a program's own flag may be


@pytest.mark.parametrize("version", [None, "4.57.1", "5.0rc1"])
def test_register_names_what_transformers_it_needs(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = version and SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "transformers", installed)
    with pytest.raises(ImportError, match=rf"5\.17 or newer; {version or 'it is not'}"):
        flash_cute.register(torch=True, transformers=True)
    assert not aten._libraries


def test_unregister_takes_back_what_is_asked_for() -> None:
    aten.register("CPU")
    flash_cute.unregister(torch=False)
    flash_cute.unregister(transformers=True)
    assert aten._libraries
    flash_cute.unregister()
    assert not aten._libraries


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_on_the_cpu(calls: list[str], is_causal: bool) -> None:
    q, k, v = inputs(heads_kv=2)
    results = OP(q, k, v, 0.0, is_causal, scale=0.3)
    out, lse = flash_cute.forward(q, k, v, is_causal, 0.3)
    check_same(results[:2], (out, lse))
    check_same(gradients(results[0], q, k, v), gradients(out, q, k, v))
    # As torch's kernel has it for no dropout, which a compiler relies on.
    meta = OP(*(x.to("meta") for x in (q, k, v)), 0.0, is_causal, scale=0.3)
    assert results[2:6] == (None, None, 29, 29) == (meta[2], meta[3], *meta[4:6])
    for x, like in zip(results[6:], meta[6:], strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
    assert calls == []


@pytest.mark.parametrize(
    "dropout_p, dtype, head_dim_v",
    [(0.5, torch.float16, 24), (0.0, torch.float32, 24), (0.0, torch.float16, 16)],
)
def test_what_is_not_served_goes_to_the_kernel_below(
    calls: list[str], dropout_p: float, dtype: torch.dtype, head_dim_v: int
) -> None:
    q, k, v = (x.detach().to(dtype) for x in inputs())
    q, k, v = (x.requires_grad_() for x in (q, k, v[..., :head_dim_v]))
    out = OP(q, k, v, dropout_p, True)[0]
    assert torch.equal(out, q + 1) and calls == ["forward"]
    check_same(gradients(out, q, k, v), (q * 7, k * 7, v * 7))
    assert calls == ["forward", "backward"]
    # Here no kernel is below. Before torch 2.13 the reason goes to stderr.
    with pytest.raises(RuntimeError, match=r"nor this torch serves|to stderr"):
        torch.ops.aten._flash_attention_backward(
            out, q, k, v, out, out, out, out, 29, 29, dropout_p, False, out, out
        )


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (5, 3)])
def test_varlen_on_the_cpu(window: tuple[int, int]) -> None:
    check_varlen("cpu", window)


def check_varlen(device: str, window: tuple[int, int]) -> None:
    q, k, v = (x[0].transpose(0, 1).detach().to(device).requires_grad_() for x in inputs())
    begins = torch.tensor(BEGINS, dtype=torch.int32, device=device)
    aux = varlen.AuxRequest(lse=True)
    out, lse = varlen.varlen_attn(
        q, k, v, begins, begins, 26, 26, window_size=window, return_aux=aux
    )
    expected = flash_cute.forward_varlen(q, k, v, begins, window_size=window)
    check_same((out, lse), expected)
    check_same(gradients(out, q, k, v), gradients(expected[0], q, k, v))
    used = torch.tensor([2, 0, 9], dtype=torch.int32, device=device)
    if not hasattr(varlen, "varlen_attn_out"):  # from torch 2.13 on
        return
    with torch.no_grad():
        into = torch.empty_like(q)
        varlen.varlen_attn_out(into, q, k, v, begins, begins, 26, 26, seqused_k=used)
        check_same([into], flash_cute.forward_varlen(q, k, v, begins, seqused_k=used)[:1])


@pytest.mark.usefixtures("calls")
def test_dense_layout_of_the_varlen_op() -> None:
    check_dense_layout("cpu")


def test_options_that_are_not_served(calls: list[str]) -> None:
    op = torch.ops.aten._flash_attention_forward
    q, k, v = (x.detach() for x in inputs())
    call = (q, k, v, None, None, 29, 29, 0.0, True)
    op(*call, False, scale=0.3, window_size_left=7, alibi_slopes=q)
    op(*call, True)
    expected = ["scale,window_size_left,alibi_slopes", ""]
    names = [argument.name for argument in op.default._schema.arguments]
    if "block_table" in names:  # from torch 2.13 on
        op(*call, False, block_table=q)
        op(*call, False, num_splits=1)
        expected += ["block_table", "num_splits"]
    assert calls == expected


@pytest.fixture
def backward_below(calls: list[str]) -> Iterator[list[str]]:
    """The same, with a stand-in for the backward of the varlen op, too."""

    def stand_in(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> Any:
        assert torch.equal(rest[1], q[..., 0].float().transpose(-1, -2))  # the log-sum-exp
        calls.append("backward")
        return q * 7, k * 7, v * 7

    aten.unregister()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_backward", stand_in, "CPU")
    aten.register("CPU")
    yield calls
    aten.unregister()
    library._destroy()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("option", ["alibi_slopes", "num_splits", None])
def test_the_backward_follows_the_forward(
    backward_below: list[str], option: str | None, is_packed: bool, backend: str
) -> None:
    """Its arguments are the same with these options and without."""
    op = torch.ops.aten._flash_attention_forward
    if option not in [None, *(argument.name for argument in op.default._schema.arguments)]:
        pytest.skip("num_splits came with torch 2.13")
    heads_first = inputs()
    begins = torch.tensor(BEGINS, dtype=torch.int32) if is_packed else None
    q, k, v = (x.detach().transpose(1, 2) for x in heads_first)
    q, k, v = ((x[0] if is_packed else x).contiguous().requires_grad_() for x in (q, k, v))
    given = {"alibi_slopes": torch.ones(4), "num_splits": 1}
    options = {option: given[option]} if option else {}

    @torch.compile(backend=backend)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return op(q, k, v, begins, begins, 29, 29, 0.0, True, False, scale=0.3, **options)[0]

    grads = gradients(attend(q, k, v), q, k, v)
    if option:
        assert backward_below == [f"scale,{option}", "backward"]
        check_same(grads, (q * 7, k * 7, v * 7))
    else:
        assert backward_below == []
        if is_packed:
            expected = flash_cute.forward_varlen(q, k, v, begins, is_causal=True, softmax_scale=0.3)
        else:
            rows = [x.transpose(1, 2) for x in (q, k, v)]
            expected = flash_cute.forward(*rows, True, 0.3)
        out = expected[0] if is_packed else expected[0].transpose(1, 2)
        check_same(grads, gradients(out, q, k, v))


@pytest.mark.parametrize("num_splits", [None, 1])
def test_the_backward_of_varlen_attn(backward_below: list[str], num_splits: int | None) -> None:
    """Of the forward's results it passes on out and the log-sum-exp alone."""
    if "num_splits" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("num_splits came with torch 2.13")
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in inputs())
    begins = torch.tensor(BEGINS, dtype=torch.int32)
    out = varlen.varlen_attn(q, k, v, begins, begins, 26, 26, num_splits=num_splits)
    grads = gradients(out, q, k, v)
    if num_splits is None:
        expected = flash_cute.forward_varlen(q, k, v, begins)[0]
        check_same(grads, gradients(expected, q, k, v))
    else:
        check_same(grads, (q * 7, k * 7, v * 7))
    assert backward_below[1:] == ["backward"] * (num_splits is not None)


def test_a_copied_log_sum_exp_says_nothing(backward_below: list[str]) -> None:
    """Nor does a slice of ours that begins where the mark of PyTorch's stands."""
    q, k, v = (x.detach().transpose(1, 2).contiguous() for x in inputs())
    call = (None, None, 29, 29, 0.0, True)
    forward = torch.ops.aten._flash_attention_forward
    out, lse, *state, _ = forward(q, k, v, *call, False, alibi_slopes=torch.ones(4))
    backward = torch.ops.aten._flash_attention_backward
    backward(out, q, k, v, out, lse, *call, *state)
    assert backward_below == ["alibi_slopes", "backward"]
    room = lse.new_empty(28 + lse.numel() + 1)
    slice_of_more = room[28:-1].view_as(lse).copy_(lse)
    for copied in (lse.clone(), slice_of_more):
        backward(out, q, k, v, out, copied, *call, *state)
    assert backward_below == ["alibi_slopes", "backward"]


def check_dense_layout(device: str) -> None:
    """(B, N, H, D), as other libraries call it; not contiguous, and with an offset."""
    packed = torch.randn(2, 29, 3, 4, 24).to(device, torch.float16)
    q, k, v = (x.detach().requires_grad_() for x in packed.unbind(2))
    op, call = torch.ops.aten._flash_attention_forward, (None, None, 29, 29, 0.0, True, False)
    out, lse, *_ = op(q, k, v, *call, scale=0.3, window_size_left=7)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected, right_lse = flash_cute.forward(*heads_first, True, 0.3, window_size=(7, -1))
    check_same((out.transpose(1, 2), lse), (expected, right_lse))
    assert out.is_contiguous()
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    check_same(grads, torch.autograd.grad(expected, (q, k, v), dout.transpose(1, 2)))


def random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape).to(device, torch.float16)


LAYOUTS: dict[str, Callable[[str], Tensor]] = {
    "(B, H, N, D)": lambda device: random(device, 2, 4, 29, 24),
    "(B, N, H, D)": lambda device: random(device, 2, 29, 4, 24).transpose(1, 2),
    "of qkv": lambda device: random(device, 2, 29, 3, 4, 24)[:, :, 1].transpose(1, 2),
    "expanded": lambda device: random(device, 2, 1, 29, 24).expand(2, 4, 29, 24),
    "one row": lambda device: random(device, 2, 1, 4, 24).transpose(1, 2),
}


def check_layout(device: str, make: Callable[[str], Tensor]) -> None:
    """Results lie as torch's meta kernels say, on which compiled code relies."""

    def results(device: str) -> list[Tensor]:
        q, k, v = (make(device) for _ in "qkv")
        heads_last = [x.transpose(1, 2) for x in (q, k, v)]
        call = (None, None, q.shape[2], k.shape[2], 0.0, True, False)
        out, lse, *_, state, unused, _ = OP(q, k, v, 0.0, True)
        packed_out, packed_lse, *_ = torch.ops.aten._flash_attention_forward(*heads_last, *call)
        more = (None, None, q.shape[2], k.shape[2], 0.0, True, state, unused)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        grads = backward(out, q, k, v, out, lse, *more)
        return [out, lse, packed_out, packed_lse, *grads]

    for x, like in zip(results(device), results("meta"), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        assert torch._prims_common.check_significant_strides(x, like)[0]


@torch.inference_mode()
@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    check_layout("cpu", LAYOUTS[layout])


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_take_the_mode_of_torch(deterministic: bool) -> None:
    q, k, v = inputs()
    out = OP(q, k, v)[0]
    modes = []

    def spy(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        modes.append(options.get("deterministic", False))
        return cpu.attention_backward(*tensors, **options)

    library = torch.library.Library("flash_cute", "IMPL")
    library.impl("bwd", spy, "CPU", allow_override=True)
    torch.use_deterministic_algorithms(deterministic)
    try:
        gradients(out, q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
        library._destroy()
    assert modes == [deterministic]


def test_context_parallel() -> None:
    """Two processes, on two GPUs if there are."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).parent / "context_parallel.py")
    done = subprocess.run(
        [*command, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes" in done.stdout and "output and gradients are right" in done.stdout


def test_unregister(calls: list[str]) -> None:
    q, k, v = inputs()
    aten.register("CPU")  # once more changes nothing
    flash_cute.unregister(torch=True)
    OP(q, k, v)
    assert calls == ["forward"]


@pytest.mark.parametrize("is_first", [False, True])
def test_it_says_that_cudnn_is_first(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    monkeypatch.setattr(aten, "_cudnn_is_first", lambda: is_first)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        flash_cute.register(torch=True)
    assert [("enable_cudnn_sdp(False)" in str(x.message)) for x in said] == [True] * is_first


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:PyTorch takes cuDNN")
class TestOnTheGpu:
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_sdpa(self, is_causal: bool) -> None:
        q, k, v = inputs(device="cuda")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            theirs = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            flash_cute.register(torch=True)
            out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            expected = flash_cute.forward(q, k, v, is_causal)[0]
            check_same([out], [expected])
            torch.use_deterministic_algorithms(True)
            try:
                check_same(gradients(out, q, k, v), gradients(expected, q, k, v))
            finally:
                torch.use_deterministic_algorithms(False)
            flash_cute.unregister()
            again = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            check_same([again], [theirs])

    def test_dropout(self) -> None:
        """PyTorch's kernel, and its backward with the same random state."""
        q, k, v = inputs(device="cuda")
        results = []
        for is_registered in (False, True):
            flash_cute.register(torch=is_registered)
            torch.manual_seed(3)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = scaled_dot_product_attention(q, k, v, dropout_p=0.3)
            results.append((out, *gradients(out, q, k, v)))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)  # dq is summed in any order

    @pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)])
    def test_varlen(self, window: tuple[int, int]) -> None:
        flash_cute.register(torch=True)
        check_varlen("cuda", window)

    def test_dense_layout_of_the_varlen_op(self) -> None:
        flash_cute.register(torch=True)
        check_dense_layout("cuda")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout: str) -> None:
        flash_cute.register(torch=True)
        check_layout("cuda", LAYOUTS[layout])

    def test_compile(self) -> None:
        flash_cute.register(torch=True)
        q, k, v = inputs(device="cuda")

        @torch.compile(fullgraph=True)
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        check_same([attend(q, k, v)], [flash_cute.forward(q, k, v, True)[0]])
