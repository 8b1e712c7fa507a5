"""The functions of flash_attn's packages: flash_cute/flash_attn/ and flash_attn_interface.py."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import DEVICES
from torch import Tensor

import flash_cute
from flash_cute import flash_attn as fa2
from flash_cute import flash_attn_interface as fa3
from flash_cute.flash_attn import bert_padding
from flash_cute.flash_attn import flash_attn_interface as fa2_private

QKV, LENGTHS = "q k v ", "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
FA2 = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
DESCALE = "q_descale k_descale v_descale "
FA3 = f"softmax_scale causal qv {DESCALE}window_size attention_chunk softcap num_splits pack_gqa "
WINDOW = "window_size_left window_size_right softcap alibi_slopes "
GRADIENTS = f"dout {QKV}out softmax_lse dq dk dv "
#: What each function's parameters begin with.
SIGNATURES: list[tuple[Any, str, str]] = [
    (fa2, "flash_attn_func", f"{QKV}{FA2}return_attn_probs"),
    (fa2, "flash_attn_kvpacked_func", f"q kv {FA2}return_attn_probs"),
    (fa2, "flash_attn_qkvpacked_func", f"qkv {FA2}return_attn_probs"),
    (fa2, "flash_attn_varlen_func", f"{QKV}{LENGTHS}{FA2}return_attn_probs block_table"),
    (fa2, "flash_attn_varlen_kvpacked_func", f"q kv {LENGTHS}{FA2}return_attn_probs"),
    (fa2, "flash_attn_varlen_qkvpacked_func", f"qkv cu_seqlens max_seqlen {FA2}return_attn_probs"),
    (
        fa2, "flash_attn_with_kvcache",
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
        "num_splits return_softmax_lse",
    ),
    (
        fa2_private, "_flash_attn_forward",
        f"{QKV}dropout_p softmax_scale causal {WINDOW}return_softmax",
    ),
    (
        fa2_private, "_flash_attn_varlen_forward",
        f"{QKV}{LENGTHS}dropout_p softmax_scale causal {WINDOW}return_softmax block_table "
        "leftpad_k seqused_k zero_tensors",
    ),
    (
        fa2_private, "_flash_attn_backward",
        f"{GRADIENTS}dropout_p softmax_scale causal {WINDOW}deterministic rng_state",
    ),
    (
        fa2_private, "_wrapped_flash_attn_varlen_backward",
        f"{GRADIENTS}{LENGTHS}dropout_p softmax_scale causal {WINDOW}deterministic rng_state "
        "zero_tensors",
    ),
    (fa3, "flash_attn_func", f"{QKV}{FA3}deterministic sm_margin return_attn_probs"),
    (
        fa3, "flash_attn_varlen_func",
        f"{QKV}{LENGTHS}seqused_q seqused_k {FA3}deterministic sm_margin return_attn_probs",
    ),
    (
        fa3, "flash_attn_qkvpacked_func",
        f"qkv softmax_scale causal {DESCALE}window_size attention_chunk softcap deterministic "
        "num_heads_q sm_margin return_attn_probs",
    ),
    (
        fa3, "flash_attn_with_kvcache",
        "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens "
        f"{DESCALE}softmax_scale causal window_size attention_chunk softcap rotary_interleaved "
        "scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse",
    ),
    (fa3, "flash_attn_combine", "out_partial lse_partial out out_dtype"),
    (
        fa3, "_flash_attn_backward",
        f"dout {QKV}out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q "
        "max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right softcap "
        "deterministic sm_margin",
    ),
]  # fmt: skip
#: Options of a call, by flash_attn's names.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"window_size": (5, 2)},
    "open window": {"window_size": (-1, 3), "deterministic": True},
    "softcap": {"softcap": 2.0, "causal": True},
}


@pytest.mark.parametrize("module, name, names", SIGNATURES)
def test_signatures(module: Any, name: str, names: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters
    expected = names.split()
    assert list(parameters)[: len(expected)] == expected
    # transformers reads from the names what a function can do.
    assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters.values())


def tensors(device: str, *shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.float16
    made = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return [x.requires_grad_() for x in made]


def ours(options: dict[str, Any]) -> dict[str, Any]:
    """The same options by flash_cute's names."""
    names = {"causal": "is_causal"}
    return {names.get(name, name): x for name, x in options.items()}


