"""What `forward` refuses: before anything runs, and in words that name the argument, what it was
and what is allowed.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import pytest
import torch
from support import ALL_KERNELS, DEVICES, check, random_inputs, run

import flash_cute
from flash_cute import checks, cpu_kernels, ops, reference, tolerance


def inputs(device="cpu", **changes):
    """Valid arguments of `forward` but for the changes: values, or functions of the valid one."""
    q, k, v = random_inputs(2, 4, 8, 16, heads_kv=2, dtype=torch.float16, device=device)
    arguments = {"q": q, "k": k, "v": v, "is_causal": False, "softmax_scale": None}
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return arguments


def sized(*sizes):
    return lambda x: x.new_zeros(1).expand(sizes)


def nested(x):
    return torch.nested.nested_tensor(
        [torch.zeros(4, 3, 8), torch.zeros(4, 5, 8)], layout=torch.jagged
    )


def everything(change):
    return {"q": change, "k": change, "v": change}


REFUSALS = {
    "q is no tensor": ({"q": [1.0]}, TypeError, "q is a list: .* torch.Tensor"),
    "k is None": ({"k": None}, TypeError, "k is a NoneType: .* torch.Tensor"),
    "v is a number": ({"v": 1.0}, TypeError, "v is a float: .* torch.Tensor"),
    "q is sparse": (
        {"q": lambda q: q.to_sparse()},
        TypeError,
        "q is a sparse_coo tensor: .* dense",
    ),
    "v is sparse": (
        {"v": lambda v: v.to_sparse()},
        TypeError,
        "v is a sparse_coo tensor: .* dense",
    ),
    "k is nested": ({"k": nested}, TypeError, "k is a nested tensor: .* dense"),
    "q has 3 dims": (
        {"q": lambda q: q[0]},
        ValueError,
        r"q has shape \(4, 8, 16\): .* 4 dimensions",
    ),
    "k has 5 dims": (
        {"k": lambda k: k[None]},
        ValueError,
        r"k has shape \(1, 2, 2, 8, 16\): .* 4 dimensions",
    ),
    "v has 2 dims": (
        {"v": lambda v: v[0, 0]},
        ValueError,
        r"v has shape \(8, 16\): .* 4 dimensions",
    ),
    "dtypes q, k": ({"k": lambda k: k.bfloat16()}, TypeError, "k is bfloat16 and q is float16"),
    "dtypes q, v": ({"v": lambda v: v.float()}, TypeError, "v is float32 and q is float16"),
    "integers": (everything(lambda x: x.int()), TypeError, "q is int32 .*float16"),
    "complex": (everything(lambda x: x.to(torch.complex64)), TypeError, "q is complex64 .*float16"),
    "fp8": (
        everything(lambda x: x.to(torch.float8_e4m3fn)),
        TypeError,
        "q is float8_e4m3fn .*float16",
    ),
    "k elsewhere": ({"k": lambda k: k.to("meta")}, ValueError, "k is on meta and q on "),
    "v elsewhere": ({"v": lambda v: v.to("meta")}, ValueError, "v is on meta and q on "),
    "head dim 0": (everything(lambda x: x[..., :0]), ValueError, "q has head dim 0 .* 1 to 1024"),
    "head dim 1025": (
        everything(sized(1, 1, 1, 1025)),
        ValueError,
        "q has head dim 1025 .* 1 to 1024",
    ),
    "head dims q, k": ({"k": lambda k: k[..., :8]}, ValueError, "k has head dim 8 .* q has 16"),
    "v's head dim 0": (
        {"v": lambda v: v[..., :0]},
        ValueError,
        "v has head dim 0 .* 1 to 1024",
    ),
    "v's head dim 1025": (
        {"v": sized(2, 2, 8, 1025)},
        ValueError,
        "v has head dim 1025 .* 1 to 1024",
    ),
    "batch q, k": ({"k": lambda k: k[:1]}, ValueError, "k has batch size 1 .* q has 2"),
    "batch q, v": ({"v": lambda v: v[:1]}, ValueError, "v has batch size 1 .* q has 2"),
    "batch 1 for 2": ({"q": lambda q: q[:1]}, ValueError, "k has batch size 2 .* q has 1"),
    "heads k, v": ({"v": lambda v: v[:, :1]}, ValueError, "v has number of heads 1 .* k has 2"),
    "lengths k, v": ({"v": lambda v: v[:, :, :5]}, ValueError, "v has length 5 .* k has 8"),
    "heads no multiple": (
        {"q": lambda q: q[:, :3]},
        ValueError,
        "q has 3 heads and k and v have 2: .* multiple",
    ),
    "no heads in k": (
        {n: lambda x: x[:, :0] for n in "kv"},
        ValueError,
        "q has 4 heads and k and v have 0",
    ),
    "long q": (
        {"q": sized(2, 4, checks.MAX_LENGTH + 1, 16)},
        ValueError,
        f"q has length {checks.MAX_LENGTH + 1}: .* at most {checks.MAX_LENGTH}",
    ),
    "long k": (
        {n: sized(2, 2, checks.MAX_LENGTH + 1, 16) for n in "kv"},
        ValueError,
        f"k has length {checks.MAX_LENGTH + 1}: .* at most",
    ),
    "is_causal 1": ({"is_causal": 1}, TypeError, r"is_causal is an int \(1\): .* True or False"),
    "is_causal None": ({"is_causal": None}, TypeError, "is_causal is a NoneType .*True or False"),
    "is_causal tensor": (
        {"is_causal": torch.tensor(True)},
        TypeError,
        "is_causal is a torch.Tensor",
    ),
    "scale NaN": (
        {"softmax_scale": math.nan},
        ValueError,
        r"softmax_scale is a float \(nan\): .* finite",
    ),
    "scale inf": (
        {"softmax_scale": math.inf},
        ValueError,
        r"softmax_scale is a float \(inf\): .* finite",
    ),
    "scale -inf": (
        {"softmax_scale": -math.inf},
        ValueError,
        r"softmax_scale is a float \(-inf\): .* finite",
    ),
    "scale 10^400": ({"softmax_scale": 10**400}, ValueError, "softmax_scale is an int: .* finite"),
    "scale True": (
        {"softmax_scale": True},
        TypeError,
        r"softmax_scale is a bool \(True\): .* float",
    ),
    "scale tensor": (
        {"softmax_scale": torch.tensor(1.0)},
        TypeError,
        "softmax_scale is a torch.Tensor .* float",
    ),
    "scale text": ({"softmax_scale": "1"}, TypeError, "softmax_scale is a str .* float"),
    "arch 90": ({"arch": 90}, TypeError, r"arch is an int \(90\): .*'sm80', 'sm90' or None"),
    "arch tensor": ({"arch": torch.tensor(90)}, TypeError, "arch is a torch.Tensor.*'sm80'"),
    "arch sm75": ({"arch": "sm75"}, ValueError, "arch is 'sm75': .*'sm80', 'sm90' or None"),
    "arch empty": ({"arch": ""}, ValueError, "arch is '': .*'sm80', 'sm90' or None"),
    "arch and q": ({"q": None, "arch": 90}, TypeError, "q is a NoneType"),
    "deterministic 1": (
        {"deterministic": 1},
        TypeError,
        r"deterministic is an int \(1\): .* True, False, or None",
    ),
}


@pytest.fixture
def nothing_runs(monkeypatch):
    """Lets no kernel of the CPU run. A GPU's op checks what memory safety needs first of all."""

    def fail(*_args, **_keywords):
        raise AssertionError("a kernel runs")

    monkeypatch.setattr(cpu_kernels, "_attention", fail)
    monkeypatch.setattr(reference, "attention_blockwise", fail)


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("device", DEVICES)
def test_refusal(nothing_runs, device, case):
    changes, error, message = REFUSALS[case]
    with pytest.raises(error, match=message) as raised:
        flash_cute.forward(**inputs(device, **changes))
    assert "\n" not in str(raised.value)


