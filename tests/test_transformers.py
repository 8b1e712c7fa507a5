"""examples/transformers_adapter.py, in small models with random weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import ONE_BACKEND_EACH
from torch import Tensor

import flash_cute

transformers = pytest.importorskip("transformers")

from examples import transformers_adapter  # noqa: E402

LENGTH = 17
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128,
}  # fmt: skip
TEXT = {
    **SIZES, "vocab_size": 100, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 2}
TWO_STACKS = {
    "vocab_size": 100, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "max_position_embeddings": 64, "init_std": 0.2,
}  # fmt: skip
CAUSAL = {
    "llama": transformers.LlamaConfig(**DECODER),
    "mistral": transformers.MistralConfig(**DECODER, sliding_window=LENGTH),  # as long as the text
    # A scale that is not 1/sqrt(D).
    "granite": transformers.GraniteConfig(**DECODER, attention_multiplier=1.0),
    # The mask of a window that no layer uses.
    "qwen2_moe": transformers.Qwen2MoeConfig(**DECODER, mlp_only_layers=[0, 1]),
    # Heads of 21.
    "gpt2": transformers.GPT2Config(n_embd=63, n_head=3, n_layer=2, initializer_range=0.2),
    "clip": transformers.CLIPTextConfig(**TEXT),
    # Within and across sequences.
    "bart": transformers.BartConfig(**TWO_STACKS),
    # Decoders with is_causal = False.
    "pegasus_x": transformers.PegasusXConfig(**TWO_STACKS),
    "nllb_moe": transformers.NllbMoeConfig(**TWO_STACKS),
    "bigbird_pegasus": transformers.BigBirdPegasusConfig(**TWO_STACKS),
}
FULL = {
    "vit": transformers.ViTConfig(**SIZES, image_size=32, patch_size=4),
    "bert": transformers.BertConfig(**TEXT),
    # Its modules have is_causal = True.
    "llama, not causal": transformers.LlamaConfig(**DECODER, is_causal=False),
}
#: Calls of flash_cute in a forward, where that is not one for each of two layers. Decoders that
#: attend to an encoder have two a layer; the encoder of PegasusX has an attention of its own.
CALLS = {"bart": 6, "nllb_moe": 6, "pegasus_x": 4}
#: The model, further inputs, and what the adapter says that it does not serve.
OWN = "code that reads its mask"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "padding": (
        CAUSAL["llama"], {"attention_mask": (torch.arange(2 * LENGTH) > 2).view(2, -1)}, "padding",
    ),
    "packed sequences": (
        CAUSAL["llama"], {"position_ids": torch.arange(LENGTH)[None] % 8, "use_cache": False},
        "packed sequences",
    ),
    "lengths": (CAUSAL["llama"], {"cu_seq_lens_q": torch.tensor([0, 5, 17])}, "cu_seq_lens_q"),
    "a tensor": (CAUSAL["llama"], {"attention_mask": torch.zeros(2, 1, 17, 17)}, "masks that are"),
    "a window": (transformers.MistralConfig(**DECODER, sliding_window=16), {}, "sequences longer"),
    "soft-capping": (transformers.Gemma2Config(**DECODER, head_dim=16), {}, "softcap"),
    "sinks": (
        transformers.GptOssConfig(
            **DECODER, head_dim=16, num_local_experts=2, num_experts_per_tok=1
        ), {}, "s_aux",
    ),
    "position biases": (
        transformers.Wav2Vec2ConformerConfig(
            **SIZES, conv_dim=[8], conv_kernel=[4], conv_stride=[4], num_feat_extract_layers=1,
            num_conv_pos_embedding_groups=4, position_embeddings_type="relative",
        ), {}, "position_bias",
    ),
    "git": (transformers.GitConfig(**TEXT, vision_config={**SIZES, "image_size": 32}), {}, OWN),
    "bloom": (transformers.BloomConfig(hidden_size=64, n_head=4, n_layer=2), {}, OWN),
    "bigbird_pegasus": (transformers.BigBirdPegasusConfig(**TWO_STACKS), {}, OWN),  # its encoder
    "nllb_moe": (  # its router
        transformers.NllbMoeConfig(**TWO_STACKS, num_experts=2, decoder_sparse_step=2), {}, OWN,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def register() -> None:
    transformers_adapter.register()


def make_model(
    config: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, auto: str = "AutoModel"
) -> Any:
    torch.manual_seed(0)
    auto = "AutoModelForCausalLM" if config is CAUSAL["bigbird_pegasus"] else auto
    config = copy.deepcopy(config)
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager")
    return model.to(device, dtype).eval()


def make_inputs(model: Any, changed: slice | None = None) -> dict[str, Tensor]:
    """The same for every model of a kind, but for tokens that are `changed`."""
    generator = torch.Generator().manual_seed(1)
    name = model.main_input_name
    if name != "input_ids":
        shape = (2, 3, 32, 32) if name == "pixel_values" else (2, 80)
        return {name: torch.randn(shape, generator=generator).to(model.device, model.dtype)}
    ids = torch.randint(3, 90, (2, LENGTH), generator=generator).to(model.device)
    tokens = ids.clone()
    if changed is not None:
        tokens[:, changed] += 1
    has_two_stacks = hasattr(model, "encoder") and hasattr(model, "decoder")
    return {"input_ids": ids, "decoder_input_ids": tokens} if has_two_stacks else {name: tokens}


class Expected:
    """A model's output with transformers' own attention, in its dtype and in fp64."""

    def __init__(self, model: Any, inputs: dict[str, Tensor]) -> None:
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
@pytest.mark.parametrize("name", [*CAUSAL, *FULL])
@pytest.mark.parametrize("device, dtype", ONE_BACKEND_EACH)
def test_models(device, dtype, name, monkeypatch):
    model = make_model({**CAUSAL, **FULL}[name], device, dtype)
    inputs = make_inputs(model)
    expected = Expected(model, inputs)
    model.set_attn_implementation("cute_fa")
    calls = []
    forward = flash_cute.forward
    monkeypatch.setattr(flash_cute, "forward", lambda *args: calls.append(args) or forward(*args))
    out = model(**inputs)[0]
    expected.check(out)
    assert len(calls) == CALLS.get(name, 2)
    if name in CAUSAL:
        moved = (model(**make_inputs(model, slice(5, 9)))[0] - out).abs().amax((0, 2))
        assert moved[:5].max() < 1e-5 and moved[5:].min() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("device, dtype", ONE_BACKEND_EACH)
def test_generation_with_a_cache(device, dtype):
    """Queries against the keys of those before: a chunk of them, then one after another."""
    model = make_model(CAUSAL["llama"], device, dtype, "AutoModelForCausalLM")
    prompt = make_inputs(model)["input_ids"]
    generate: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(prompt, **generate)
    expected = Expected(model, {"input_ids": tokens})
    model.set_attn_implementation("cute_fa")
    for cache in (None, transformers.StaticCache(config=model.config, max_cache_len=64)):
        for start, end in ((0, 10), (10, 18), (18, 19), (19, 20)):
            output = model(tokens[:, start:end], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            expected.check(output.logits, slice(start, end))
    if dtype == torch.float32:  # in which no two tokens are as likely
        assert torch.equal(model.generate(prompt, **generate), tokens)
    with pytest.raises(ValueError, match=OWN):
        model.generate(prompt, cache_implementation="static", **generate)


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused(name):
    config, inputs, what = REFUSED[name]
    model = make_model(config)
    # As from_config does; set_attn_implementation leaves BLOOM as it is.
    model.config._attn_implementation = "cute_fa"
    with pytest.raises(ValueError, match=f"cute_fa does not serve {what}.*: use"):
        model(**{**make_inputs(model), **inputs})


@torch.no_grad()
def test_dropout_is_refused():
    model = make_model(CAUSAL["bart"]).train()
    model.set_attn_implementation("cute_fa")
    model(**make_inputs(model))  # has none by default
    for module in model.modules():
        if type(module).__name__ == "BartAttention":
            module.dropout = 0.1
    with pytest.raises(ValueError, match="cute_fa does not serve dropout"):
        model(**make_inputs(model))
