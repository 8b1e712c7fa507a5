"""examples/transformer_block.py. (test_transformers.py has the adapter.)"""

from __future__ import annotations

import pytest
import torch
from support import DEVICES

import flash_cute
from examples import transformer_block


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
