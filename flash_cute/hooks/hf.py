"""flash_cute in Hugging Face's transformers: the attention "cute_fa", and its mask.

transformers makes a mask once per forward, for all layers alike. Ours has no elements. It says what
each query sees, and it alone decides that: modules say `is_causal` wrongly where they rely on their
mask. A model that reads the elements is refused: ahead of its layers if it tells transformers
that it needs them, or else when it reads. A mask that is a tensor, as some models make, is added to
the scores. A model with an attention of its own is refused while it is made, if transformers can
tell that it has one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

import flash_cute
from flash_cute import checks, layouts

NAME = "cute_fa"  # with "flash" in it, transformers takes a name for a kernel to download

#: Options of a layer's call that change nothing here, as flags do. The mask has what position_ids
#: and sliding_window say. All other options are refused.
IGNORED = {
    "cache_position", "ignore_index", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "position_ids", "shift_labels", "sliding_window", "token_type_ids",
}  # fmt: skip
#: A mask function of models that embed: all keys are seen.
_EVERYTHING: Callable[..., Any] = lambda *args: torch.tensor(True, dtype=torch.bool)  # noqa: E731
#: What a mask without elements cannot serve.
READ = "code that reads its mask, as a model's own attention does"
#: Where models have the dropout that is not served.
DROPOUT = (
    "dropout (in the model's configuration, attention_dropout, attn_pdrop or "
    "attention_probs_dropout_prob must be 0)"
)


def refuse(
    what: str, model: str = "", instead: str = "use attn_implementation='sdpa' or 'eager'"
) -> NoReturn:
    where = f" (model type {model!r})" if model else ""
    raise ValueError(f"{NAME} does not serve {what}{where}: {instead}")


@dataclass(frozen=True)
class Seen:
    """The keys that a query sees. Query i stands at key i + visible - Nq.

    Lengths and starts are int32 tensors (B,) on the device, or None for all and 0.
    """

    lengths: tuple[int, int]  #: (Nq, Nk)
    is_causal: bool
    window: tuple[int, int] = (-1, -1)  #: as `window_size`
    visible: int | Tensor = 0  #: how many keys the last query of a causal mask could see
    starts: Tensor | None = None  #: of the keys that are no padding
    ends: Tensor | None = None  #: likewise; a causal mask needs none
    cu_seqlens: Tensor | None = None  #: where packed sequences begin, in all B * N tokens
    unserved: str = ""  #: what a layer with this mask refuses: some models make masks in vain
    model: str = ""


class Mask(Tensor):
    """A mask (B, 1, Nq, Nk) that has `seen` for its elements. transformers takes one with four
    dimensions as it is, as where generate() makes it ahead for a static cache."""

    seen: Seen
    #: position_ids that a layer came with, and cu_seqlens if they pack sequences.
    packed_by: tuple[Tensor, Tensor | None] | None = None

    @staticmethod
    def __new__(cls, seen: Seen, batch: int, device: Any) -> Mask:
        shape = (batch, 1, *seen.lengths)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.seen = seen
        return mask

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Mask({self.seen})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Mask:
        leaves = pytree.tree_leaves((args, kwargs))
        mask: Mask = next(x for x in leaves if isinstance(x, Mask))
        aten = torch.ops.aten
        if op in (aten.detach.default, aten.alias.default, aten.clone.default):
            return Mask(mask.seen, mask.shape[0], mask.device)
        if op is aten._to_copy.default and (kwargs or {}).get("dtype") in (None, torch.bool):
            return Mask(mask.seen, mask.shape[0], (kwargs or {}).get("device") or mask.device)
        refuse(READ, mask.seen.model)


def _parts(mask_function: Callable[..., Any]) -> dict[str, Any]:
    """What transformers' makers of mask functions were given, by their parameters' names."""
    code, cells = mask_function.__code__, mask_function.__closure__ or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def read(mask_function: Callable[..., Any]) -> dict[str, Any] | None:
    """The mask that a function of transformers' describes, as some of `is_causal`, `left`, `right`
    and `sequences` (B, N); None if it is one that flash_cute does not have."""
    if mask_function is causal_mask_function:
        return {"is_causal": True}
    if mask_function is bidirectional_mask_function:
        return {}
    maker = getattr(mask_function, "__qualname__", "").split(".")[0]
    module = getattr(mask_function, "__module__", "")
    if module.startswith("transformers.models."):  # Gemma 3's, for embeddings, and copies
        if maker == "_bidirectional_window_overlay":
            side = _parts(mask_function)["sliding_window"] - 1
            return {"left": side, "right": side}
        return {} if _has_code_of(mask_function, _EVERYTHING) else None
    if module != causal_mask_function.__module__:
        return None
    parts = _parts(mask_function)
    if maker == "sliding_window_overlay":
        return {"left": parts["sliding_window"] - 1}
    if maker == "sliding_window_bidirectional_overlay":
        return {"left": parts["sliding_window"], "right": parts["sliding_window"]}
    if maker == "packed_sequence_mask_function":
        return {"sequences": parts["packed_sequence_mask"]}
    # Within a sequence its positions rise by 1, as tokens do.
    if maker == "remap_positions_for_packed_sequence":
        return read(parts["mask_function"])
    if maker == "or_masks":
        masks = [mask for mask in parts["mask_functions"] if not _has_no_blocks(mask)]
        return read(masks[0]) if len(masks) == 1 else _union([read(mask) for mask in masks])
    if maker != "and_masks":
        return None
    joined: dict[str, Any] = {}
    for mask in parts["mask_functions"]:
        found = read(mask)
        if found is None or found.keys() & joined.keys():
            return None
        joined |= found
    return joined


def _has_no_blocks(mask_function: Callable[..., Any]) -> bool:
    """Whether it is the mask of a model's images, whose tokens see each other, and no token is of
    one. Waits for the GPU."""
    maker = getattr(mask_function, "__qualname__", "").split(".")[0]
    module = getattr(mask_function, "__module__", "")
    if maker != "blockwise_overlay" or module != causal_mask_function.__module__:
        return False
    blocks = _parts(mask_function)["block_sequence_ids"]
    return not _cannot_wait(blocks) and not (blocks >= 0).any()


def _union(masks: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """As `read`, of the keys that any of the masks shows: bands, each with the query's own."""
    bands: list[tuple[float, float]] = []
    if not masks:
        return None  # no key at all
    for mask in masks:
        if mask is None or "sequences" in mask:
            return None
        right = 0 if mask.get("is_causal") else mask.get("right", math.inf)
        bands.append((mask.get("left", math.inf), right))
    left, right = (max(sides) for sides in zip(*bands, strict=True))
    union: dict[str, Any] = {} if left == math.inf else {"left": left}
    if right == 0:
        union["is_causal"] = True
    elif right != math.inf:
        union["right"] = right
    return union


