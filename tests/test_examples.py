"""The files of examples/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICES

import flash_cute
from examples import dit_block, transformer_block


@pytest.mark.parametrize("device", DEVICES)
def test_transformer_block(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--device {device} --B 2 --N 65 --H 3 --D 24 --dtype fp16"
    assert transformer_block.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert printed.count("right") == 3 and ("peak MiB" in printed) == (device == "cuda")


def test_transformer_block_copies_nothing_around_attention() -> None:
    block = transformer_block.TransformerBlock(3, 16).to(torch.bfloat16)
    with torch.no_grad():
        q, k, v = block.project(torch.randn(2, 10, 48, dtype=torch.bfloat16))
        out = block.attention(q, k, v)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert out.transpose(1, 2).is_contiguous()


def test_transformer_block_fails_on_a_wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = flash_cute.forward

    def wrong(*args: torch.Tensor, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(*args, **options)
        return out * 1.1, lse

    monkeypatch.setattr(flash_cute, "forward", wrong)
    assert transformer_block.main(["--device", "cpu", "--H", "2", "--D", "16"]) == 1


TINY = "--steps 30 --length 32 --batch 4 --layers 2 --heads 2 --width 32 --lr 3e-3"


def trained(folder: Path, device: str, *words: str) -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    from examples import train_gpt

    curve, results = folder / "deep" / "loss.png", folder / "results.json"
    argv = ["--device", device, *TINY.split(), *words, "--out", str(curve), "--json", str(results)]
    assert train_gpt.main(argv) == 0
    assert curve.read_bytes().startswith(b"\x89PNG")
    return dict(json.loads(results.read_text()))


@pytest.mark.parametrize("device", DEVICES)
def test_train_gpt(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = trained(tmp_path, device)
    printed = capsys.readouterr().out
    assert "tokens a second, peak memory" in printed and "loss on held-out text" in printed
    assert ours["attention"] == "flash_cute" and len(ours["losses"]) == 30
    # A guess among 256 bytes has a loss of log 256 = 5.5.
    assert 5.4 < ours["losses"][0] < 5.8
    assert ours["losses"][-1] < 5 and ours["held_out_loss"] < 5
    for attention in ("math", "sdpa"):
        theirs = trained(tmp_path, device, "--attention", attention)
        assert theirs["losses"] == pytest.approx(ours["losses"], abs=0.002)
        assert theirs["held_out_loss"] == pytest.approx(ours["held_out_loss"], abs=0.002)
    other = trained(tmp_path, device, "--seed", "1")
    assert other["losses"] != pytest.approx(ours["losses"], abs=0.002)


@pytest.mark.parametrize("device", DEVICES)
def test_train_gpt_on_packed_documents(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = trained(tmp_path, device, "--pack")
    padded = packed["padded"]
    assert capsys.readouterr().out.count("tokens a second, peak memory") == 2
    assert packed["losses"] == pytest.approx(padded["losses"], abs=0.002)
    assert packed["held_out_loss"] == pytest.approx(padded["held_out_loss"], abs=0.002)
    assert packed["losses"][-1] < 5 and padded["tokens_per_second"] > 0

    # Documents that see each other train otherwise.
    forward = flash_cute.forward_varlen
    monkeypatch.setattr(
        flash_cute, "forward_varlen", lambda q, k, v, ends, **x: forward(q, k, v, ends[::4], **x)
    )
    mixed = trained(tmp_path, device, "--pack")
    assert mixed["padded"]["losses"] == pytest.approx(padded["losses"], abs=0.002)
    assert mixed["losses"] != pytest.approx(padded["losses"], abs=0.002)


def test_train_gpt_ends_on_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: torch.Tensor, *_: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, None]:
        return q * torch.nan, None

    monkeypatch.setattr(flash_cute, "forward", wrong)
    with pytest.raises(SystemExit, match="the loss of step 0 is nan"):
        trained(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 3", "--width 32 is no multiple of --heads 3"),
        ("--width 2050", "a head dim is at most 1024"),
        ("--batch 0", "--batch: 0 is not positive"),
        ("--steps 1", "at least 2"),
        ("--lr nan", "--lr nan is not positive"),
        ("--attention fast", "invalid choice: 'fast'"),
        ("--attention sdpa --pack", "--pack takes flash_cute's attention, not sdpa's"),
    ],
)
def test_train_gpt_refuses(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        trained(tmp_path, "cpu", *words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
def test_masks(device: str, tmp_path: Path) -> None:
    """Calls see what the reference says; the picture's legends are right."""
    pytest.importorskip("matplotlib")
    from examples import masks

    for call in masks.CALLS:
        given = dict(call.arguments)
        left, right = given.get("window_size", (-1, -1))
        used, start = given.get("seqused_k", call.keys), given.get("key_start", 0)
        visible = flash_cute.reference.visible_mask(
            call.queries, call.keys, left, 0 if "is_causal" in given else right,
            used - call.queries,
        )  # fmt: skip
        keys = torch.arange(call.keys)
        visible &= (start <= keys) & (keys < used)
        assert torch.equal(masks.seen(call, device, torch.float16).cpu(), visible)
    assert masks.main(["--out", str(tmp_path / "masks.png")]) == 0
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [[], ["--pack"]], ids=["padded", "packed"])
def test_finetune(words: list[str], device: str) -> None:
    pytest.importorskip("transformers")
    from examples import finetune

    words = [*words, "--device", device, "--steps", "8", "--batch", "4", "--longest", "150"]
    try:
        ours = finetune.main(words)
    finally:
        flash_cute.unregister()
    theirs = finetune.main([*words, "--attention", "sdpa"])
    flash_cute.unregister()
    assert ours == pytest.approx(theirs, abs=1e-4 if device == "cpu" else 0.02)
    assert 5.4 < ours[0] < 5.8 and ours[-1] < ours[0] - 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_dit_block(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dit_block.main(device) == 0
    assert "right" in capsys.readouterr().out
    torch.manual_seed(0)
    block, plain = dit_block.DiTBlock(2, 16), dit_block.PlainDiTBlock(2, 16)
    plain.load_state_dict(block.state_dict())
    inputs = torch.randn(2, 7, 32), torch.randn(2, 9, 32), torch.randn(2, 32)
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    for each in (block, plain):
        text, image = each(*inputs, lengths)
        (text[:, :3].square().sum() + image.square().sum()).backward()
    for x, right in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x.grad, right.grad, rtol=1e-3, atol=1e-3)


def test_ring_attention() -> None:
    """Two processes, on two GPUs if there are."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "examples.ring_attention"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes" in done.stdout and "output and gradients are right" in done.stdout
