"""`forward` under torch.compile, torch.export, torch.vmap and fake tensors."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from support import BACKENDS, DEVICES, LAYOUTS, ONE_BACKEND_EACH, poisoned, random_inputs
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import ops

SOME_BACKENDS = pytest.mark.parametrize("device, dtype", ONE_BACKEND_EACH)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def counting(function, **options):
    """`function` compiled without graph breaks, and a counter of its graphs. Nothing of it is
    generated code but the graph.
    """
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


@pytest.mark.parametrize("is_causal", [False, True])
@SOME_BACKENDS
def test_fullgraph(device, dtype, is_causal):
    compiled, counter = counting(lambda q, k, v: flash_cute.forward(q, k, v, is_causal))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        q, k, v = random_inputs(2, 4, 33, 16, heads_kv=2, len_k=50, dtype=dtype, device=device)
        assert_same(compiled(q, k, v), flash_cute.forward(q, k, v, is_causal))
    assert counter.frame_count == 1


@SOME_BACKENDS
def test_one_tensor_as_q_k_and_v(device, dtype):
    x = random_inputs(2, 4, 33, 16, dtype=dtype, device=device)[0]
    compiled, _ = counting(lambda x: flash_cute.forward(x, x, x, True, 0.5))
    assert_same(compiled(x), flash_cute.forward(x, x, x, True, 0.5))


@pytest.mark.parametrize("is_causal", [False, True])
@SOME_BACKENDS
def test_dynamic_shapes_are_one_graph(device, dtype, is_causal):
    compiled, counter = counting(
        lambda q, k, v: flash_cute.forward(q, k, v, is_causal), dynamic=True
    )
    # The sizes of the first call all differ: the compiler takes equal ones for one and the same.
    for batch, len_q, len_k in ((2, 33, 50), (4, 65, 40), (5, 300, 301), (2, 7, 7)):
        inputs = random_inputs(
            batch, 6, len_q, 16, heads_kv=3, len_k=len_k, dtype=dtype, device=device
        )
        assert_same(compiled(*inputs), flash_cute.forward(*inputs, is_causal))
    assert counter.frame_count == 1


@pytest.mark.parametrize("is_causal", [False, True])
@SOME_BACKENDS
def test_dynamic_head_dims_are_one_graph(device, dtype, is_causal):
    """With the default scale, which is 1/sqrt(D)."""
    compiled, counter = counting(
        lambda q, k, v: flash_cute.forward(q, k, v, is_causal), dynamic=True
    )
    for head_dim in (16, 24, 32, 40, 56, 64, 5, 20, 8, 48):
        inputs = random_inputs(2, 6, 33, head_dim, heads_kv=3, len_k=50, dtype=dtype, device=device)
        assert_same(compiled(*inputs), flash_cute.forward(*inputs, is_causal))
    assert counter.frame_count == 1


def test_slopes_of_one_head_of_one_sequence():
    """Their sizes are 1, the number of sequences is one less than a size of cu_seqlens_q."""
    q, slopes, ends = torch.randn(7, 1, 16), torch.rand(1, 1), torch.tensor([0, 7]).int()

    def attention(q, slopes, ends):
        return flash_cute.forward_varlen(q, q, q, ends, alibi_slopes=slopes)[0]

    compiled = torch.compile(attention, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(q, slopes, ends), attention(q, slopes, ends))


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_scales_that_change_compile_as_often_as_sdpas(dynamic):
    def graphs(attention):
        torch._dynamo.reset()
        compiled, counter = counting(attention, dynamic=dynamic)
        for step in range(1, 8):
            compiled(*random_inputs(2, 3, 33, 16, len_k=50), 0.1 * step)
        return counter.frame_count

    def sdpa(q, k, v, scale):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    assert graphs(lambda q, k, v, s: flash_cute.forward(q, k, v, False, s)) <= graphs(sdpa)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@SOME_BACKENDS
def test_transformer_block(device, dtype, backend):
    """A projection in, a view as (B, N, H * D) out: strides as promised also to the compiler."""
    weights = (
        torch.randn(64, 3 * 64, generator=torch.Generator().manual_seed(0)).to(device, dtype) / 8
    )

    def block(x):
        q, k, v = (x @ weights).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        out, lse = flash_cute.forward(q, k, v, True)
        return x + out.transpose(1, 2).view(x.shape), lse * 2

    x = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with torch.no_grad():
        actual = torch.compile(block, fullgraph=True, backend=backend)(x)
        for a, b in zip(actual, block(x), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_inside_and_outside(device):
    q, k, v = random_inputs(1, 2, 33, 16, device=device)

    def inside(q, k, v):
        with torch.autocast(device, dtype=torch.bfloat16):
            return flash_cute.forward(q, k, v)

    expected = inside(q, k, v)
    assert expected[0].dtype == torch.bfloat16
    assert_same(counting(inside)[0](q, k, v), expected)
    outside, _ = counting(flash_cute.forward)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same(outside(q, k, v), expected)


def test_scales_of_numpy():
    numpy = pytest.importorskip("numpy")
    q, k, v = random_inputs(1, 2, 33, 16)
    scale = 1 / numpy.sqrt(16)

    def given(q, k, v):
        return flash_cute.forward(q, k, v, False, scale)

    def computed(q, k, v):
        return flash_cute.forward(q, k, v, False, 1 / numpy.sqrt(q.shape[-1]))

    for function in (given, computed):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_same(compiled(q, k, v), flash_cute.forward(q, k, v))


def test_refusals_are_raised_by_compiled_code_too():
    q, k, v = random_inputs(1, 2, 33, 16)
    compiled = torch.compile(lambda q, k, v: flash_cute.forward(q, k, v), backend="aot_eager")
    with pytest.raises(ValueError, match="k has head dim 8"):
        compiled(q, k[..., :8], v)
    with pytest.raises(TypeError, match="q is int32 on cpu"):
        compiled(*(x.int() for x in (q, k, v)))
    whole = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    if torch.__version__ >= "2.13":
        with pytest.raises(Exception, match="k has head dim 8"):
            whole(q, k[..., :8], v)


def test_forward_mode_within_compiled_code_is_refused():
    def loss(x):
        return flash_cute.forward(x, x, x)[0].sum() + (x**2).sum()

    x = random_inputs(1, 2, 33, 16)[0]
    with pytest.raises(NotImplementedError, match="q carries a forward-mode tangent"):
        torch.compile(lambda x: torch.func.jvp(loss, (x,), (x,)), backend="aot_eager")(x)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return flash_cute.forward(q, k, k, True)

    def inputs(len_q, len_k):
        return random_inputs(2, 4, len_q, 16, len_k=len_k)[:2]

    # No upper limit: none of the checks becomes a constraint on lengths.
    dims = {"q": {2: torch.export.Dim("len_q", min=2)}, "k": {2: torch.export.Dim("len_k", min=2)}}
    program = torch.export.export(Attention(), inputs(33, 50), dynamic_shapes=dims, strict=strict)
    for lengths in ((33, 50), (70, 20)):
        q, k = inputs(*lengths)
        assert_same(program.module()(q, k), flash_cute.forward(q, k, k, True))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_scale_that_comes_of_lengths(strict):
    """As of PyTorch's SDPA, it is a constant of the program, which is guarded."""

    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return flash_cute.forward(q, k, k, False, (k.shape[2] / 64) ** 0.5)

    q, k, _ = random_inputs(2, 4, 33, 16, len_k=50)
    dims = {"q": None, "k": {2: torch.export.Dim.AUTO}}
    program = torch.export.export(Attention(), (q, k), dynamic_shapes=dims, strict=strict)
    assert_same(program.module()(q, k), Attention()(q, k))
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(q, k[:, :, :40])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traces_hold_for_other_lengths(tmp_path):
    """torch.jit.trace keeps what Python computes of lengths: the causal mask is not so computed."""

    def attention(q, k):
        return flash_cute.forward(q, k, k, True, q.size(3) ** -0.5)

    lengths = [(1, 9), (33, 33), (7, 90), (40, 20)]
    inputs = [random_inputs(2, 4, len_q, 16, len_k=len_k)[:2] for len_q, len_k in lengths]
    for seen in inputs:
        traced = torch.jit.trace(attention, seen)
        traced.save(str(tmp_path / "traced.pt"))
        for q, k in inputs:
            for program in (traced, torch.jit.load(str(tmp_path / "traced.pt"))):
                assert_same(program(q, k), flash_cute.forward(q, k, k, True))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "general"])