def check(
    results: tuple[Any, ...], expected: tuple[Tensor, Tensor], *inputs: Tensor, probs: int = 0
) -> None:
    """The same bits, and the same gradients of `inputs`; `probs` results are None."""
    out, lse, *nothing = results
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert nothing == [None] * probs
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    gradients, right = (
        torch.autograd.grad(x, inputs, dout, retain_graph=True) for x in (out, expected[0])
    )
    for dx, expected_dx in zip(gradients, right, strict=True):
        torch.testing.assert_close(dx, expected_dx, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_dense(device: str, name: str) -> None:
    options = OPTIONS[name]
    q, k, v = tensors(device, (2, 20, 4, 24), (2, 33, 2, 24), (2, 33, 2, 24))
    out, lse = flash_cute.forward(*(x.transpose(1, 2) for x in (q, k, v)), **ours(options))
    right = (out.transpose(1, 2), lse)
    kv = torch.stack([k, v], 2)
    check(fa2.flash_attn_func(q, k, v, **options, return_attn_probs=True), right, q, k, v, probs=1)
    results = fa2.flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True)
    check(results, right, q, k, v, probs=1)
    check(fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True), right, q, k, v)
    assert torch.equal(fa2.flash_attn_func(q, k, v, **options), right[0])
    assert torch.equal(fa3.flash_attn_func(q, k, v, **options), right[0])

    if name == "window":  # as a tensor, too
        sides = {"window_size": torch.tensor(options["window_size"])}
        assert torch.equal(fa2.flash_attn_func(q, k, v, **sides), right[0])

    qkv = tensors(device, (2, 20, 3, 4, 24))[0]
    right = fa3.flash_attn_func(*qkv.unbind(2), **options, return_attn_probs=True)
    results = fa2.flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True)
    check(results, right, qkv, probs=1)
    check(fa3.flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True), right, qkv)
    grouped = qkv.flatten(2, 3)[:, :, :8]
    right = fa3.flash_attn_func(*grouped.split([4, 2, 2], 2), **options, return_attn_probs=True)
    more = {"num_heads_q": 4, "return_attn_probs": True, **options}
    check(fa3.flash_attn_qkvpacked_func(grouped, **more), right, qkv)