def _has_code_of(function: Callable[..., Any], other: Callable[..., Any]) -> bool:
    codes = (getattr(x, "__code__", None) for x in (function, other))
    a, b = ((code.co_code, code.co_consts, code.co_names) if code else None for code in codes)
    return a == b


def _cannot_wait(x: Tensor) -> bool:
    """Whether values must stay on the device: a CUDA graph or torch.export records what is done."""
    has_none = torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor)
    return has_none or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _packed(sequences: Tensor) -> Tensor | None:
    """cu_seqlens of packed tokens, of which `sequences` (B, N) says in which sequence they are.
    None if each row is one, where that can be seen: transformers packs whenever it is traced."""
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    begins = begins.flatten()
    tokens = torch.arange(begins.numel(), dtype=torch.int32, device=begins.device)
    # Where the number of sequences must not be known, empty ones follow.
    if _cannot_wait(begins):
        begins = torch.where(begins, tokens, begins.numel()).sort().values
    else:
        begins = tokens[begins]
        if begins.numel() == sequences.shape[0]:
            return None
    return torch.cat([begins, begins.new_full((1,), sequences.numel())])


def _padding(tokens: Tensor, model: str) -> tuple[Tensor, Tensor] | None:
    """(starts, ends) of the tokens of each sequence, for True in `tokens` (B, N); None if all are.
    Waits for the GPU, as transformers' own masks do."""
    length = tokens.shape[1]
    columns = torch.arange(length, device=tokens.device)
    starts = torch.where(tokens, columns, length).amin(1)
    ends = torch.where(tokens, columns + 1, 0).amax(1)
    count = tokens.sum(1)
    has_no_gaps = ((count == ends - starts) | (count == 0)).all()
    if _cannot_wait(tokens):
        torch._assert_async(has_no_gaps, f"{NAME}: there is padding between tokens")
    else:
        is_full, is_whole = torch.stack([tokens.all(), has_no_gaps]).tolist()
        if not is_whole:
            refuse("padding between tokens", model)
        if is_full:
            return None
    return starts.clamp(max=max(length - 1, 0)).int(), ends.int()