def test_traces_of_modules_that_train(options):
    """torch.jit.trace traces again to check, then without gradients."""

    class Block(torch.nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return flash_cute.forward(x, x, x, **options)

    block, x = Block(16, 16), random_inputs(2, 4, 9, 16)[0]
    assert_same(torch.jit.trace(block, x)(x), block(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_defaults_of_torch_change_nothing(dtype):
    q, k, v = (x.requires_grad_() for x in random_inputs(2, 4, 9, 16))
    expected = flash_cute.forward(q, k, v)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        results = flash_cute.forward(q, k, v)
        torch.autograd.grad(results[0].sum() + results[1].sum(), (q, k, v))
    finally:
        torch.set_default_dtype(before)
    assert_same(results, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("scale", [torch.tensor(True), torch.tensor(1j), torch.ones(1)])
def test_traces_refuse_tensors_that_are_no_scales(scale):
    q, k, v = random_inputs(1, 2, 33, 16)
    with pytest.raises(TypeError, match=r"softmax_scale is a torch.Tensor .* a float"):
        torch.jit.trace(lambda q: flash_cute.forward(q, k, v, False, scale), (q,))


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_the_op_refuses_scales_that_are_not_finite(scale):
    with pytest.raises(ValueError, match=r"softmax_scale is a float .*: it must be finite"):
        ops.fwd(*random_inputs(1, 2, 33, 16), softmax_scale=scale)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("device, dtype", ONE_BACKEND_EACH)
def test_traces_refuse_what_forward_refuses(device, dtype):
    """The op does, which is all that is left there."""
    q, k, v = random_inputs(2, 4, 8, 16, heads_kv=2, dtype=dtype, device=device)
    traced = torch.jit.trace(lambda q, k, v: flash_cute.forward(q, k, v, True), (q, k, v))
    assert_same(traced(q, k, v), flash_cute.forward(q, k, v, True))
    wrong = {
        "heads": (q, k, v.transpose(1, 2)),
        "head dim": (q, k.transpose(2, 3), v),
        "batch size": (q, k.reshape(1, 4, 8, 16), v.reshape(1, 4, 8, 16)),
        "multiple": (q[:, :3], k, v),
        "float": (q, k.double(), v),
    }
    for what, inputs in wrong.items():
        with pytest.raises((ValueError, TypeError, RuntimeError), match=what):
            traced(*inputs)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_infinite_scales_that_come_of_lengths_are_refused():
    q, k, _ = random_inputs(1, 2, 33, 16)

    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return flash_cute.forward(q, k, k, False, k.shape[2] * math.inf)

    dims = {"q": None, "k": {2: torch.export.Dim.AUTO}}
    with pytest.raises(ValueError, match=r"softmax_scale is .*: it must be finite"):
        torch.export.export(Attention(), (q, k), dynamic_shapes=dims)
    with pytest.raises(ValueError, match=r"softmax_scale is .*: it must be finite"):
        torch.jit.trace(Attention(), (q, k))


def test_symbolic_trace_takes_the_call_down():
    class Attention(torch.nn.Module):
        def forward(self, q, k):
            out, lse = flash_cute.forward(q, k, v=k, is_causal=True, softmax_scale=0.3)
            return out.transpose(1, 2), lse

    module = torch.fx.symbolic_trace(Attention())
    assert flash_cute.forward in [node.target for node in module.graph.nodes]
    q, k, _ = random_inputs(2, 4, 33, 16, len_k=50)
    assert_same(module(q, k), Attention()(q, k))
    with pytest.raises(TypeError, match="q is int32 on cpu"):
        module(q.int(), k.int())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_operations_are_counted(mode):
    """Without a GPU for those of fake tensors; a mask spares none, as of PyTorch's SDPA."""
    q, k, _ = random_inputs(2, 6, 33, 16, heads_kv=3, len_k=50)
    with mode(), FlopCounterMode(display=False) as counter:
        flash_cute.forward(q, k, k)
        flash_cute.forward(q, k, k, True)
        flash_cute.forward(q, k, k[..., :8])
    assert counter.get_total_flops() == 2 * (4 * 2 * 6 * 33 * 50 * 16) + 2 * 2 * 6 * 33 * 50 * 24
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        flash_cute.forward(*torch.empty(3, 1, 2, 64, 32, device="cuda", dtype=torch.float16))
    assert counter.get_total_flops() == 4 * 2 * 64 * 64 * 32


OP_SAMPLES = {
    "full": ({}, {}),
    "scale": ({}, {"softmax_scale": 0.3}),
    "causal": ({"len_k": 40}, {"window_right": 0}),
    "window": ({"len_k": 40}, {"window_left": 5, "window_right": 3, "diagonal_offset": 2}),
    "grouped heads": ({"heads_kv": 1}, {}),
    "odd head dim": ({"head_dim": 5}, {}),
    "v's head dim": ({"head_dim_v": 24}, {}),
    "odd head dim of v": ({"head_dim_v": 3}, {"window_right": 0}),
    "no key": ({"len_k": 0}, {}),
    "no query": ({"len_q": 0, "len_k": 3}, {}),
    "one query": ({"len_q": 1, "len_k": 30}, {"window_right": 0}),
    "tuning": ({}, {"tuning": "arch=80,smem_limit=101376,splits=2"}),
}


@pytest.mark.parametrize("sample", OP_SAMPLES)
@pytest.mark.parametrize("device, dtype", BACKENDS)
def test_opcheck(device, dtype, sample):
    changes, keywords = OP_SAMPLES[sample]
    sizes = {"batch": 2, "heads_q": 4, "len_q": 33, "head_dim": 16, **changes}
    inputs = random_inputs(**sizes, dtype=dtype, device=device)
    torch.library.opcheck(ops.fwd, inputs, keywords)


@pytest.mark.parametrize("head_dim_v", [16, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
@SOME_BACKENDS
def test_opcheck_layouts(device, dtype, layout, head_dim_v):
    q, k, v = (
        poisoned(x, **LAYOUTS[layout])
        for x in random_inputs(2, 3, 33, 16, head_dim_v=head_dim_v, dtype=dtype, device=device)
    )
    torch.library.opcheck(ops.fwd, (q, k, v))
    fake = FakeTensorMode()
    promised = flash_cute.forward(*map(fake.from_tensor, (q, k, v)))
    for a, b in zip(promised, flash_cute.forward(q, k, v), strict=True):
        assert a.stride() == b.stride() and a.shape == b.shape and a.dtype == b.dtype


def test_fake_gpu_tensors_need_no_gpu():
    with FakeTensorMode():
        q = torch.empty(2, 4, 33, 16, device="cuda", dtype=torch.float16)
        out, lse = flash_cute.forward(q, q, q)
        assert out.device.type == lse.device.type == "cuda" and lse.dtype == torch.float32
        for arch in ("sm80", "sm90"):
            assert flash_cute.forward(q, q, q, arch=arch)[0].shape == q.shape
        with pytest.raises(TypeError, match="q is float64 on cuda"):
            flash_cute.forward(q.double(), q.double(), q.double())


def test_fp32_of_fake_gpu_tensors():
    """Up to head dim 256. What is refused is refused before anything runs."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 33, 256, device="cuda")
        out, lse = flash_cute.forward(q, q, q)
        assert out.dtype == torch.float32
        # (Without a GPU torch aborts where autograd meets a fake GPU tensor.)
        assert ops.bwd(out, q, q, q, out, lse)[0].shape == q.shape
        wide = torch.empty(2, 4, 33, 257, device="cuda")
        with pytest.raises(ValueError, match=r"q has head dim 257 .* 256 for float32 on GPUs"):
            flash_cute.forward(wide, wide, wide)


@pytest.mark.parametrize("is_causal", [False, True])
@SOME_BACKENDS
def test_vmap(device, dtype, is_causal, monkeypatch):
    q, k, v = (
        torch.stack([x, x + 1, x - 1])
        for x in random_inputs(2, 4, 33, 16, head_dim_v=24, dtype=dtype, device=device)
    )

    def forward(q, k, v):
        return flash_cute.forward(q, k, v, is_causal)

    def by_hand(q, k, v):
        return [torch.stack(results) for results in zip(*map(forward, q, k, v), strict=True)]

    expected = by_hand(q, k, v)
    for a, b in zip(torch.vmap(forward)(q, k, v), expected, strict=True):
        torch.testing.assert_close(a, b)
    moved = torch.vmap(forward, in_dims=(2, 0, 4))(q.movedim(0, 2), k, v.movedim(0, 4))
    for a, b in zip(moved, expected, strict=True):
        torch.testing.assert_close(a, b)
    shared = torch.vmap(forward, in_dims=(None, 0, 0), out_dims=1)(q[0], k, v)
    for a, b in zip(shared, by_hand(q[:1].expand_as(q), k, v), strict=True):
        torch.testing.assert_close(a.movedim(1, 0), b)
