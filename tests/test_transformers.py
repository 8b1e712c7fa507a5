"""The README's recipe for Hugging Face's transformers, in small models with random weights."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ONE_BACKEND_EACH
from torch import Tensor

import flash_cute

transformers = pytest.importorskip("transformers")

README = Path(__file__).parent.parent / "README.md"
VOCABULARY = 100
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128,
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.2}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "llama": transformers.LlamaConfig(**DECODER),
    "mistral": transformers.MistralConfig(**DECODER, sliding_window=8),
    # A scale that is not 1/sqrt(D).
    "granite": transformers.GraniteConfig(**DECODER, **SPECIAL_TOKENS, attention_multiplier=1.0),
    # Heads of 21.
    "gpt2": transformers.GPT2Config(n_embd=63, n_head=3, n_layer=2, vocab_size=VOCABULARY),
    # No causal mask; one that the call alone knows of.
    "vit": transformers.ViTConfig(**SIZES, image_size=32, patch_size=4),
    "clip": transformers.CLIPTextConfig(**SIZES, **SPECIAL_TOKENS, vocab_size=VOCABULARY),
    # Within and across sequences.
    "bart": transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    ),
    # What the recipe has to refuse: soft-capping, sinks, biases.
    "gemma2": transformers.Gemma2Config(**DECODER, head_dim=16),
    "gpt_oss": transformers.GptOssConfig(**DECODER, **MOE, head_dim=16),
    "conformer": transformers.Wav2Vec2ConformerConfig(
        **SIZES, conv_dim=[8], conv_kernel=[4], conv_stride=[4], num_feat_extract_layers=1,
        num_conv_pos_embedding_groups=4, position_embeddings_type="relative",
    ),
}  # fmt: skip
SERVED = ["llama", "mistral", "granite", "gpt2", "vit", "clip", "bart"]


def use_recipe(model: transformers.PreTrainedModel) -> None:
    """What the README says, word for word."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (recipe,) = (block for block in blocks if "AttentionInterface" in block)
    exec(recipe, {"flash_cute": flash_cute, "model": model})


def make_model(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(CONFIGS[name], attn_implementation="eager")
    return model.to(device, dtype).eval()


def make_inputs(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    if name == "vit":
        pixels = torch.randn(2, 3, 32, 32, device=device, generator=generator)
        return {"pixel_values": pixels.to(dtype)}
    if name == "conformer":
        return {"input_values": torch.randn(2, 80, device=device, generator=generator).to(dtype)}
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 7), device=device, generator=generator)}


class Expected:
    """A model's output with transformers' own attention, in its dtype and in fp64."""

    def __init__(self, model: transformers.PreTrainedModel, inputs: dict[str, Tensor]) -> None:
        in_fp64 = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        self.eager = model(**inputs)[0]
        self.exact = copy.deepcopy(model).double()(**in_fp64)[0]

    def check(self, out: Tensor, rows: slice = slice(None)) -> None:
        """Not much farther from fp64 than transformers' own."""
        error = (out - self.exact[:, rows]).abs().max()
        eager_error = (self.eager - self.exact).abs().max()
        rounding = 4 * torch.finfo(out.dtype).eps * self.exact.abs().max()
        assert error <= 2 * eager_error + rounding


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("device, dtype", ONE_BACKEND_EACH)
def test_models(device, dtype, name, monkeypatch):
    model = make_model(name, device, dtype)
    inputs = make_inputs(name, device, dtype)
    expected = Expected(model, inputs)
    use_recipe(model)
    calls = []
    forward = flash_cute.forward
    monkeypatch.setattr(flash_cute, "forward", lambda *args: calls.append(args) or forward(*args))
    expected.check(model(**inputs)[0])
    assert len(calls) == (6 if name == "bart" else 2)  # its decoder's layers attend twice


@torch.no_grad()
@pytest.mark.parametrize("device, dtype", ONE_BACKEND_EACH)
def test_generation_with_a_cache(device, dtype):
    """One query after another, against keys of the ones before."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS["llama"], attn_implementation="eager"
    )
    model = model.to(device, dtype).eval()
    prompt = make_inputs("llama", device, dtype)["input_ids"]
    generate: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(prompt, **generate)
    expected = Expected(model, {"input_ids": tokens})
    use_recipe(model)
    cache = model(prompt, use_cache=True).past_key_values
    for i in range(prompt.shape[1], tokens.shape[1]):
        step = slice(i, i + 1)
        output = model(tokens[:, step], past_key_values=cache, use_cache=True)
        expected.check(output.logits, step)
    if dtype == torch.float32:  # in which no two tokens are as likely
        assert torch.equal(model.generate(prompt, **generate), tokens)


@torch.no_grad()
def test_a_static_cache_that_is_not_full():
    model, inputs = make_model("llama"), make_inputs("llama")
    expected = Expected(model, inputs)
    use_recipe(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    expected.check(model(**inputs, past_key_values=cache)[0])


PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
REFUSED = {
    "padding": ("llama", {"attention_mask": PADDING}),
    "a window": ("mistral", {"input_ids": torch.arange(2 * 20).view(2, 20)}),
    "soft-capping": ("gemma2", {}),
    "sinks": ("gpt_oss", {}),
    "position biases": ("conformer", {}),
}


@torch.no_grad()
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused(what):
    name, changes = REFUSED[what]
    model = make_model(name)
    use_recipe(model)
    with pytest.raises(ValueError, match="flash_cute takes no masks or dropout, nor any of"):
        model(**{**make_inputs(name), **changes})


@torch.no_grad()
def test_dropout_is_refused():
    model = make_model("bart").train()
    use_recipe(model)
    model(**make_inputs("bart"))  # has none by default
    for module in model.modules():
        if type(module).__name__ == "BartAttention":
            module.dropout = 0.1
    with pytest.raises(ValueError, match="flash_cute takes no masks or dropout"):
        model(**make_inputs("bart"))
