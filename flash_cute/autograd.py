"""The op's Autograd key: there are no gradients yet, and whoever takes one is told so.

`forward` refuses derivatives at once. This is for the op alone, as in an exported program, which
may run in grad mode with no gradient in mind. It is also for where `forward` sees less than there
is: under torch.compile of torch.func's gradients, and within vmap.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_cute import checks, ops

#: A context in which calls go past the Autograd key.
below_autograd = torch._C._AutoDispatchBelowAutograd


class _NoBackward(torch.autograd.Function):
    """Results whose derivatives are refused once somebody takes them."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Any:
        with below_autograd():
            return ops.fwd(q, k, v, **keywords)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(f"a gradient is taken: {checks.NO_BACKWARD}")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(f"a tangent is carried on: {checks.NO_TANGENT}")


def _fwd_autograd(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    if checks.refusal_of_derivatives(q, k, v) is None:
        with below_autograd():
            return ops.fwd(q, k, v, **keywords)
    if torch._C._are_functorch_transforms_active():  # to which _NoBackward would be a riddle
        raise NotImplementedError(f"torch.func takes a derivative: {checks.NO_BACKWARD}")
    return _NoBackward.apply(q, k, v, keywords)


torch.library.impl("flash_cute::fwd", "Autograd", _fwd_autograd)