@torch.compiler.disable  # Dynamo cannot look into mask functions, and makes no such tensors
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    config: Any = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Mask:
    """Query i is token q_offset + i, key j is token kv_offset + j. `attention_mask` (B, tokens) is
    False for padding. A model that may not go without a mask (`allow_is_causal_skip`) reads it."""
    model = str(getattr(config, "model_type", ""))
    lengths = (q_length, kv_length)
    # transformers itself clears the flag for one query of a static cache, and for other masks.
    if not allow_is_causal_skip and q_length > 1 and mask_function is causal_mask_function:
        refuse(READ, model)
    found = read(mask_function)
    if found is None:
        own = "masks of the model's own"
        # Llama 4 makes the mask of its chunks even if no layer has chunks.
        has_chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
        if getattr(config, "attention_chunk_size", None) and not has_chunks:
            return Mask(Seen(lengths, False, unserved=own, model=model), batch_size, device)
        refuse(own, model)
    is_causal = found.get("is_causal", False)
    window = (found.get("left", -1), -1 if is_causal else found.get("right", -1))
    has_diagonal = is_causal or window != (-1, -1)
    visible: int | Tensor = q_offset + q_length - kv_offset if has_diagonal else kv_length
    is_known = not isinstance(visible, Tensor)
    if is_known and not 0 <= visible <= kv_length:
        refuse("queries beyond the keys", model)

    starts, ends, cu_seqlens = None, None, None
    if "sequences" in found:
        if attention_mask is not None or q_length != kv_length or visible != kv_length:
            refuse("packed sequences with padding or a cache", model)
        cu_seqlens = _packed(found["sequences"].expand(batch_size, -1))
    elif attention_mask is not None:
        if attention_mask.dim() != 2:
            refuse(f"padding masks of {attention_mask.dim()} dimensions", model)
        # A static cache is longer than its mask, whose end is that of the tokens.
        length = visible if is_known else kv_length
        tokens = attention_mask[:, kv_offset : kv_offset + length]
        if is_known and tokens.shape[1] < visible:
            refuse("a padding mask that is shorter than the keys", model)
        if not is_known:
            # What follows the last query is no padding.
            columns = torch.arange(tokens.shape[1], device=tokens.device)
            tokens = tokens | (columns >= visible)
        if (padding := _padding(tokens, model)) is not None:
            starts, ends = padding
            # A query that is no padding sees none at the end, as it is causal.
            ends = None if is_causal else ends
    return Mask(
        Seen(lengths, is_causal, window, visible, starts, ends, cu_seqlens, model=model),
        batch_size, device,
    )  # fmt: skip


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query (B, Hq, Nq, D), key (B, Hkv, Nk, D) and value (B,
    Hkv, Nk, Dv); out is (B, Nq, Hq, Dv)."""
    if query.shape[0] == 1:  # the same queries for all keys
        query = query.expand(key.shape[0], -1, -1, -1)
    seen = _seen(module, query, key, attention_mask, is_causal)
    given = [
        name
        for name, x in others.items()
        if name not in IGNORED and x is not None and not isinstance(x, bool)
    ]
    if others.get("output_attentions"):  # a flag, but it asks for what is not in memory
        given.append("output_attentions")
    unserved = seen.unserved or ", ".join(sorted(given)) or (DROPOUT if dropout else "")
    if unserved:
        refuse(unserved, seen.model)

    bias = position_bias
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        bias = _bias_of(attention_mask, position_bias, query.dtype)
    options: dict[str, Any] = {
        "is_causal": seen.is_causal, "softmax_scale": scaling, "window_size": seen.window,
        "softcap": softcap, "learnable_sink": s_aux, "bias": bias,
    }  # fmt: skip
    positions = others.get("position_ids")
    is_own = seen.is_causal or not _may_cross(module)  # its positions are those of the keys
    if is_own and isinstance(attention_mask, Mask) and isinstance(positions, Tensor):
        seen = _packed_by(attention_mask, positions, query.shape[0])
    packed = _packed_lengths(seen, query, (cu_seq_lens_q, cu_seq_lens_k), options)
    if packed is None:
        out = _dense(seen, query, key, value, options).transpose(1, 2)
    elif bias is not None:
        refuse("a bias with packed sequences", seen.model)
    else:
        hints = {"max_seqlen_q": max_length_q, "max_seqlen_k": max_length_k}
        options |= {name: x for name, x in hints.items() if isinstance(x, int)}
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out, _ = flash_cute.forward_varlen(q, k, v, packed[0], packed[1], **options)
        out = out.unflatten(0, (query.shape[0], query.shape[2]))
    return out, None


def _seen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
) -> Seen:
    lengths = (query.shape[2], key.shape[2])
    if isinstance(mask, Mask) and mask.seen.lengths == lengths:
        return mask.seen
    model = str(getattr(getattr(module, "config", None), "model_type", ""))
    if mask is None:  # the model asked for none, and relies on is_causal
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_causal = bool(is_causal) and lengths[0] > 1
        unserved = "causality without a mask" if is_causal and lengths[0] != lengths[1] else ""
        return Seen(lengths, is_causal, visible=lengths[1], unserved=unserved, model=model)
    if isinstance(mask, Mask):
        refuse(f"a mask of lengths {mask.seen.lengths} on tensors of {lengths}", model)
    sizes = (query.shape[0], query.shape[1], *lengths)
    has_sizes = mask.dim() == 4 and all(
        n == 1 or n == m for n, m in zip(mask.shape, sizes, strict=True)
    )
    if not has_sizes or not (mask.dtype == torch.bool or mask.is_floating_point()):
        what = f"a mask of shape {tuple(mask.shape)} and {checks.name_of(mask.dtype)}"
        refuse(f"{what} on scores of shape {sizes}", model)
    return Seen(lengths, False, visible=lengths[1], model=model)  # the mask has all that is hidden


def _bias_of(mask: Tensor, position_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a mask that is a tensor (B, H, Nq, Nk), or 1 in place of these, adds to the scores:
    itself, or -inf where it is False; and `position_bias`."""
    if mask.dtype == torch.bool:
        hidden = torch.where(mask, mask.new_zeros((), dtype=dtype), -math.inf)
    else:  # fp32 has all masks of 16 bits; bf16's least number is beyond fp16
        hidden = mask if mask.dtype == dtype else mask.float()
    return hidden if position_bias is None else position_bias + hidden


