"""flash_cute as a local kernel of Hugging Face's `kernels`."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_cute import __main__, hub

#: transformers 5.23 takes kernels from 0.18.2 on; PyPI had none beyond 0.17.2. So its gate is
#: lowered, before it is asked for the first time.
SCRIPT = """
import inspect, torch
from transformers.utils import import_utils
gate = inspect.unwrap(import_utils.is_kernels_available)
gate.__defaults__ = ("0.17", gate.__defaults__[1])
import transformers
from transformers.integrations import hub_kernels

LENGTH = 17
config = transformers.MistralConfig(
    vocab_size=100, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=2, intermediate_size=96, initializer_range=0.2, sliding_window=5,
)
torch.manual_seed(0)
model = transformers.AutoModel.from_config(config).eval()
ids = torch.randint(3, 90, (2, LENGTH))
is_token = torch.arange(LENGTH) < torch.tensor([[17], [12]])
packed = {"position_ids": (torch.arange(LENGTH) % 7)[None], "use_cache": False}
for inputs, tokens in (
    ({"input_ids": ids}, torch.ones_like(is_token)),
    ({"input_ids": ids, "attention_mask": is_token.long()}, is_token),
    ({"input_ids": ids, "attention_mask": is_token.flip(1).long()}, is_token.flip(1)),
    ({"input_ids": ids[:1], **packed}, torch.ones_like(is_token[:1])),
):
    results = []
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name, allow_all_kernels=True)
        model.zero_grad()
        out = model(**inputs)[0] * tokens[..., None]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), *(x.grad.clone() for x in model.parameters())))
    for x, right in zip(*results):
        torch.testing.assert_close(x, right, rtol=0, atol=1e-4 * float(right.abs().max()))
model.set_attn_implementation(NAME, allow_all_kernels=True)
model.config.attention_dropout = 0.5
for layer in model.layers:
    layer.self_attn.attention_dropout = 0.5
try:
    model.train()(ids)
except NotImplementedError as error:
    assert "dropout_p is 0.5" in str(error)
else:
    raise AssertionError("dropout was dropped")
"""


def test_a_model_of_transformers() -> None:
    pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"LOCAL_KERNELS": hub.local_kernels(), "HF_HUB_OFFLINE": "1"}
    code = f"NAME = {hub.NAME!r}\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_folder(backend: str) -> None:
    folder = hub.FOLDER / "build" / f"torch-{backend}"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["backend"] == {"type": backend} and metadata["name"] == "flash-cute"
    kernel: dict[str, object] = {}
    exec((folder / "__init__.py").read_text(), kernel)
    # What transformers looks for. What it does not find, it drops, and says nothing.
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        parameters = inspect.signature(kernel[name]).parameters  # type: ignore[arg-type]
        needed = {"window_size", "softcap", "learnable_sink", "dropout_p", "deterministic"}
        assert needed <= set(parameters)
    assert "flash_attn_with_kvcache" not in kernel
    assert callable(kernel["flash_attn_interface"]._flash_attn_forward)  # type: ignore[attr-defined]


def test_the_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"other/kernel=/there:{hub.NAME}=/old")
    assert __main__.main(["hub", "kernels-community/flash-attn3"]) == 0
    line = capsys.readouterr().out
    assert line == (
        f'export LOCAL_KERNELS="other/kernel=/there:{hub.NAME}={hub.FOLDER}:'
        f'kernels-community/flash-attn3={hub.FOLDER}"\n'
    )
    assert (Path(hub.FOLDER) / "build").is_dir()
    with pytest.raises(SystemExit):
        __main__.main(["hub", "no name"])
    assert "'no name' is no name of a kernel, as in org/name" in capsys.readouterr().err
