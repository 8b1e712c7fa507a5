"""flash_cute as a local kernel of Hugging Face's `kernels`, in transformers and diffusers."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_cute
from flash_cute import __main__, hub

#: transformers 5.23 takes kernels from 0.18.2 on, 5.17 below 0.17; PyPI had none beyond 0.17.2. So
#: the gate is opened to it, before it is asked for the first time.
SCRIPT = """
import inspect, torch
from transformers.utils import import_utils
gate = inspect.unwrap(import_utils.is_kernels_available)
gate.__defaults__ = ("0.16", "0.19")
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
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(**inputs)[0] * tokens[..., None]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), *(x.grad.clone() for x in model.parameters())))
    for x, right in zip(*results):
        torch.testing.assert_close(x, right, rtol=0, atol=1e-4 * float(right.abs().max()))
model.set_attn_implementation(NAME)
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


@pytest.fixture
def flux() -> Any:
    """A small DiT of diffusers', and its inputs."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=24,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 20, 4), "encoder_hidden_states": torch.randn(2, 7, 24),
        "pooled_projections": torch.randn(2, 24), "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.rand(20, 3) * 9, "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip
    return model, inputs


def run(model: Any, inputs: dict[str, Tensor], backend: str) -> list[Tensor]:
    """The output, and the gradients."""
    model.set_attention_backend(backend)
    model.zero_grad()
    out = model(**inputs).sample
    out.float().square().sum().backward()
    return [out.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


@pytest.mark.parametrize("backend", ["flash_hub", "flash_varlen_hub", "_flash_3_hub"])
def test_diffusers(flux: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kernels")
    from diffusers.models import attention_dispatch

    names = {f"kernels-community/flash-attn{version[-1]}": version for version in hub.FOLDERS}
    monkeypatch.setenv("LOCAL_KERNELS", hub.local_kernels(names))
    monkeypatch.setattr(attention_dispatch, "HF_HUB_OFFLINE", True)
    calls = []
    for name in ("forward", "forward_varlen"):
        function = getattr(flash_cute, name)
        monkeypatch.setattr(
            flash_cute, name, lambda *args, f=function, **kw: calls.append(f) or f(*args, **kw)
        )
    expected = run(*flux, "native")
    assert not calls
    results = run(*flux, backend)
    assert len(calls) == 2
    for x, right in zip(results, expected, strict=True):
        torch.testing.assert_close(x, right, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:PyTorch takes cuDNN")
def test_diffusers_by_sdpa(flux: Any) -> None:
    model, inputs = flux
    model = model.to("cuda", torch.bfloat16)
    inputs = {name: x.to("cuda", torch.bfloat16) for name, x in inputs.items()}
    expected = run(model, inputs, "_native_flash")
    flash_cute.register(torch=True)
    try:
        results = run(model, inputs, "_native_flash")
    finally:
        flash_cute.unregister(torch=True)
    for x, right in zip(results, expected, strict=True):
        torch.testing.assert_close(x, right, rtol=0, atol=3e-2 * float(right.abs().max()))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("version", hub.FOLDERS)
def test_the_folders(version: str, backend: str) -> None:
    folder = hub.FOLDERS[version] / "build" / f"torch-{backend}"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["backend"] == {"type": backend}
    assert metadata["id"] == f"flash_cute_{version}_{backend}"
    kernel: dict[str, Any] = {}
    exec((folder / "__init__.py").read_text(), kernel)
    assert callable(kernel["flash_attn_interface"]._flash_attn_forward)
    if version == "fa2":
        # What transformers looks for. What it does not find, it drops, and says nothing.
        needed = {"window_size", "softcap", "learnable_sink", "dropout_p", "deterministic"}
        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            assert needed <= set(inspect.signature(kernel[name]).parameters)
        assert "flash_attn_with_kvcache" not in kernel


def test_the_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"other/kernel=/there:{hub.NAME}=/old")
    assert __main__.main(["hub", "--fa3", "kernels-community/flash-attn3"]) == 0
    assert capsys.readouterr().out == (
        f'export LOCAL_KERNELS="other/kernel=/there:{hub.NAME}={hub.FOLDERS["fa2"]}:'
        f'kernels-community/flash-attn3={hub.FOLDERS["fa3"]}"\n'
    )
    with pytest.raises(SystemExit):
        __main__.main(["hub", "--fa2", "no name"])
    assert "'no name' is no name of a kernel, as in org/name" in capsys.readouterr().err
