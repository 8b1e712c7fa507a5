"""How DTensor shards the ops: by batch, and by heads.

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


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def strategies(results: int, q: Any, k: Any, tensors: tuple[Any, ...]) -> list[Any]:
        """All tensors are sharded alike: (placements of the results, of the tensors)."""
        placements = [Replicate(), Shard(0)]
        # A shard needs the k and v of its query heads.
        if q.shape[1] == k.shape[1] or k.shape[1] % q.mesh.size() == 0:
            placements.append(Shard(1))
        return [
            ([where] * results, [None if x is None else where for x in tensors])
            for where in placements
        ]

    @register_sharding(ops.fwd)
    def _fwd(q: Any, k: Any, v: Any, **keywords: Any) -> list[Any]:
        return strategies(2, q, k, (q, k, v))

    @register_sharding(ops.bwd)
    def _bwd(dout: Any, q: Any, k: Any, *others: Any, **keywords: Any) -> list[Any]:
        return strategies(3, q, k, (dout, q, k, *others))
