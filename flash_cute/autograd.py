"""The Autograd keys: the gradient of `fwd` is `bwd`, and that of `bwd` is refused.

They are here, and not around the op, so that all of torch's transforms find them: torch.compile
sees the ops alone, and torch.func differentiates them at its own level. (What
`torch.library.register_autograd` makes, torch.func refuses.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flash_cute import checks, ops

#: A context in which calls go past the Autograd key.
below_autograd = torch._C._AutoDispatchBelowAutograd
_has_transforms = torch._C._are_functorch_transforms_active


class _Function(torch.autograd.Function):
    """An autograd.Function for use on an Autograd key. The dispatcher already runs one of
    torch.func's transforms there. `Function.apply` would start again at the outermost, so the base
    class's `apply` is used.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        apply = super(torch.autograd.Function, cls).apply  # type: ignore[misc]
        if not _has_transforms():
            return apply(*args)
        with enable_single_level_autograd_function():
            return apply(*args)

    @staticmethod
    def below(op: Callable[..., Any], *tensors: Tensor | None, **keywords: Any) -> Any:
        """Calls the op below this Autograd key."""
        if not _has_transforms():
            with below_autograd():
                return op(*tensors, **keywords)
        # The transforms around this one take derivatives, too; a Function has turned them off.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below_autograd():
            return op(*tensors, **keywords)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(f"a tangent is carried on: {checks.NO_TANGENT}")


class _Attention(_Function):
    @staticmethod
    def forward(keywords: dict[str, Any], *tensors: Tensor | None) -> Any:
        return _Function.below(ops.fwd, *tensors, **keywords)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.keywords, q, k, v, *optional = inputs
        ctx.save_for_backward(q, k, v, *output, *optional)
        ctx.set_materialize_grads(False)  # a result without a gradient has None

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad  # of the keywords, q, k, v and ops.OPTIONAL
        if dout is None and dlse is None:
            return (None,) * len(wanted)
        keywords = dict(ctx.keywords)
        deterministic = keywords.pop("deterministic", None)
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic:  # each keyword takes time
            keywords["deterministic"] = True
        if any(wanted[6:7]):
            keywords["bias_grad"] = True
        q, k, v, out, lse, *optional = ctx.saved_tensors
        if torch.is_grad_enabled() or _has_transforms():
            results = ops.bwd(dout, q, k, v, out, lse, dlse, *optional, **keywords)
        else:  # what nobody differentiates again has no use for the Autograd key
            with below_autograd():
                results = ops.bwd(dout, q, k, v, out, lse, dlse, *optional, **keywords)
        dq, dk, dv, dsink, dbias = results
        gradients = None, dq, dk, dv, dsink, None, dbias, *(None,) * len(optional)
        return tuple([x if want else None for x, want in zip(gradients, wanted, strict=False)])


#: differentiable(keywords, *tensors): what the op does on its Autograd key, where no transform is
#: around.
differentiable: Callable[..., tuple[Tensor, Tensor]] = super(
    torch.autograd.Function, _Attention
).apply


class _AttentionBackward(_Function):
    @staticmethod
    def forward(keywords: dict[str, Any], *tensors: Tensor | None) -> Any:
        return _Function.below(ops.bwd, *tensors, **keywords)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(checks.NO_DOUBLE_BACKWARD)


def _is_differentiated(*tensors: Tensor | None) -> bool:
    wants_gradients = torch.is_grad_enabled()
    return any(
        x is not None and ((wants_gradients and x.requires_grad) or checks.has_tangent(x))
        for x in tensors
    )


def _fwd_autograd(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, **keywords: Any) -> Any:
    tensors = q, k, v, *others
    if _is_differentiated(*tensors):
        return _Attention.apply(keywords, *tensors)
    with below_autograd():
        return ops.fwd(*tensors, **keywords)


def _bwd_autograd(*tensors: Tensor | None, **keywords: Any) -> Any:
    # Refused only once it is taken: torch.func asks for every gradient as if there were a second.
    if _is_differentiated(*tensors):
        return _AttentionBackward.apply(keywords, *tensors)
    with below_autograd():
        return ops.bwd(*tensors, **keywords)


torch.library.impl("flash_cute::fwd", "Autograd", _fwd_autograd)
torch.library.impl("flash_cute::bwd", "Autograd", _bwd_autograd)
