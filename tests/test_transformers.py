"""The README's recipe for Hugging Face's transformers, in small models with random weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support import ONE_BACKEND_EACH

import flash_cute

transformers = pytest.importorskip("transformers")

README = Path(__file__).parent.parent / "README.md"
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
#: Grouped heads under causal masks, with a window too; none, with heads of 16 and 21; all three
#: kinds of attention, across sequences too.
MODELS = {
    "llama": transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=128, vocab_size=100
    ),
    "mistral": transformers.MistralConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=128, vocab_size=100, sliding_window=8
    ),
    "gpt2": transformers.GPT2Config(n_embd=63, n_head=3, n_layer=2, vocab_size=100),
    "vit": transformers.ViTConfig(**SIZES, intermediate_size=128, image_size=32, patch_size=4),
    "bart": transformers.BartConfig(
        vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
    ),
}  # fmt: skip


def use_recipe(model: transformers.PreTrainedModel) -> None:
    """What the README says, word for word."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (recipe,) = (block for block in blocks if "AttentionInterface" in block)
    exec(recipe, {"flash_cute": flash_cute, "model": model})


def make_model(name: str, device: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(MODELS[name], attn_implementation="eager")
    return model.to(device, dtype).eval()


def make_inputs(name: str, device: str, dtype: torch.dtype, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    if name == "vit":
        pixels = torch.randn(2, 3, 32, 32, device=device, generator=generator)
        return {"pixel_values": pixels.to(dtype)}
    return {"input_ids": torch.randint(3, 100, (2, length), device=device, generator=generator)}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device, dtype", ONE_BACKEND_EACH)
def test_models(device, dtype, name, monkeypatch):
    model = make_model(name, device, dtype)
    inputs = make_inputs(name, device, dtype, length=7)
    expected = model(**inputs)[0]
    use_recipe(model)
    calls = []
    forward = flash_cute.forward
    monkeypatch.setattr(flash_cute, "forward", lambda *args: calls.append(args) or forward(*args))
    out = model(**inputs)[0]
    torch.testing.assert_close(out, expected, atol=16 * torch.finfo(dtype).eps, rtol=0)
    assert len(calls) == (6 if name == "bart" else 2)  # its decoder's layers attend twice


@torch.no_grad()
@pytest.mark.parametrize("device, dtype", ONE_BACKEND_EACH)
def test_generation_with_a_cache(device, dtype):
    """One query after another, against keys of the ones before."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(MODELS["llama"]).to(device, dtype).eval()
    prompt = make_inputs("llama", device, dtype, length=7)["input_ids"]
    tokens = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    use_recipe(model)
    cache = model(prompt, use_cache=True).past_key_values
    for i in range(prompt.shape[1], tokens.shape[1]):
        step = model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
        whole = model(tokens[:, : i + 1]).logits[:, -1:]
        torch.testing.assert_close(step.logits, whole, atol=16 * torch.finfo(dtype).eps, rtol=0)
    if dtype == torch.float32:  # in which no two tokens are as likely
        again = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(again, tokens)


@torch.no_grad()
@pytest.mark.parametrize("name, inputs", [
    ("llama", {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])}),
    ("mistral", {"input_ids": torch.arange(2 * 20).view(2, 20)}),  # longer than the window
])  # fmt: skip
def test_masks_are_refused(name, inputs):
    model = make_model(name, "cpu", torch.float32)
    use_recipe(model)
    with pytest.raises(ValueError, match="takes no masks: no padding, no sliding window"):
        model(**{**make_inputs(name, "cpu", torch.float32, length=7), **inputs})