def test_valid_arguments_reach_a_kernel(nothing_runs):
    """So the tests above fail if `inputs` is not valid by itself."""
    with pytest.raises(AssertionError, match="a kernel runs"):
        flash_cute.forward(**inputs())


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_arch_on_the_cpu(nothing_runs, arch):
    with pytest.raises(ValueError, match=f"arch is '{arch}' and q is on cpu: it must be None"):
        flash_cute.forward(**inputs(arch=arch))


@pytest.mark.gpu
def test_fp64_on_a_gpu(nothing_runs):
    with pytest.raises(
        TypeError, match=r"q is float64 on cuda:0: .* bfloat16 or float32; cast it, or use torch.nn"
    ):
        flash_cute.forward(**inputs("cuda", **everything(lambda x: x.double())))


@pytest.mark.gpu
def test_cpu_and_gpu(nothing_runs):
    with pytest.raises(ValueError, match="k is on cpu and q on cuda:0"):
        flash_cute.forward(**inputs("cuda", k=lambda k: k.cpu()))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_forward_mode_is_refused(nothing_runs, name):
    arguments = inputs(**everything(lambda x: x.float()))
    x = arguments[name]

    def forward(x):
        return flash_cute.forward(**{**arguments, name: x})[0]

    message = f"{name} carries a forward-mode tangent"
    for differentiate in (
        lambda: torch.func.jvp(forward, (x,), (x,)),
        lambda: torch.func.jacfwd(forward)(x),
    ):
        with pytest.raises(NotImplementedError, match=message):
            differentiate()
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=rf"{message}.*unpack_dual"):
            forward(dual)


