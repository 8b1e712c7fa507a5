"""Who is measured: flash_cute and its peers, each behind the same two questions.

`why_not(case, device)` says in a few words why a provider cannot take a case (None: it can);
`bind(case, q, k, v)`, with a bias behind them if the case has one, does everything that is not to
be timed (masks, compilation) and returns the forward. What only the run itself can tell (a backend
that refuses) is an exception there. `bind_op` makes of it the call to be timed, which may be a
backward.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cases import SOFTCAP, Case

#: out, and softmax_lse where the provider returns it; of a backward dq, dk and dv.
Result = tuple[Any, ...]
Call = Callable[[], Result]
#: Of a case and its q, k and v, and a bias if it has one.
Bind = Callable[..., Call]


def _any_case(case: Case, device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Provider:
    name: str
    about: str
    bind: Bind
    why_not: Callable[[Case, torch.device], str | None] = _any_case
    #: Entered around the timed loop, so that choosing a backend is not timed with the call.
    pinned: Callable[[], AbstractContextManager[object]] = nullcontext
    #: flash_cute as it is built, whichever kernels are chosen: a wrong result is ours.
    is_ours: bool = False
    #: Of ours, the overrides.
    tuning: str = ""


def bind_op(provider: Provider, case: Case, tensors: Sequence[torch.Tensor]) -> Call:
    """The call to be timed for what `make_inputs` drew: a forward, a backward, or both."""
    if case.op == "fwd":
        return provider.bind(case, *tensors)
    *given, dout = tensors
    inputs = [x.detach().requires_grad_() for x in given[: 4 if "trained" in case.score else 3]]
    forward = torch.enable_grad()(provider.bind(case, *inputs, *given[len(inputs) :]))
    with provider.pinned():
        out = forward()[0]
    # In the order in which `out` lies: else some providers copy it.
    dout = torch.empty_like(out).copy_(dout)
    if case.op == "fwdbwd":
        return lambda: torch.autograd.grad(forward()[0], inputs, dout)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


# -- flash_cute ----------------------------------------------------------------------------------


def _flash_cute_why_not(case: Case, device: torch.device) -> str | None:
    if case.dtype == "fp32" and device.type == "cuda" and case.head_dim > 256:
        return "fp32 up to head dim 256 only"
    return None


def _bind_flash_cute(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    bias: torch.Tensor | None = None, deterministic: bool = False,
) -> Call:  # fmt: skip
    import flash_cute

    given: dict[str, Any] = {"is_causal": case.causal, **case.changes(q.device)}
    if deterministic:
        given["deterministic"] = True
    if bias is not None:
        given["bias"] = bias
    if case.window >= 0:
        given["window_size"] = case.window, -1
    if case.documents:
        ends = ends_of(case, q.device)
        return lambda: flash_cute.forward_varlen(q, k, v, *ends, **given)
    return lambda: flash_cute.forward(q, k, v, **given)


def ends_of(case: Case, device: torch.device) -> list[torch.Tensor]:
    """cu_seqlens of the documents, of q and k; of a dense case, its entries of the batch."""
    entries = (case.q_len,) * case.batch
    return [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (case.documents_q or entries, case.documents or entries)
    ]


def _dense_why_not(case: Case, device: torch.device) -> str | None:
    return None if len(set(case.documents)) == 1 else "lengths differ"


def _bind_dense(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    import flash_cute

    def entries(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (len(case.documents), -1)).transpose(1, 2)

    def call() -> Result:
        out, _ = flash_cute.forward(*map(entries, (q, k, v)), is_causal=case.causal)
        return out.transpose(1, 2).flatten(0, 1), None  # the LSE's layout would take a copy

    return call


def tuned(tuning: str, name: str | None = None) -> Provider:
    """flash_cute with overrides of what it would choose ("arch=80", "splits=4,arch=90")."""

    def why_not(case: Case, device: torch.device) -> str | None:
        return _flash_cute_why_not(case, device) if device.type == "cuda" else "needs a GPU"

    def bind(
        case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> Call:  # fmt: skip
        from flash_cute import ops

        given = {"window_left": case.window, "window_right": 0 if case.causal else -1}
        given |= {"tuning": tuning, "bias": bias, **case.changes(q.device)}
        if case.documents:
            names = "cu_seqlens_q", "cu_seqlens_k"
            given |= dict(zip(names, ends_of(case, q.device), strict=True))
        return lambda: ops.fwd(q, k, v, **given)

    about = f"flash_cute with {tuning}"
    return Provider(name or tuning, about, bind, why_not, is_ours=True, tuning=tuning)


# -- torch SDPA, one backend at a time -----------------------------------------------------------


def _bind_sdpa(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    if case.documents or case.window >= 0:
        return _bind_varlen_attn(case, q, k, v)
    if case.is_aligned_right:
        return _bind_flash_op(q, k, v)
    causal = case.causal and not case.causal_is_full
    grouped = case.heads != case.kv_heads

    def call() -> Result:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out, None

    return call


def _bind_varlen_attn(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """PyTorch's FlashAttention-2 has packed sequences and windows here."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    ends = ends_of(case, q.device)
    longest = [max(x, default=case.q_len) for x in (case.documents_q, case.documents)]
    window = case.window, 0 if case.causal else -1

    def rows_of(x: torch.Tensor) -> torch.Tensor:
        return x if case.documents else x.transpose(1, 2).flatten(0, 1)

    def call() -> Result:
        packed = map(rows_of, (q, k, v))
        asked = {"window_size": window, "return_aux": AuxRequest(lse=True)}
        out, lse = varlen_attn(*packed, *ends, *longest, **asked)
        if case.documents:
            return out, lse
        return out.unflatten(0, (case.batch, -1)).transpose(1, 2), lse[None]

    return call