def _may_cross(module: torch.nn.Module) -> bool:
    """Whether a layer of the model may attend to other tokens than its own."""
    config = getattr(module, "config", None)
    return any(getattr(config, x, False) for x in ("is_encoder_decoder", "add_cross_attention"))


def _packed_by(mask: Mask, positions: Tensor, batch: int) -> Seen:
    """What is seen if each position 0 begins a sequence, as in transformers' own flash attention.
    Some models, gpt-oss among them, do not tell their mask. Waits for the GPU once per forward;
    compiled layers do not look."""
    seen = mask.seen
    is_plain = seen.cu_seqlens is None and seen.starts is None and seen.ends is None
    if not is_plain or seen.lengths[0] == 1 or torch.compiler.is_compiling():
        return seen
    if mask.packed_by is None or mask.packed_by[0] is not positions:
        shape = positions.shape
        if shape[-1:] != seen.lengths[1:] or len(shape) > 2 or _cannot_wait(positions):
            return seen  # there are keys of a cache, or coordinates
        given, positions = positions, positions.view(-1, shape[-1])
        sequences = (positions[:, 1:] == 0).cumsum(1)
        begins = None
        # A model that passes zeros alone has no positions.
        if bool(sequences[:, -1].any() & positions.any()):
            begins = _packed(functional.pad(sequences, (1, 0)).expand(batch, -1))
        mask.packed_by = (given, begins)
    begins = mask.packed_by[1]
    return seen if begins is None else replace(seen, cu_seqlens=begins)


