"""How DTensor shards the ops: by batch, and by heads; packed sequences by heads alone.

`register` is called by `forward` where something else than a plain tensor comes, as
torch.distributed.tensor takes half a second to import.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from flash_cute import ops
from flash_cute.checks import assume_constant_result


@assume_constant_result
def register() -> None:
    """Tells DTensor of the ops, if it is in use."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


#: Where batch and heads lie: name -> dimensions of a dense tensor, and of a packed one. None: it
#: has no such dimension. Those of alibi_slopes are counted from the last.
_DIMS: dict[str, dict[str, tuple[int | None, int | None]]] = {
    **{x: {"batch": (0, None), "heads": (1, 1)} for x in ("q", "k", "v", "out", "dout", "bias")},
    **{x: {"batch": (0, None), "heads": (1, 0)} for x in ("softmax_lse", "dlse")},
    **{x: {"batch": (0, None)} for x in ("seqused_q", "seqused_k", "key_start")},
    "learnable_sink": {"heads": (0, 0)},
    "alibi_slopes": {"batch": (-2, None), "heads": (-1, -1)},
}


def _dim(name: str, x: Any, by: str, is_packed: bool) -> int | None:
    """The dimension of a tensor that is sharded; None if it is whole everywhere."""
    dim = _DIMS.get(name, {}).get(by, (None, None))[is_packed]
    if dim is None or not -len(x.shape) <= dim or (name == "bias" and x.shape[dim] == 1):
        return None
    return dim % len(x.shape)


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def strategies(names: dict[str, Any], results: tuple[str, ...]) -> list[Any]:
        """All tensors are sharded alike: (placements of the results, of the tensors)."""
        q, k = names["q"], names["k"]
        is_packed = len(q.shape) == 3
        ways: list[str | None] = [None] if is_packed else [None, "batch"]
        # A shard needs the k and v of its query heads.
        if q.shape[1] == k.shape[1] or k.shape[1] % q.mesh.size() == 0:
            ways.append("heads")

        def placed(name: str, by: str | None, is_gradient: bool = False) -> Any:
            x = names.get(name)
            if x is None or by is None:
                return Replicate()
            dim = _dim(name, x, by, is_packed)
            # Each shard of the scores adds to the gradient of what is whole everywhere.
            return Shard(dim) if dim is not None else Partial() if is_gradient else Replicate()

        def placed_result(result: str, by: str | None) -> Any:
            if not result.startswith("d"):
                return placed({"out": "q"}.get(result, result), by)
            name = {"dsink": "learnable_sink", "dbias": "bias"}.get(result, result[1:])
            return placed(name, by, is_gradient=True)

        def placed_lse(by: str | None) -> Any:
            dim = None if by is None else _DIMS["softmax_lse"][by][is_packed]
            return Replicate() if dim is None else Shard(dim)

        return [
            (
                [placed_lse(by) if r == "softmax_lse" else placed_result(r, by) for r in results],
                [None if x is None else placed(name, by) for name, x in names.items()],
            )
            for by in ways
        ]

    names = ("q", "k", "v")

    @register_sharding(ops.fwd)
    def _fwd(*tensors: Any, **keywords: Any) -> list[Any]:
        given = dict(zip((*names, *ops.OPTIONAL), tensors, strict=False))
        return strategies(given, ("out", "softmax_lse"))

    @register_sharding(ops.bwd)
    def _bwd(*tensors: Any, bias_grad: bool = False, **keywords: Any) -> list[Any]:
        all_names = ("dout", *names, "out", "softmax_lse", "dlse", *ops.OPTIONAL)
        given = dict(zip(all_names, tensors, strict=False))
        return strategies(given, ("dq", "dk", "dv", "dsink", "dbias"))