@pytest.mark.parametrize("device", DEVICES)
def test_slopes_and_sinks(device: str) -> None:
    q, k, v, slopes, sink = tensors(device, *((1, 9, 4, 16),) * 3, (4,), (4,))
    slopes = slopes.detach().float().abs()
    extras = {"learnable_sink": sink, "alibi_slopes": slopes}
    for name, extra in extras.items():
        extra = {name: extra}
        results = fa2.flash_attn_func(q, k, v, **extra, return_attn_probs=True)
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flash_cute.forward(*inputs, **extra)
        check(results, (out.transpose(1, 2), lse), q, k, v, probs=1)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_packed(device: str, name: str) -> None:
    options = OPTIONS[name]
    q, k, v = tensors(device, (30, 4, 24), (40, 4, 24), (40, 4, 24))
    begins = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 7, 30], [0, 20, 40])]
    lengths = (*begins, 23, 20)
    right = flash_cute.forward_varlen(q, k, v, *begins, **ours(options))
    more = {**options, "return_attn_probs": True}
    check(fa2.flash_attn_varlen_func(q, k, v, *lengths, **more), right, q, k, v, probs=1)
    check(fa3.flash_attn_varlen_func(q, k, v, *lengths, **more), right, q, k, v)
    kv = torch.stack([k, v], 1)
    check(fa2.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **more), right, q, k, v, probs=1)
    qkv = tensors(device, (30, 3, 4, 24))[0]
    right = flash_cute.forward_varlen(*qkv.unbind(1), begins[0], **ours(options))
    check(fa2.flash_attn_varlen_qkvpacked_func(qkv, begins[0], 23, **more), right, qkv, probs=1)
    used = torch.tensor([5, 9], dtype=torch.int32, device=device)
    right = flash_cute.forward_varlen(q, k, v, *begins, seqused_k=used, **ours(options))
    check(fa3.flash_attn_varlen_func(q, k, v, *lengths, None, used, **more), right, q, k, v)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_cache(module: Any, device: str) -> None:
    """Two sequences of a cache of three, in another order, with 6 and 9 tokens, the first two of
    one of them padding; 3 tokens are appended."""
    q, k_new, v_new, keys, values = tensors(
        device, (2, 3, 4, 16), *((2, 3, 2, 16),) * 2, *((3, 14, 2, 16),) * 2
    )
    k_cache, v_cache = keys.clone(), values.clone()
    lengths, rows = torch.tensor([6, 9], device=device).int(), torch.tensor([2, 0], device=device)
    out, lse = module.flash_attn_with_kvcache(
        q, k_cache, v_cache, k_new, v_new, cache_seqlens=lengths, cache_batch_idx=rows,
        cache_leftpad=torch.tensor([2, 0], device=device).int(), causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    for i, (row, start, length) in enumerate([(2, 2, 6), (0, 0, 9)]):
        keys[row, length : length + 3], values[row, length : length + 3] = k_new[i], v_new[i]
        seen = (x[row : row + 1, start : length + 3].transpose(1, 2) for x in (keys, values))
        alone = flash_cute.forward(q[i : i + 1].transpose(1, 2), *seen, is_causal=True)
        tolerance = {"rtol": 1e-3, "atol": 1e-5 if device == "cpu" else 2e-3}
        torch.testing.assert_close(out[i : i + 1].transpose(1, 2), alone[0], **tolerance)
        torch.testing.assert_close(lse[i : i + 1], alone[1], **tolerance)
    assert torch.equal(k_cache, keys) and torch.equal(v_cache, values)
    # An int, and all of the cache.
    short = module.flash_attn_with_kvcache(q, keys[:2], values[:2], cache_seqlens=9)
    expected = module.flash_attn_with_kvcache(q, keys[:2, :9], values[:2, :9])
    torch.testing.assert_close(short, expected, **tolerance)
    with torch.enable_grad():  # steps of a loop make no graph
        short = module.flash_attn_with_kvcache(
            q, k_cache[:2], v_cache[:2], k_new, v_new, cache_seqlens=9
        )
    assert not short.requires_grad and k_cache.grad_fn is None
    k_cache, v_cache = keys.clone(), values.clone()
    # What is wrong is refused before it writes.
    right = {"q": q, "k_cache": k_cache[:2], "v_cache": v_cache[:2], "k": k_new, "v": v_new}
    for wrong, match in (
        ({"v": None}, "of k and v one is None"),
        ({}, "cache_seqlens is None"),
        ({"cache_seqlens": lengths.float()}, "cache_seqlens is float32: .* int32"),
        ({"cache_seqlens": 12}, "cache_seqlens is 12: it must be 0 to 11"),
        ({"cache_seqlens": 15, "k": None, "v": None}, "cache_seqlens is 15: it must be 0 to 14"),
        ({"cache_seqlens": torch.tensor([3, 12])}, r"cache_seqlens\[1\] is 12: it must be 0 to 11"),
        ({"cache_seqlens": 9, "q": q[:, :, :3]}, "q has 3 heads and k_cache and v_cache have 2"),
        ({"cache_seqlens": 9, "softmax_scale": math.nan}, "softmax_scale is a float .nan."),
        ({"cache_seqlens": 9, "cache_leftpad": lengths.float()}, "cache_leftpad is float32"),
        ({"cache_seqlens": 9, "cache_batch_idx": rows[:1]}, r"cache_batch_idx has shape \(1,\)"),
        ({"cache_seqlens": 9, "v_cache": v_cache[:2, 1:]}, r"v_cache has shape \(2, 13, 2, 16\)"),
        ({"cache_seqlens": True}, "cache_seqlens is True"),
        ({"k_cache": keys, "v_cache": values}, "k_cache has 3 sequences and q has 2"),
        ({"cache_seqlens": 9, "v": v_new.double()}, "v is float64 on .* as v_cache"),
        ({"cache_seqlens": 9, "k": k_new[:, :, :1]}, r"k has shape \(2, 3, 1, 16\)"),
        (
            {"cache_seqlens": 9, "v_cache": v_cache[:1].expand(2, -1, -1, -1)},
            "v_cache has strides .*: its elements must not overlap",
        ),
        ({"cache_seqlens": 9, "v": k_cache[:2, 8:11]}, "k_cache shares memory with v: it must not"),
        ({"q": q[0]}, r"q has shape \(3, 4, 16\): it must be \(B, N, H, D\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            module.flash_attn_with_kvcache(**right | wrong)
    assert torch.equal(k_cache, keys) and torch.equal(v_cache, values)


def test_packed_queries_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_CUTE_CHECK", "1")
    sizes = (2, 3, 4, 16), *((2, 8, 2, 16),) * 2, *((2, 3, 2, 16),) * 2
    q, keys, values, *new = tensors("cpu", *sizes)
    begins = torch.tensor([0, 3, 6]).int()

    def call(q: Tensor, **options: Any) -> Any:
        caches = keys.clone(), values.clone()
        return fa3.flash_attn_with_kvcache(q, *caches, *new, causal=True, **options)

    packed = {"q": q.flatten(0, 1), "cu_seqlens_q": begins}
    assert torch.equal(call(**packed, cache_seqlens=4), call(q, cache_seqlens=4).flatten(0, 1))
    for wrong, match in (
        ({"cu_seqlens_q": begins[:2]}, "k_cache has 2 sequences and q has 1"),
        ({"cache_leftpad": torch.ones(2)}, "cache_leftpad is float32"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            call(**packed | wrong, cache_seqlens=4)


def test_compile() -> None:
    q, k, v = tensors("cpu", *((2, 20, 4, 16),) * 3)
    begins, lengths = torch.tensor([0, 5, 40]).int(), torch.tensor([3, 4]).int()

    def calls(q: Tensor, k: Tensor, v: Tensor, *caches: Tensor) -> list[Any]:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        new = (x[:, :2] for x in (k, v))
        return [
            fa2.flash_attn_func(q, k, v, causal=True, window_size=(4, 0), softcap=2.0),
            fa3.flash_attn_varlen_func(*packed, begins, begins, 35, 35, causal=True),
            fa2.flash_attn_with_kvcache(q[:, :2], *caches, *new, cache_seqlens=lengths),
        ]

    compiled = torch.compile(calls, backend="aot_eager", fullgraph=True)
    cache = torch.zeros(2, 9, 4, 16)
    results = [f(q, k, v, cache.clone(), cache.clone()) for f in (compiled, calls)]
    for x, right in zip(*results, strict=True):
        torch.testing.assert_close(x, right)


@torch.no_grad()
@pytest.mark.parametrize("is_packed", [False, True])
def test_compiled_caches_are_written_once_all_is_checked(is_packed: bool) -> None:
    q, *new, keys, values = tensors(
        "cpu", (2, 3, 3, 16), *((2, 3, 2, 16),) * 2, *((2, 9, 2, 16),) * 2
    )
    caches = [keys.clone(), values.clone()]
    call: dict[str, Any] = {"cache_seqlens": torch.tensor([3, 4]).int()}
    if is_packed:
        q, call["cu_seqlens_q"] = q.flatten(0, 1), torch.tensor([0, 3, 6]).int()
    compiled = torch.compile(fa3.flash_attn_with_kvcache, backend="eager")
    with pytest.raises(ValueError, match="q has 3 heads and k_cache and v_cache have 2"):
        compiled(q, *caches, *new, **call)
    assert torch.equal(caches[0], keys) and torch.equal(caches[1], values)


@pytest.mark.parametrize(
    "call, option, match",
    [
        (fa2.flash_attn_func, {"dropout_p": 0.1}, "dropout_p is 0.1: flash_cute has no dropout"),
        (fa3.flash_attn_func, {"qv": torch.ones(1)}, r"qv is a tensor of shape \(1,\)"),
        (fa3.flash_attn_func, {"attention_chunk": 8}, "attention_chunk is 8"),
        (fa3.flash_attn_func, {"k_descale": torch.ones(1)}, "k_descale is a tensor"),
        (fa2.flash_attn_with_kvcache, {"block_table": torch.ones(1, 1)}, "paged caches"),
        (fa3.flash_attn_with_kvcache, {"page_table": torch.ones(1, 1)}, "paged caches"),
        (fa2.flash_attn_with_kvcache, {"rotary_cos": torch.ones(1, 1)}, "rotate q and k before"),
        (fa3.flash_attn_with_kvcache, {"cu_seqlens_k_new": torch.ones(1)}, "cu_seqlens_k_new"),
        (
            functools.partial(fa3._flash_attn_backward, *torch.ones(2, 1, 8, 2, 16)),
            {"softmax_lse": torch.ones(1, 2, 8), "cu_seqlens_k": torch.tensor([0, 4, 8]).int()},
            "cu_seqlens_k is a tensor",
        ),
    ],
)
def test_what_is_not_served_raises(
    call: Callable[..., Any], option: dict[str, Any], match: str
) -> None:
    with pytest.raises(NotImplementedError, match=match):
        call(*torch.ones(3, 1, 8, 2, 16), **option)


@pytest.mark.parametrize(
    "call, arguments, error, match",
    [
        (fa2.flash_attn_func, [torch.ones(8, 2, 16)] * 3, ValueError, r"q has .*\(B, N, H, D\)"),
        (fa3.flash_attn_func, [None] * 3, TypeError, "q is a NoneType .*torch.Tensor"),
        (fa2.flash_attn_qkvpacked_func, [torch.ones(1, 8, 2, 2, 16)], ValueError, r"\(B, N, 3, H"),
        (
            fa2.flash_attn_func, [torch.ones(1, 8, 2, 16), *torch.ones(2, 2, 8, 2, 16)],
            ValueError, r"k has batch size 2 \(shape \(2, 8, 2, 16\)\)",
        ),
        (
            fa2.flash_attn_with_kvcache, [torch.ones(1, 8, 3, 16), *torch.ones(2, 1, 8, 2, 16)],
            ValueError, r"q has 3 heads and k_cache and v_cache have 2",
        ),
        (
            fa2.flash_attn_func, [*torch.ones(3, 1, 8, 2, 16), 0.0, None, 1],
            TypeError, r"^causal is an int \(1\): it must be True or False",
        ),
        (
            fa3.flash_attn_func, [*torch.ones(3, 1, 8, 2, 16), None, False, *[None] * 4, 3],
            TypeError, r"window_size is an int \(3\): it must be a pair",
        ),
        (
            fa2.flash_attn_func,
            [*torch.ones(3, 1, 8, 2, 16), 0.0, None, False, (torch.ones(3), -1)],
            TypeError, "window_size is a tuple .*: each side must be an int",
        ),
        (
            fa2.flash_attn_func,
            [*torch.ones(3, 1, 8, 2, 16), 0.0, None, False, (-1, -1), torch.ones(3)],
            TypeError, "softcap is a torch.Tensor .*: it must be a float",
        ),
        (
            fa2.flash_attn_func,
            [*torch.ones(3, 1, 8, 2, 16), 0.0, None, False, (-1, -1), 0.0, None, torch.ones(3)],
            TypeError, "deterministic is a torch.Tensor .*: it must be True, False",
        ),
        (
            fa2.flash_attn_func,
            [*torch.ones(3, 1, 8, 2, 16), 0.0, None, False, (-1, -1), 0.0, None, "no"],
            TypeError, r"deterministic is a str \('no'\): it must be True, False",
        ),
        (
            fa2.flash_attn_func, [*torch.ones(3, 1, 8, 2, 16), 0.0, None, False, (True, False)],
            TypeError, "window_size is a tuple .*: each side must be an int",
        ),
        (
            fa2.flash_attn_with_kvcache,
            [*torch.ones(3, 1, 8, 2, 16), None, None, None, None, 10**30],
            ValueError, r"cache_seqlens is 10+: it must be 0 to 8",
        ),
        (
            fa3.flash_attn_combine, [torch.ones(2, 1, 8, 2, 16), torch.ones(2, 1, 2, 8)],
            ValueError, r"lse_partial has shape \(2, 1, 2, 8\): it must be \(2, 1, 8, 2\)",
        ),
        (
            fa3.flash_attn_combine,
            [torch.ones(2, 1, 8, 2, 16), torch.ones(2, 1, 8, 2), None, "fp16"],
            TypeError, "out_dtype is a str .*: it must be a torch.dtype",
        ),
        (  # which would be broadcast
            fa2_private._flash_attn_backward,
            [*torch.ones(5, 1, 8, 2, 16), torch.ones(1, 2, 8), torch.ones(2, 8, 2, 16), None, None,
             0.0, None, False],
            ValueError, r"dq has shape \(2, 8, 2, 16\): it must be \(1, 8, 2, 16\)",
        ),
        (
            fa2_private._flash_attn_backward,
            [torch.ones(1, 3, 2, 16), *torch.ones(4, 1, 8, 2, 16), torch.ones(1, 2, 8), *[None] * 3,
             0.0, None, False],
            ValueError, r"dout has shape \(1, 3, 2, 16\): it must be \(1, 8, 2, 16\)",
        ),
        (
            fa2_private._flash_attn_backward,
            [*torch.ones(5, 1, 8, 2, 16), torch.ones(1, 2, 8), *[None] * 3, 0.0, "x", False],
            TypeError, r"softmax_scale is a str \('x'\)",
        ),
        (
            fa3._flash_attn_backward, [*torch.ones(5, 1, 8, 2, 16), None],
            TypeError, "softmax_lse is a NoneType",
        ),
        (
            fa2_private._flash_attn_varlen_backward,
            [*torch.ones(5, 8, 2, 16), torch.ones(2, 8), *[None] * 3, None, None, 8, 8, 0.0, None,
             False],
            TypeError, "cu_seqlens_q is a NoneType",
        ),
        (
            fa2_private._flash_attn_varlen_backward,
            [*torch.ones(5, 8, 2, 16), torch.ones(2, 8), *[None] * 3, torch.ones(2), None, 8, 8,
             0.0, None, False],
            TypeError, "cu_seqlens_q is float32: it must be an int32 or int64 tensor",
        ),
        (
            fa3._flash_attn_forward,
            [*torch.ones(3, 2, 8, 2, 16), None, None, None, torch.ones(2, 2, 8, 16)],
            ValueError, r"out_ has shape \(2, 2, 8, 16\): it must be \(2, 8, 2, 16\)",
        ),
    ],
)  # fmt: skip
def test_refusals_name_what_was_given(
    call: Callable[..., Any], arguments: list[Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        call(*arguments)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize(
    "call, name, count",
    [
        (fa2.flash_attn_func, "q", 3),
        (fa2.flash_attn_qkvpacked_func, "qkv", 1),
        (fa2.flash_attn_kvpacked_func, "kv", 2),
        (fa2.flash_attn_with_kvcache, "q", 3),
        (fa3.flash_attn_func, "q", 3),
    ],
)
def test_nested_tensors_are_refused_by_name(
    call: Callable[..., Any], name: str, count: int, layout: torch.layout
) -> None:
    nested = torch.nested.nested_tensor([torch.ones(n, 3, 2, 16) for n in (3, 5)], layout=layout)
    with pytest.raises(TypeError, match=f"^{name} is a nested tensor: it must be dense"):
        call(*[nested] * count)


@pytest.mark.parametrize("device", DEVICES)
def test_head_dims_of_v(device: str) -> None:
    """FlashAttention-3 has them, FlashAttention-2 does not."""
    q, k, v = tensors(device, (1, 9, 4, 16), (1, 9, 2, 16), (1, 9, 2, 24))
    out, lse = flash_cute.forward(*(x.transpose(1, 2) for x in (q, k, v)))
    right = out.transpose(1, 2), lse
    check(fa3.flash_attn_func(q, k, v, return_attn_probs=True), right, q, k, v)
    begins = torch.tensor([0, 4, 9], device=device, dtype=torch.int32)
    packed = (*(x[0] for x in (q, k, v)), begins, begins, 5, 5)
    assert fa3.flash_attn_varlen_func(*packed).shape == (9, 4, 24)
    for call, arguments in (
        (fa2.flash_attn_func, (q, k, v)),
        (fa2.flash_attn_varlen_func, packed),
        (fa2.flash_attn_with_kvcache, (q, k, v)),
        (fa2_private._flash_attn_forward, (q, k, v, 0.0, None, False)),
    ):
        with pytest.raises(ValueError, match=r"v has head dim 24 and q has 16: .*must be equal"):
            call(*arguments)


def test_padding() -> None:
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    tokens, indices, begins, longest, used = bert_padding.unpad_input(x, mask)
    assert begins.tolist() == [0, 3, 3, 7] and longest == 4 and used.tolist() == [3, 0, 4]
    assert begins.dtype == used.dtype == torch.int32
    assert torch.equal(tokens, x[mask.bool()])
    assert torch.equal(tokens, bert_padding.index_first_axis(x.flatten(0, 1), indices))
    padded = bert_padding.pad_input(tokens, indices, 3, 5)
    assert torch.equal(padded, x * mask[:, :, None, None])
    assert torch.equal(torch.autograd.grad(padded.sum(), x)[0], mask[:, :, None, None].expand_as(x))
    assert bert_padding.unpad_input(x, mask, 1 - mask)[2].tolist() == [0, 5, 10, 15]
    # By the names that FlashAttention's classes have.
    rows = x.flatten(0, 1)
    taken, residual = bert_padding.IndexFirstAxisResidual.apply(rows, indices)
    assert torch.equal(taken, bert_padding.IndexFirstAxis.apply(rows, indices))
    put = bert_padding.IndexPutFirstAxis.apply(taken, indices, 15)
    assert torch.equal(put.view_as(x), padded) and torch.equal(residual, rows)
    gradient = torch.autograd.grad(put.sum() + residual.sum(), x)[0]
    assert torch.equal(gradient, 1 + mask[:, :, None, None].expand_as(x))


@pytest.mark.parametrize(
    "rows",
    [[[2, 3], [], [6], [1, 1, 1]], [[0, 4, 0, 1], [2]], [[], []]],
    ids=["plain", "gaps", "none"],
)
def test_padding_behind_concatenated_sequences(rows: list[list[int]]) -> None:
    x = torch.randn(len(rows), 6, 2, 4, requires_grad=True)
    given = torch.zeros(len(rows), 6, dtype=torch.int64)
    tokens, indices, begins = [], [], [0]
    for row, lengths in enumerate(rows):
        given[row, : len(lengths)] = torch.tensor(lengths)
        column = 0
        for length in filter(None, lengths):
            for _ in range(length):
                tokens.append(x[row, column])
                indices.append(6 * row + column)
                column += 1
            begins.append(begins[-1] + length)
    unpad = bert_padding.unpad_input_for_concatenated_sequences
    packed, found, cu_seqlens, longest = unpad(x, given)
    assert packed.shape == (len(tokens), 2, 4) and found.tolist() == indices
    assert all(map(torch.equal, packed, tokens))
    assert cu_seqlens.tolist() == begins and cu_seqlens.dtype == torch.int32
    assert longest == max(map(max, filter(None, rows)), default=0)
    padded = bert_padding.pad_input(packed, found, len(rows), 6)
    kept = torch.zeros(6 * len(rows), 1, 1).index_fill(0, found, 1).view(-1, 6, 1, 1)
    assert torch.equal(padded, x * kept)
    assert torch.equal(torch.autograd.grad(padded.sum(), x)[0], kept.expand_as(x))
    with pytest.raises(ValueError, match="longer than hidden_states' 6 tokens"):
        unpad(x[:1], torch.tensor([[4, 4, 0, 0, 0, 0]]))


@pytest.mark.parametrize("device", DEVICES)
def test_combine(device: str) -> None:
    shape, dtype = (2, 9, 3, 16), torch.bfloat16
    q, *splits = (x.detach() for x in tensors(device, *[shape] * 7))
    parts = [fa3.flash_attn_func(q, k, v, return_attn_probs=True)
             for k, v in zip(splits[::2], splits[1::2], strict=True)]  # fmt: skip
    outs = torch.stack([out.float() for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    keys, values = torch.cat(splits[::2], 1), torch.cat(splits[1::2], 1)
    out, lse = fa3.flash_attn_func(q, keys, values, return_attn_probs=True)

    space = torch.empty(shape, dtype=dtype, device=device)
    combined, combined_lse = fa3.flash_attn_combine(outs, lses, space, dtype)
    assert combined is space
    torch.testing.assert_close(combined, out.to(dtype), rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(combined_lse, lse.transpose(1, 2), rtol=1e-3, atol=1e-5)
    assert fa3.flash_attn_combine(outs, lses)[0].dtype == torch.float32
    with pytest.raises(ValueError, match="out has shape, dtype and device"):
        fa3.flash_attn_combine(outs, lses, space)
    with pytest.raises(ValueError, match=r"out has strides .*must not overlap"):
        fa3.flash_attn_combine(outs, lses, space[:1].expand(shape), dtype)
    assert fa3.get_scheduler_metadata(2, 9, 27, 3, 3, 16, None) is None


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("module", [fa2_private, fa3], ids=["fa2", "fa3"])
def test_blocks_of_a_ring(module: Any, is_packed: bool, device: str) -> None:
    """As ring attention calls: each block of keys alone, then the blocks' gradients by the results
    of all keys."""
    shape = (12, 2, 16) if is_packed else (1, 12, 2, 16)
    q, k, v, dout = tensors(device, *(shape,) * 4)
    with torch.enable_grad():
        results = fa2.flash_attn_func(*(x.view(1, 12, 2, 16) for x in (q, k, v)), 0.0, None, False,
                                      return_attn_probs=True)  # fmt: skip
        out, lse = results[0].view_as(q), results[1][0] if is_packed else results[1]
        expected = torch.autograd.grad(out, (q, k, v), dout)
    call: dict[str, Any] = {"softmax_scale": None}
    if is_packed:
        begins, ends = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (12, 6))
        call |= {"cu_seqlens_q": begins, "cu_seqlens_k": ends}
        call |= {"max_seqlen_q": 12, "max_seqlen_k": 6}
    kind = "_varlen" if is_packed and module is fa2_private else ""
    if module is fa2_private:
        call |= {"dropout_p": 0.0, "causal": False}
    forward = getattr(module, f"_flash_attn{kind}_forward")
    backward = getattr(module, f"_flash_attn{kind}_backward")
    parts, gradients = [], []
    for keys, values in zip(k.split(6, -3), v.split(6, -3), strict=True):
        *part, nothing, no_state = forward(q, keys, values, **call)
        assert nothing is no_state is None
        parts.append(part)
        into = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", keys), ("dv", values))}
        backward(dout, q, keys, values, out, lse, **into, **call)
        gradients.append(tuple(into.values()))
    dq, dk, dv = zip(*gradients, strict=True)
    tolerance = {"rtol": 1e-3, "atol": 1e-5 if device == "cpu" else 4e-3}
    for dx, right in zip((sum(dq), torch.cat(dk, -3), torch.cat(dv, -3)), expected, strict=True):
        torch.testing.assert_close(dx, right, **tolerance)
    outs = [x if is_packed else x.transpose(1, 2) for x, _ in parts]
    merged, merged_lse = flash_cute.merge(outs, [x for _, x in parts])
    torch.testing.assert_close(merged if is_packed else merged.transpose(1, 2), out, **tolerance)
    torch.testing.assert_close(merged_lse, lse, **tolerance)