def _dense(seen: Seen, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    if not isinstance(seen.visible, Tensor):
        if seen.visible < k.shape[2]:
            k, v = k[:, :, : seen.visible], v[:, :, : seen.visible]
        if options["bias"] is not None:
            options["bias"] = options["bias"][..., : seen.visible]
    else:
        options["seqused_k"] = seen.visible.to(q.device, torch.int32).expand(q.shape[0])
    if seen.ends is not None:
        options["seqused_k"] = seen.ends.to(q.device)
    if seen.starts is not None:
        options["key_start"] = seen.starts.to(q.device)
    out, _ = flash_cute.forward(q, k, v, **options)
    return out


def _packed_lengths(
    seen: Seen, q: Tensor, given: tuple[Tensor | None, Tensor | None], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None] | None:
    """(cu_seqlens_q, cu_seqlens_k) if the call goes to `forward_varlen`. None: it is dense."""
    batch, length = q.shape[0], q.shape[2]
    if given[0] is not None or given[1] is not None:
        begins_q, begins_k = given
        if begins_q is None or begins_k is None:
            refuse("one of cu_seq_lens_q and cu_seq_lens_k without the other", seen.model)
        for name, x in (("cu_seq_lens_q", begins_q), ("cu_seq_lens_k", begins_k)):
            layouts.check_integers(name, x)
        is_plain = not isinstance(seen.visible, Tensor) and seen.visible == seen.lengths[1]
        if not is_plain or seen.starts is not None or seen.ends is not None:
            refuse("cu_seq_lens_q with padding or a static cache", seen.model)
        return begins_q.to(q.device, torch.int32), begins_k.to(q.device, torch.int32)
    if seen.cu_seqlens is not None:
        return seen.cu_seqlens.to(q.device), None
    if seen.window != (-1, -1) and seen.ends is not None:
        # The window stands around the diagonal, which must not move with the padding.
        begins = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
        options["seqused_q"] = options["seqused_k"] = seen.ends.to(q.device)
        if seen.starts is not None:
            options["key_start"] = seen.starts.to(q.device)
        return begins, None
    return None


@functools.cache
def _has_classes_by_name(model: type) -> bool:
    """Whether a layer of the model, as it is made, takes its attention's class from a dict that has
    no `NAME`. Parts that are models themselves do not count."""
    found = [model]
    for cls in found:
        inits = (inspect.unwrap(vars(base).get("__init__", object)) for base in cls.__mro__)
        for init in filter(inspect.isfunction, inits):
            for name in _names(init.__code__):
                x: Any = init.__globals__.get(name)
                if isinstance(x, dict) and isinstance(x.get("eager"), type) and NAME not in x:
                    return True
                is_part = isinstance(x, type) and issubclass(x, torch.nn.Module)
                if is_part and not issubclass(x, PreTrainedModel) and x not in found:
                    found.append(x)
    return False


def _names(code: CodeType) -> set[str]:
    """What the code looks up, comprehensions included."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _refuse_own_attention(module: torch.nn.Module, *_: Any) -> None:
    """Called ahead of each submodule that any module gets. A model of transformers has its
    configuration by its first. Those that are made may get more."""
    if not isinstance(module, PreTrainedModel) or module._modules:
        return
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != NAME:
        return
    # Of a user's class, the model of transformers that it comes from, if from one.
    theirs: Any = next(
        (x for x in type(module).__mro__ if x.__module__.startswith("transformers.models.")), None
    )
    # transformers' own test of whether a model looks its attention up by name. It reads source
    # text, and keeps what it finds: without the text it has no answer.
    getattr(theirs, "_can_set_attn_implementation", bool)()
    is_own = getattr(theirs, "_can_set_attn_implementation_cached_value", None) is False
    if is_own or (theirs is not None and _has_classes_by_name(theirs)):
        refuse(
            f"models with an attention of their own, as {theirs.__name__} has",
            str(getattr(config, "model_type", "")),
            "leave attn_implementation out, or name the parts of the model that are served, as in "
            f"attn_implementation={{'text_config': {NAME!r}}}",
        )


_refusal: RemovableHandle | None = None


def register() -> None:
    global _refusal
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
    if _refusal is None:
        _refusal = register_module_module_registration_hook(_refuse_own_attention)


def unregister() -> None:
    global _refusal
    if _refusal is not None:
        _refusal.remove()
        _refusal = None
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)