def test_gradients_beside_modes_and_subclasses_are_kept():
    arguments = inputs(**everything(lambda x: x.float()))
    weight = torch.ones((), requires_grad=True)

    class Weighted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return tuple(weight * x for x in result) if function is ops.fwd else result

    class WeightedTensor(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            result = super().__torch_function__(function, types, args, kwargs)
            return tuple(weight * x for x in result) if function is ops.fwd else result

    with Weighted():
        by_mode = flash_cute.forward(**arguments)
    by_class = flash_cute.forward(**arguments | {"q": arguments["q"].as_subclass(WeightedTensor)})
    for out, lse in (by_mode, by_class):
        assert out.requires_grad and lse.requires_grad
        (gradient,) = torch.autograd.grad(out.sum(), weight)
        torch.testing.assert_close(
            gradient.as_subclass(torch.Tensor), flash_cute.forward(**arguments)[0].sum()
        )


def test_other_tensors_may_be_differentiated():
    arguments = inputs(**everything(lambda x: x.float()))
    y = torch.ones(2, 4, 8, 16)
    _, tangent = torch.func.jvp(lambda y: y * flash_cute.forward(**arguments)[0], (y,), (y,))
    assert torch.equal(tangent, flash_cute.forward(**arguments)[0])


def test_vmap_among_forward_mode_tangents():
    arguments = inputs(**everything(lambda x: x.float()))
    stacked = arguments["q"].expand(3, -1, -1, -1, -1)
    y = torch.ones(())

    def mapped(q):
        return torch.vmap(lambda q: flash_cute.forward(**arguments | {"q": q})[0])(q)

    _, tangent = torch.func.jvp(lambda y: y * mapped(stacked), (y,), (y,))
    torch.testing.assert_close(tangent, mapped(stacked))
    with pytest.raises(NotImplementedError, match="has no"):
        torch.func.jvp(mapped, (stacked,), (stacked,))


def test_meta_tensors_give_shapes():
    arguments = inputs(
        **everything(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2).to("meta"))
    )
    out, lse = flash_cute.forward(**arguments)
    assert out.device.type == lse.device.type == "meta"
    assert (
        out.shape == (2, 4, 8, 16)
        and out.stride() == arguments["q"].stride()
        and out.dtype == torch.float16
    )
    assert lse.shape == (2, 4, 8) and lse.dtype == torch.float32


