"""Gradients of `forward` under torch's transforms: compiled, exported, of torch.func and vmap, with
autocast and checkpoints."""

from __future__ import annotations

import functools

import pytest
import torch
from support import BACKENDS, LAYOUTS, poisoned, random_inputs
from test_compile import OP_SAMPLES, counting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import cpu_kernels, ops

func = torch.func
QKV = (0, 1, 2)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def inputs(batch=2, heads_kv=2, len_k=11, dtype=torch.float32, requires_grad=True):
    sizes = {"heads_kv": heads_kv, "len_k": len_k, "head_dim_v": 12}
    qkv = random_inputs(batch, 4, 7, 8, **sizes, dtype=dtype)
    return [x.requires_grad_(requires_grad) for x in qkv]


def loss(q, k, v):
    """By both results, each with gradients of its own."""
    out, lse = flash_cute.forward(q, k, v, True)
    return out.sin().sum() + lse.cos().sum()


def self_attention_loss(x):
    return loss(x, x, x) + (x**3).sum()


def gradients_of(function, *inputs):
    return torch.autograd.grad(function(*inputs), inputs)


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


class Calls(TorchDispatchMode):
    """The calls of our ops, with their keywords."""

    def __init__(self):
        super().__init__()
        self.keywords = {ops.fwd: [], ops.bwd: []}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in self.keywords:
            self.keywords[op].append(kwargs)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("sample", OP_SAMPLES)
@pytest.mark.parametrize("device, dtype", BACKENDS)
def test_opcheck(device, dtype, sample):
    changes, keywords = OP_SAMPLES[sample]
    sizes = {"batch": 2, "heads_q": 4, "len_q": 33, "head_dim": 16, **changes}
    q, k, v = random_inputs(**sizes, dtype=dtype, device=device)
    out, lse = ops.fwd(q, k, v, **keywords)
    torch.library.opcheck(ops.bwd, (out, q, k, v, out, lse, lse), keywords)
    torch.library.opcheck(ops.bwd, (None, q, k, v, out, lse), keywords)
    torch.library.opcheck(ops.fwd, [x.requires_grad_() for x in (q, k, v)], keywords)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_gradients_are_as_promised(layout):
    q, k, v = (poisoned(x, **LAYOUTS[layout]) for x in inputs(requires_grad=False))
    out, lse = flash_cute.forward(q, k, v)
    arguments = (out, q, k, v, out, lse)
    fake = FakeTensorMode()
    promised = ops.bwd(*map(fake.from_tensor, arguments))
    for a, b, x in zip(promised[:3], ops.bwd(*arguments)[:3], (q, k, v), strict=True):
        assert a.stride() == b.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend, dynamic):
    compile = functools.partial(torch.compile, backend=backend, dynamic=dynamic, fullgraph=True)
    qkv, x = inputs(), inputs()[0]
    expected, itself = gradients_of(loss, *qkv), gradients_of(self_attention_loss, x)
    assert_close(gradients_of(compile(loss), *qkv), expected)
    assert_close(gradients_of(compile(self_attention_loss), x), itself)
    # torch.func within compiled code, of whose gradients PyTorch has dropped some in silence
    # (pytorch/pytorch#193279).
    plain = [y.detach() for y in (x, *qkv)]
    assert_close(compile(func.grad(loss, QKV))(*plain[1:]), expected)
    assert_close(
        compile(lambda x: func.vjp(self_attention_loss, x)[1](x.new_ones(())))(plain[0]), itself
    )


def test_dynamic_lengths_are_one_graph():
    compiled, counter = counting(loss, dynamic=True)
    for len_k in (11, 5, 40, 7):
        qkv = inputs(len_k=len_k)
        assert_close(gradients_of(compiled, *qkv), gradients_of(loss, *qkv))
    assert counter.frame_count == 1