def _bind_flash_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """The flash backend's kernel is aligned to the bottom right corner; SDPA leaves it out."""
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    lengths = None, None, q.shape[2], k.shape[2]

    def call() -> Result:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*rows, *lengths, 0.0, True, False)
        return out.transpose(1, 2), lse

    return call


def _sdpa(name: str, about: str, backend: SDPBackend, head_dim_limit: int = 0) -> Provider:
    def why_not(case: Case, device: torch.device) -> str | None:
        is_flash = backend == SDPBackend.FLASH_ATTENTION
        if case.is_aligned_right and not (is_flash and device.type == "cuda"):
            return "SDPA's is_causal is aligned to the top left corner"
        if case.score:
            return "no softcap, ALiBi and bias under a causal mask"
        if (case.documents or case.window >= 0) and not is_flash:
            return "no packed sequences and windows"
        if head_dim_limit and case.head_dim > head_dim_limit:
            return f"head dim above {head_dim_limit}"
        if head_dim_limit and case.dtype == "fp32" and device.type == "cuda":
            return "fp16 and bf16 only"
        return None

    return Provider(name, about, _bind_sdpa, why_not, lambda: sdpa_kernel(backend))


# -- compiled FlexAttention ----------------------------------------------------------------------


def _flex_why_not(case: Case, device: torch.device) -> str | None:
    return "chunks of documents" if case.documents and case.q_len != case.kv_len else None


def _bind_flex(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Call:  # fmt: skip
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # One compilation a shape; forgetting the earlier ones keeps below Dynamo's recompile limit.
    torch._dynamo.reset()
    # A backward that runs again must not reuse the memory of what it reads.
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    diagonal = case.kv_len - case.q_len
    documents = torch.repeat_interleave(
        torch.tensor(case.documents or (case.q_len,), device=q.device)
    )

    def causal_mask(b, h, q_index, kv_index):  # type: ignore[no-untyped-def]
        seen = q_index + diagonal >= kv_index
        if case.window >= 0:
            seen = seen & (q_index + diagonal - kv_index <= case.window)
        if case.documents:
            seen = seen & (documents[q_index] == documents[kv_index])
        return seen

    slopes = case.changes(q.device).get("alibi_slopes")

    def softcap(score, b, h, q_index, kv_index):  # type: ignore[no-untyped-def]
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(score, b, h, q_index, kv_index):  # type: ignore[no-untyped-def]
        return score - slopes[h] * (q_index + diagonal - kv_index).abs()

    def add_bias(score, b, h, q_index, kv_index):  # type: ignore[no-untyped-def]
        if bias.shape[1] == 1:
            return score + bias[b, 0, 0, kv_index]
        return score + bias[0, h, q_index, kv_index]

    score_mod = {"": None, "softcap": softcap, "alibi": alibi}.get(case.score, add_bias)
    mask = None
    if case.causal and not case.causal_is_full:
        mask = create_block_mask(causal_mask, None, None, case.q_len, case.kv_len, q.device)
    grouped = case.heads != case.kv_heads

    def call() -> Result:
        # Here, so that gradients find their way back to the packed inputs.
        inputs = [x.transpose(0, 1)[None] for x in (q, k, v)] if case.documents else [q, k, v]
        out = compiled(*inputs, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)
        return (out[0].transpose(0, 1) if case.documents else out), None

    return call


# -- our Triton kernel ---------------------------------------------------------------------------


def _triton_why_not(case: Case, device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda":
        return "needs a GPU"
    if case.dtype == "fp32":
        return "fp16 and bf16 only"
    if case.op != "fwd":
        return "forward only"
    if case.documents or case.window >= 0 or case.score:
        return "no packed sequences, windows and changes of scores"
    return None


def _bind_triton(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from bench import triton_attention

    return lambda: triton_attention.forward(q, k, v, case.causal, case.scale)


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider(
            "flash_cute", "flash_cute.forward", _bind_flash_cute, _flash_cute_why_not, is_ours=True
        ),
        tuned("arch=80", name="sm80"),
        Provider(
            "deterministic",
            "flash_cute.forward with deterministic=True",
            functools.partial(_bind_flash_cute, deterministic=True),
            _flash_cute_why_not,
            is_ours=True,
        ),
        Provider("dense", "flash_cute.forward of equal lengths", _bind_dense, _dense_why_not),
        _sdpa("fa2", "torch SDPA, flash backend", SDPBackend.FLASH_ATTENTION, 256),
        _sdpa("cudnn", "torch SDPA, cuDNN backend", SDPBackend.CUDNN_ATTENTION, 256),
        _sdpa("efficient", "torch SDPA, efficient backend", SDPBackend.EFFICIENT_ATTENTION),
        _sdpa("math", "torch SDPA, math backend", SDPBackend.MATH),
        Provider("flex", "compiled FlexAttention", _bind_flex, _flex_why_not),
        Provider("triton", "bench/triton_attention.py", _bind_triton, _triton_why_not),
    )
}

DEFAULT_PROVIDERS = ("flash_cute", "fa2", "cudnn")