@pytest.mark.parametrize("device, dtype", [p for p in ALL_KERNELS if torch.float64 not in p.values])
def test_huge_scores(device, dtype):
    """A row of one key has its value, and the score as LSE."""
    size = 60000.0 if dtype == torch.float16 else 133120.0
    x = torch.full((1, 1, 1, 64), size, dtype=dtype, device=device)
    out, lse = run(x, x, x)
    assert torch.equal(out, x)
    assert lse.item() == pytest.approx(x[0, 0, 0, 0].item() ** 2 * 64 / 8, rel=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("device, dtype", [p for p in ALL_KERNELS if torch.bfloat16 in p.values])
def test_scores_near_the_end_of_fp32(device, dtype, is_causal):
    """Products of 2.5e38 and more. Scaled by less than 2e-38 they are ordinary scores."""
    q, k, v = random_inputs(2, 2, 70, 64, len_k=130, dtype=dtype, device=device)
    q, k = (2.0e18 * (1 + 0.05 * x.tanh()) for x in (q, k))
    assert 2.5e38 < (q.double() @ k.double().mT).max() < 3.4e38
    check(q, k, v, is_causal, 1e-38)


@pytest.mark.parametrize("device", DEVICES)
def test_masks_of_the_op_are_aligned_to_the_bottom_right(device):
    """As all that takes them: the op, its transforms, the reference and the tolerance."""
    q, k, v = random_inputs(2, 2, 33, 64, len_k=50, dtype=torch.float16, device=device)
    expected = flash_cute.forward(q, k, v, True)
    stacked = [x[None] for x in (q, k, v)]
    op = functools.partial(ops.fwd, window_right=0)
    for out, lse in (
        op(q, k, v),
        ops.fwd(q, k, v, window_right=0, diagonal_offset=50 - 33),
        [x[0] for x in torch.vmap(op)(*stacked)],
        torch.compile(op, backend="aot_eager", fullgraph=True)(q, k, v),
    ):
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for formula in (reference.attention, reference.attention_blockwise):
        for a, b in zip(formula(q, k, v, window_right=0), formula(q, k, v, True), strict=True):
            assert torch.equal(a, b)
    assert tolerance.compare(*expected, q, k, v, window_right=0).passed


def test_no_heads_at_all():
    q, k, v = (torch.empty(2, 0, length, 16) for length in (8, 9, 9))
    out, lse = flash_cute.forward(q, k, v, True)
    assert out.shape == q.shape and lse.shape == (2, 0, 8)


@pytest.mark.parametrize(
    "batch, length, head_dim_v", [(2, 8, 24), (2, 8, 1), (2, 0, 24), (0, 8, 24)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_strides_where_v_has_its_own_head_dim(device, batch, length, head_dim_v):
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (
        torch.zeros(batch, n, 2, columns, dtype=dtype, device=device).transpose(1, 2)
        for n, columns in ((length, 16), (9, 16), (9, head_dim_v))
    )
    out, _ = flash_cute.forward(q, k, v)
    assert out.stride(-1) == 1
    assert out.stride() == flash_cute.forward(*(x.to("meta") for x in (q, k, v)))[0].stride()
    assert flash_cute.forward(q, k, v, out=out)[0] is out


@pytest.mark.filterwarnings("error")
def test_other_numbers_are_scales():
    numpy = pytest.importorskip("numpy")
    arguments = inputs(**everything(lambda x: x.float()))
    expected = flash_cute.forward(**{**arguments, "softmax_scale": 2.0})[0]
    for number in (int, Fraction, numpy.float64, numpy.float32, numpy.float16, numpy.int8):
        out = flash_cute.forward(**{**arguments, "softmax_scale": number(2)})[0]
        assert torch.equal(out, expected), number
    for number in (numpy.float32("inf"), numpy.float16("nan"), Fraction(10) ** 400):
        with pytest.raises(ValueError, match=r"softmax_scale is a .* finite"):
            flash_cute.forward(**{**arguments, "softmax_scale": number})