def test_compiled_autograd():
    qkv = inputs()
    expected = gradients_of(loss, *qkv)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda *qkv: loss(*qkv).backward(), backend="aot_eager")(*qkv)
    assert_close([x.grad for x in qkv], expected)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    class Projected(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(8, 8)

        def forward(self, q, k, v):
            return (loss(self.projection(q), k, v),)

    module, qkv = Projected(), inputs(requires_grad=False)
    expected = torch.autograd.grad(module(*qkv)[0], module.projection.weight)
    program = torch.export.export(module, tuple(qkv), strict=strict)
    for exported in (program.module(), program.run_decompositions().module()):
        (result,) = exported(*qkv)
        assert_close(torch.autograd.grad(result, exported.projection.weight), expected)


def test_joint_graph():
    """One graph of forward and backward, as exporters of training have it."""
    from torch._functorch.aot_autograd import aot_export_joint_simple

    qkv = inputs()
    graph = aot_export_joint_simple(lambda *qkv: (loss(*qkv),), qkv, trace_joint=True)
    targets = [node.target for node in graph.graph.nodes]
    assert ops.fwd in targets and ops.bwd in targets
    _, gradients = graph([x.detach() for x in qkv], [torch.ones(())])
    assert_close(gradients, gradients_of(loss, *qkv))


TRANSFORMS = {
    "grad": lambda *x: func.grad(loss, QKV)(*x),
    "vjp": lambda *x: func.vjp(loss, *x)[1](torch.ones(())),
    "jacrev": lambda *x: func.jacrev(loss, QKV)(*x),
    "grad of the op": lambda *x: func.grad(
        lambda *x: sum(y.sum() for y in ops.fwd(*x, window_right=0)), QKV
    )(*x),
    "vmap of grad": lambda *x: [
        y[1] for y in torch.vmap(func.grad(loss, QKV))(*(torch.stack([2 * y, y]) for y in x))
    ],
    "vmap of grad, k and v shared": lambda *x: [
        y[1]
        for y in torch.vmap(func.grad(loss, QKV), in_dims=(0, None, None))(
            torch.stack([2 * x[0], x[0]]), *x[1:]
        )
    ],
    "grad of vmap": lambda *x: [
        y[1]
        for y in func.grad(lambda *x: torch.vmap(loss)(*x).sum(), QKV)(
            *(torch.stack([2 * y, y]) for y in x)
        )
    ],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name):
    qkv = inputs()
    function = (
        (lambda *x: sum(y.sum() for y in flash_cute.forward(*x, True))) if "op" in name else loss
    )
    expected = gradients_of(function, *qkv)
    assert_close(TRANSFORMS[name](*(x.detach() for x in qkv)), expected)


@pytest.mark.parametrize("shape", [(0, 2, 4, 9, 8), (3, 0, 4, 9, 8)])
def test_vmap_of_nothing(shape):
    x = torch.randn(shape, requires_grad=True)
    out, lse = torch.vmap(flash_cute.forward)(x, x, x)
    assert out.shape == shape and lse.shape == shape[:4]
    (out.sum() + lse.sum()).backward()
    assert x.grad.shape == shape


def test_gradients_from_outside_of_vmap():
    """There a tensor does not say that it requires a gradient."""
    q, k, v = inputs()
    weight = torch.tensor(1.0, requires_grad=True)
    mapped = torch.vmap(lambda q: flash_cute.forward(weight * q, k, v)[0])(q.expand(3, *q.shape))
    expected = 3 * (flash_cute.forward(weight * q, k, v)[0].sum())
    assert_close(*(torch.autograd.grad(x.sum(), (weight, k)) for x in (mapped, expected)))


DOUBLE = {
    "create_graph": lambda f, x: torch.autograd.grad(
        torch.autograd.grad(f(x), x, create_graph=True)[0].sum(), x
    ),
    "grad of grad": lambda f, x: func.grad(lambda x: func.grad(f)(x).sum())(x),
    "jacrev of jacrev": lambda f, x: func.jacrev(func.jacrev(f))(x),
    "grad outside of torch.func": lambda f, x: torch.autograd.grad(func.grad(f)(x).sum(), x),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_double_backward_is_refused(name):
    x = inputs()[0]
    assert DOUBLE[name](lambda x: (x**3).sum(), x)[0].abs().sum() > 0
    with pytest.raises(NotImplementedError, match=r"a second derivative .*MATH") as raised:
        DOUBLE[name](self_attention_loss, x)
    assert "\n" not in str(raised.value)
    compiled = torch.compile(self_attention_loss, backend="aot_eager")
    with pytest.raises((NotImplementedError, RuntimeError), match=r"second deriv|double backward"):
        DOUBLE[name](compiled, x)


def test_double_backward_by_dout_is_refused():
    x, weight = inputs()[0], torch.tensor(2.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(weight * self_attention_loss(x), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative"):
        torch.autograd.grad(gradient.sum(), weight)


def test_double_backward_is_refused_within_compiled_code():
    x = inputs(requires_grad=False)[0]
    # Older ones stop at an assertion of Dynamo's.
    message = "a second derivative" if torch.__version__ >= (2, 13) else None
    for nested in ("grad of grad", "jacrev of jacrev"):
        second = torch.compile(
            functools.partial(DOUBLE[nested], self_attention_loss), backend="eager"
        )
        with pytest.raises(Exception, match=message):  # of a class of Dynamo's
            second(x)


def test_gradients_that_could_be_differentiated_are_right():
    x = inputs()[0]
    (gradient,) = torch.autograd.grad(self_attention_loss(x), x, create_graph=True)
    assert gradient.requires_grad
    assert_close([gradient.detach()], gradients_of(self_attention_loss, x))


def test_forward_mode_is_refused():
    x = inputs(requires_grad=False)[0]
    for tangents in (
        lambda: func.jvp(self_attention_loss, (x,), (x,)),
        lambda: func.hessian(self_attention_loss)(x),
        lambda: func.jvp(func.grad(self_attention_loss), (x,), (x,)),
        lambda: func.jvp(lambda x: ops.fwd(x, x, x)[1], (x,), (x,)),
        lambda: func.jvp(torch.compile(loss, backend="eager"), (x, x, x), (x, x, x)),
    ):
        with pytest.raises(NotImplementedError, match=r"tangent.*unpack_dual"):
            tangents()
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=r"a tangent is carried on: .*unpack_dual"):
            ops.fwd(x, x, dual)


def test_autocast():
    """The backward runs outside of it, also where its caller does not."""
    qkv = inputs()
    in_bf16 = gradients_of(lambda *x: loss(*(y.bfloat16() for y in x)), *qkv)
    with torch.autocast("cpu", torch.bfloat16):
        result = loss(*qkv)
        assert_close(torch.autograd.grad(result, qkv), in_bf16)
    expected = gradients_of(loss, *qkv)
    result = loss(*qkv)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(torch.autograd.grad(result, qkv), expected)


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("argument", [None, False, True])
def test_deterministic(argument, mode):
    q, k, v = inputs()
    out, _ = flash_cute.forward(q, k, v, deterministic=argument)
    compiled = torch.compile(
        lambda q, k, v: flash_cute.forward(q, k, v, deterministic=argument)[0], backend="aot_eager"
    )
    torch.use_deterministic_algorithms(mode)
    try:
        for result in (lambda: out, lambda: compiled(q, k, v)):
            result = result()
            with Calls() as calls:
                result.sum().backward()
            expected = mode if argument is None else argument
            assert [x.get("deterministic", False) for x in calls.keywords[ops.bwd]] == [expected]
    finally:
        torch.use_deterministic_algorithms(False)


def test_operations_are_counted():
    qkv = inputs()
    with FlopCounterMode(display=False) as counter:
        result = loss(*qkv)
        forward = counter.get_total_flops()
        result.backward()
    scores = 2 * 4 * 7 * 11
    assert forward == 2 * scores * (8 + 12)
    assert counter.get_total_flops() == forward + 2 * scores * (3 * 8 + 2 * 12)


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints(compiled, monkeypatch):
    """A plain one calls the forward twice; one that saves the op's results, once."""
    runs = []
    attention = cpu_kernels._attention
    monkeypatch.setattr(
        cpu_kernels, "_attention", lambda *x, **y: runs.append(0) or attention(*x, **y)
    )
    qkv = inputs()
    expected = gradients_of(loss, *qkv)

    def saves(context, op, *args, **keywords):
        is_ours = op == torch.ops.flash_cute.fwd.default
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    selective = functools.partial(create_selective_checkpoint_contexts, saves)
    for options, forwards in (({}, 2), ({"context_fn": selective}, 1)):
        torch._dynamo.reset()
        step = functools.partial(checkpoint, loss, use_reentrant=False, **options)
        step = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
        runs.clear()
        assert_close(gradients_of(step, *qkv), expected)
        assert len(runs) == forwards
