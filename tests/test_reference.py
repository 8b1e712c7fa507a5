"""The reference against PyTorch and itself; the tolerance rule; `python -m flash_cute`."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from support import LENGTHS, random_inputs

import flash_cute
from flash_cute import __main__ as command
from flash_cute import ops, plan, reference, tolerance

F64 = torch.float64


@pytest.mark.parametrize("is_causal", [False, True])
def test_formula_is_pytorchs(is_causal):
    q, k, v = random_inputs(2, 4, 50, 16, heads_kv=2, head_dim_v=24, dtype=F64)
    out, lse = reference.attention(q, k, v, is_causal, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    scores = 0.3 * q @ k.repeat_interleave(2, 1).mT
    if is_causal:
        scores += torch.full((50, 50), -math.inf, dtype=F64).triu(1)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("len_q, len_k", LENGTHS)
def test_blockwise_is_the_formula(len_q, len_k, is_causal):
    q, k, v = random_inputs(1, 4, len_q, 16, heads_kv=2, len_k=len_k, head_dim_v=24)
    for scale in (None, 0.0, -0.7):
        out, lse = reference.attention(q, k, v, is_causal, scale)
        block_out, block_lse = reference.attention_blockwise(
            q, k, v, is_causal, scale, dtype=F64, block_n=32
        )
        torch.testing.assert_close(block_out, out, rtol=0, atol=1e-13)
        torch.testing.assert_close(block_lse, lse, rtol=0, atol=1e-13)
        result = tolerance.compare(
            *reference.attention_blockwise(q, k, v, is_causal, scale), q, k, v, is_causal, scale
        )
        assert result.passed, str(result)


BANDS = list(itertools.product((-1, 0, 3, 40), (-1, 0, 5), (-30, 0, 7, 50)))


@pytest.mark.parametrize("len_q, len_k", [(30, 30), (17, 45), (45, 17), (1, 9)])
def test_visible_keys_is_the_band(len_q, len_k):
    for left, right, offset in BANDS:
        begin, end = reference.visible_keys(torch.arange(len_q), len_k, left, right, offset)
        for i, (first, past_last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
            level = i + offset
            seen = [
                j
                for j in range(len_k)
                if (left < 0 or level - left <= j) and (right < 0 or j <= level + right)
            ]
            assert list(range(first, past_last)) == seen
        assert torch.all(begin.diff() >= 0) and torch.all(end.diff() >= 0)


@pytest.mark.parametrize("len_q, len_k", [(30, 30), (17, 45), (45, 17), (1, 9)])
def test_visible_rows_is_the_inverse(len_q, len_k):
    for band in BANDS:
        visible = reference.visible_mask(len_q, len_k, *band)
        begin, end = reference.visible_rows(torch.arange(len_k), len_q, *band)
        rows = torch.arange(len_q)[:, None]
        assert torch.equal((begin <= rows) & (rows < end), visible)
        assert torch.all(begin.diff() >= 0) and torch.all(end.diff() >= 0)
        for keys in (slice(0, 5), slice(5, 8), slice(3, len_k)):  # blocks of keys
            seeing = visible[:, keys].any(1).nonzero().flatten().tolist()
            some = (
                range(int(begin[keys][0]), int(end[keys][-1])) if visible[:, keys].numel() else []
            )
            assert list(some) == seeing


@pytest.mark.parametrize("heads_kv", [1, 2, 6])
@pytest.mark.parametrize("scale", [None, 0.0, -0.7])
@pytest.mark.parametrize("len_q, len_k", [(30, 30), (17, 45), (45, 17), (9, 1), (5, 0)])
def test_blockwise_gradients_are_the_formulas_and_autograds(len_q, len_k, scale, heads_kv):
    sizes = {"heads_kv": heads_kv, "len_k": len_k, "head_dim_v": 5, "dtype": F64}
    qkv = [x.requires_grad_() for x in random_inputs(2, 6, len_q, 8, **sizes)]
    for left, right, offset in BANDS[::5]:
        band = {"window_left": left, "window_right": right, "diagonal_offset": offset}
        out, lse = reference.attention(*qkv, False, scale, **band)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        seen = lse != -math.inf
        loss = (out * dout).sum() + (torch.where(seen, lse, 0.0) * dlse).sum()
        expected = torch.autograd.grad(loss, qkv)
        # Where a row sees no key, dlse does not count, and may be NaN.
        options = {**band, "dlse": dlse.masked_fill(~seen, math.nan), "dtype": F64}
        plain = reference.attention_backward(dout, *qkv, False, scale, **options)
        results = (out.detach(), lse.detach())
        blockwise = reference.attention_backward_blockwise(
            dout, *qkv, *results, False, scale, **options, block_m=8, block_n=16
        )
        for actual in (plain, blockwise):
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("len_q, len_k", [(30, 30), (17, 45), (45, 17)])
def test_blockwise_bands(len_q, len_k):
    q, k, v = random_inputs(1, 2, len_q, 8, len_k=len_k, dtype=F64)
    for left, right, offset in BANDS:
        band = {"window_left": left, "window_right": right, "diagonal_offset": offset}
        out, lse = reference.attention(q, k, v, **band)
        block = reference.attention_blockwise(q, k, v, **band, dtype=F64, block_m=8, block_n=4)
        torch.testing.assert_close(block[0], out, rtol=0, atol=1e-14)
        torch.testing.assert_close(block[1], lse, rtol=0, atol=1e-14)


def test_causal_is_a_band():
    q, k, v = random_inputs(1, 2, 20, 8, len_k=31)
    causal = reference.attention(q, k, v, True)
    band = reference.attention(q, k, v, window_right=0, diagonal_offset=11)
    assert torch.equal(causal[0], band[0]) and torch.equal(causal[1], band[1])
    # Bottom right: the last query sees every key, the first one all but the last 19.
    full = reference.attention(q, k, v)
    torch.testing.assert_close(causal[0][:, :, -1], full[0][:, :, -1])
    first = reference.attention(q[:, :, :1], k[:, :, :12], v[:, :, :12])
    torch.testing.assert_close(causal[0][:, :, :1], first[0])


@pytest.mark.parametrize(
    "dtype, wrong",
    [(torch.float16, 0.02), (torch.bfloat16, 0.2), (torch.float32, 1e-5), (F64, 1e-13)],
)
def test_tolerance_tells_right_from_wrong(dtype, wrong):
    q, k, v = random_inputs(2, 2, 100, 64, dtype=dtype)
    out, lse = flash_cute.forward(q, k, v, True)
    assert tolerance.compare(out, lse, q, k, v, True).passed

    def passes(out, lse):
        return tolerance.compare(out, lse, q, k, v, True).passed

    changed = out.clone()
    changed[1, 1, 50, 3] += wrong
    assert not passes(changed, lse)
    for bad in (math.nan, math.inf):
        changed[1, 1, 50, 3] = bad
        assert not passes(changed, lse)
        other_lse = lse.clone()
        other_lse[1, 0, 99] = bad
        assert not passes(out, other_lse)
    assert not passes(out, lse + 2e-5)
    assert not tolerance.compare(out, lse, q, k, v, False).passed


@pytest.mark.parametrize(
    "dtype, wrong", [(torch.float16, 0.03), (torch.bfloat16, 0.3), (F64, 1e-12)]
)
def test_tolerance_tells_right_gradients_from_wrong(dtype, wrong):
    q, k, v = random_inputs(2, 4, 100, 64, heads_kv=2, dtype=dtype)
    dout, dlse = (torch.randn_like(x) for x in (q, q[..., 0].float()))
    exact = reference.attention_backward(dout, q, k, v, True, dlse=dlse)
    rounded = [x.to(dtype) for x in exact]

    def passes(*gradients, **changes):
        arguments = {
            "dout": dout,
            "q": q,
            "k": k,
            "v": v,
            "is_causal": True,
            "dlse": dlse,
            **changes,
        }
        return tolerance.compare_gradients(gradients, **arguments).passed

    assert passes(*rounded)
    for i in range(3):
        for change in (wrong, math.nan, math.inf):
            changed = [x.clone() for x in rounded]
            changed[i][1, 1, 50, 3] += change
            assert not passes(*changed)
    for change in ({"dlse": None}, {"is_causal": False}, {"softmax_scale": 0.12}, {"dout": None}):
        assert not passes(*rounded, **change)


def test_tolerance_wants_infinities_in_place():
    q, k, v = random_inputs(1, 1, 20, 8, len_k=10)
    out, lse = flash_cute.forward(q, k, v, True)
    assert tolerance.compare(out, lse, q, k, v, True).passed
    for wrong in (math.inf, 0.0, math.nan):
        other = lse.masked_fill(lse == -math.inf, wrong)
        assert not tolerance.compare(out, other, q, k, v, True).passed


def test_command_checks_the_cpu(capsys):
    assert command.main(["--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert flash_cute.__version__ in shown and torch.__version__ in shown
    build = ops.build_info()
    cases = 4 * len([*build["head_dims"], *build["large_head_dims"]]) * 2
    assert shown.count(" pass\n") == cases and f"{cases} of {cases} passed on the CPU" in shown


def test_command_says_what_was_left_out(capsys, monkeypatch):
    build = ops.build_info()
    monkeypatch.setattr(ops, "build_info", lambda: {**build, "left_out": "head dims 32, 64"})
    monkeypatch.setattr(command, "_check", lambda _device: True)
    assert command.main(["check", "--device", "cpu"]) == 0
    assert re.search(r"left out +head dims 32, 64 .*FLASH_CUTE_HEAD_DIMS", capsys.readouterr().out)


@pytest.mark.parametrize("gpu", plan.DEVICES)
def test_command_prints_plans(capsys, gpu):
    head_dim = str(ops.build_info()["head_dims"][0])
    call = ["--H", "32", "--Hkv", "8", "--Nq", "1", "--Nk", "32768", "--D", head_dim, "--causal"]
    assert command.main(["plan", *call, "--gpu", gpu]) == 0
    shown = capsys.readouterr().out
    assert f"Nk 32768, D {head_dim}, Dv {head_dim}, bf16, causal" in shown and f" {gpu}: " in shown
    for line in (r"kernel +sm[89]0 ", r"tile +\d+ queries x \d+ keys", r"split-KV +splits: \d\d"):
        assert re.search(f"^{line}", shown, re.MULTILINE), shown
    assert command.main(["plan", *call, "--gpu", gpu, "--tuning", "arch=80,splits=1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"kernel +sm80 ", shown) and "splits: 1," in shown


def test_plans_show_what_they_do_not_know(monkeypatch, capsys):
    monkeypatch.setattr(ops, "plan", lambda *_: {"arch": "sm90", "ctas": 7, "colour": "red"})
    assert command.main(["plan", "--gpu", "h100"]) == 0
    assert re.search(r"^others +arch sm90, ctas 7, colour red$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    "arguments, refusal",
    [
        (["--D", "0"], "Not served: .*head_dim is 0: it must be 1 to 1024"),
        (["--Hkv", "3"], "Not served: .*heads_q is 32: it must be a multiple"),
        (["--window", "-2", "0"], "Not served: .*window_left is -2"),
        (["--tuning", "splits=99999999999999999999"], "Not served: .*tuning has .splits"),
        (["--tuning", "len_q=1"], "Not served: .*tuning has .len_q"),
        (["--tuning", "parts=2"], "Not served: .*tuning has 'parts"),
    ],
)
def test_command_plans_no_impossible_calls(capsys, arguments, refusal):
    assert command.main(["plan", *arguments]) == 1
    assert re.search(refusal, capsys.readouterr().out)


def test_command_finds_a_wrong_result(capsys, monkeypatch):
    right = flash_cute.forward

    def wrong(q, *args):
        out, lse = right(q, *args)
        return (out + 0.5 if q.shape[3] == 64 else out), lse

    monkeypatch.setattr(flash_cute, "forward", wrong)
    assert command.main(["--device", "cpu"]) == 1
    assert capsys.readouterr().out.count(" FAIL\n") == 8


@pytest.mark.gpu
def test_command_checks_the_gpu(capsys):
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert (
        torch.cuda.get_device_name() in shown and "passed on cuda" in shown and "FAIL" not in shown
    )


@pytest.mark.parametrize("device", ["tpu", "meta", "", "cuda:99"])
def test_command_refuses_other_devices(capsys, device):
    with pytest.raises(SystemExit) as exit_status:
        command.main(["--device", device])
    assert exit_status.value.code == 2 and "--device" in capsys.readouterr().err
