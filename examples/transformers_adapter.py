"""flash_cute in Hugging Face's transformers, 5.17 and newer: full and causal attention, any cache.

    from examples.transformers_adapter import register

    register()
    model.set_attn_implementation("cute_fa")

Padding, windows, packed sequences, biases, sinks, soft-capping and dropout raise a ValueError.

transformers makes a mask once per forward, for all layers. Ours is no tensor but says what is seen.
It alone decides what is causal: `is_causal` is False in decoders that rely on their mask.
"""

from dataclasses import dataclass

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

import flash_cute

#: Options of a layer's call that change nothing here, as flags do. All others are refused.
IGNORED = {
    "cache_position", "logits_to_keep", "num_items_in_batch", "position_ids", "sliding_window",
}  # fmt: skip


class Unserved(ValueError, AttributeError):
    """An AttributeError too, so that hasattr(mask, name) is False."""


def refuse(what):
    raise Unserved(f"cute_fa does not serve {what}: use attn_implementation='sdpa' or 'eager'")


@dataclass(frozen=True)
class Mask:
    """Each query sees all keys. If causal, the last query sees the first `visible` keys, and each
    query before it one key less. Code that takes a Mask for a tensor gets an error.
    """

    lengths: tuple[int, int]
    visible: int
    is_causal: bool
    unserved: str = ""  # what a layer that gets this mask refuses: some models make masks in vain

    def _read(*_):
        refuse("code that reads its mask: a model's own attention, generate() with a static cache")

    __getattr__ = __getitem__ = _read
    __torch_function__ = classmethod(_read)


def make_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
    attention_mask=None, local_size=None, allow_is_causal_skip=False,
    allow_is_bidirectional_skip=False, **_,
):  # fmt: skip
    """Query i is token q_offset + i, key j is token kv_offset + j. `attention_mask` (B, tokens) is
    False for padding. `allow_..._skip` says that the other arguments are all there is to the mask.
    """
    is_causal = allow_is_causal_skip or mask_function is causal_mask_function
    is_full = allow_is_bidirectional_skip or mask_function is bidirectional_mask_function
    end = int(q_offset) + q_length  # of a static cache, q_offset is on the GPU: this waits for it
    visible = end - kv_offset if is_causal else kv_length
    unserved = ""
    if not (is_causal or is_full) or not 0 <= visible <= kv_length:
        unserved = "packed sequences, nor masks of the model's own"
    elif local_size is not None and max(end, kv_offset + visible) > local_size:
        unserved = "sequences longer than the model's window"
    elif attention_mask is not None:
        tokens = attention_mask[..., kv_offset : kv_offset + visible]
        # generate() always has a mask, mostly of ones: this waits for the GPU, once per forward.
        if tokens.shape[-1] < visible or not tokens.all():
            unserved = "padding"
    return Mask((q_length, kv_length), visible, is_causal, unserved)


def attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **options
):
    given = {name for name, x in options.items() if x is not None and not isinstance(x, bool)}
    others = ", ".join(sorted(given - IGNORED))
    mask, lengths = attention_mask, (query.shape[2], key.shape[2])
    if mask is None:  # the model asked for none: all keys, unless it relies on is_causal instead
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = Mask(lengths, key.shape[2], False, "causality without a mask" if causal else "")
    if not isinstance(mask, Mask) or mask.lengths != lengths:
        refuse("masks that are tensors, nor masks of other lengths")
    if mask.unserved or others or dropout:
        refuse(mask.unserved or others or "dropout")
    key, value = key[:, :, : mask.visible], value[:, :, : mask.visible]
    out, _ = flash_cute.forward(query, key, value, mask.is_causal, scaling)
    return out.transpose(1, 2), None


def register(name="cute_fa"):
    """transformers takes a name with "flash" in it for a kernel to download."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)
