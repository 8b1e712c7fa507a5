"""Results against the reference in fp64, in pieces small enough that large cases fit in memory.

What passes is decided by `flash_cute.tolerance`, for peers as for us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bench.baselines import Result
from bench.cases import Case

#: Scores of a piece; a few fp64 tensors of that size live at once.
PIECE = 1 << 26


def pieces(case: Case, limit: int = PIECE) -> Iterator[tuple[slice, slice, slice]]:
    """(batch entry, query rows, keys) that cover a case. Only the keys that the rows can see are
    in it, and bottom-right alignment then makes each piece an attention problem of its own."""
    step = max(1, min(case.q_len, limit // (case.heads * case.kv_len)))
    for b in range(case.batch):
        for first in range(0, case.q_len, step):
            last = min(first + step, case.q_len)
            keys = max(0, last + case.kv_len - case.q_len) if case.causal else case.kv_len
            yield slice(b, b + 1), slice(first, last), slice(0, keys)


def _of_scores(
    case: Case,
    bias: Sequence[torch.Tensor],
    device: torch.device,
    entry: slice,
    heads: slice,
    rows: slice = slice(None),
    keys: slice = slice(None),
) -> dict[str, Any]:
    """Windows and changes of scores, for the reference: those of a piece. `bias` is one or none."""
    given = {"window_left": case.window, **case.changes(device)}
    if "alibi_slopes" in given:
        given["alibi_slopes"] = given["alibi_slopes"][heads]
    for x in bias:
        given["bias"] = _part(x, entry, heads, rows, keys)
    return given


def _part(bias: torch.Tensor, *slices: slice) -> torch.Tensor:
    kept = (s if n > 1 else slice(None) for s, n in zip(slices, bias.shape, strict=False))
    return bias[tuple(kept)]


@torch.no_grad()
def check(
    case: Case,
    tensors: Sequence[torch.Tensor],
    results: Mapping[str, Result],
    limit: int = PIECE,
) -> dict[str, dict[str, Any]]:
    """Per provider: `error`, `error_bound`, `lse_error` (None: no LSE comes back) and `correct`."""
    from flash_cute import reference, tolerance

    if case.documents:
        return _of_documents(case, tensors, results, check, limit)
    q, k, v, *bias = tensors
    checked: dict[str, dict[str, Any]] = {
        name: {
            "error": 0.0,
            "error_bound": 0.0,
            "lse_error": None if lse is None else 0.0,
            "correct": True,
        }
        for name, (_, lse) in results.items()
    }
    for entry, rows, keys in pieces(case, limit):
        inputs = q[entry, :, rows], k[entry, :, keys], v[entry, :, keys]
        given = _of_scores(case, bias, q.device, entry, slice(None), rows, keys)
        exact_lse = torch.empty(0)
        if any(lse is None for _, lse in results.values()):
            exact_lse = reference.attention(*inputs, case.causal, case.scale, **given)[1]
        for name, (out, lse) in results.items():
            # Who returns no LSE is held to its output alone.
            piece = out[entry, :, rows], exact_lse if lse is None else lse[entry, :, rows]
            found = tolerance.compare(*piece, *inputs, case.causal, case.scale, **given)
            row = checked[name]
            row["error"] = max(row["error"], found.out_error)
            row["error_bound"] = max(row["error_bound"], found.out_bound)
            if lse is not None:
                row["lse_error"] = max(row["lse_error"], found.lse_error)
            row["correct"] = row["correct"] and found.lse_error <= found.lse_bound
    for row in checked.values():
        row["correct"] = row["correct"] and row["error"] <= row["error_bound"]
    return checked


@torch.no_grad()
def check_gradients(
    case: Case,
    tensors: Sequence[torch.Tensor],
    results: Mapping[str, Result],
    limit: int = PIECE,
) -> dict[str, dict[str, Any]]:
    """Per provider, of dq, dk and dv, and of a trained bias: `errors`, `error_bounds`; and whether
    all are `correct`. A piece has key heads with their query heads, at least one of a batch entry,
    and all that share a trained bias."""
    from flash_cute import tolerance

    if case.documents:
        return _of_documents(case, tensors, results, check_gradients, limit)
    q, k, v, *bias, dout = tensors
    group = case.heads // case.kv_heads
    batch_step, step = 1, max(1, limit // (group * case.q_len * case.kv_len))
    if "trained" in case.score:
        batch_step, step = (case.batch, step) if bias[0].shape[0] == 1 else (1, case.kv_heads)
    found: dict[str, list[tolerance.GradientComparison]] = {name: [] for name in results}
    for b in range(0, case.batch, batch_step):
        for first in range(0, case.kv_heads, step):
            entry, heads = slice(b, b + batch_step), slice(first * group, (first + step) * group)
            of_q, kv = (entry, heads), (entry, slice(first, first + step))
            inputs = dout[of_q], q[of_q], k[kv], v[kv]
            given = _of_scores(case, bias, q.device, entry, heads)
            for name, (dq, dk, dv, *dbias) in results.items():
                gradients = dq[of_q], dk[kv], dv[kv], *(_part(x, entry, heads) for x in dbias)
                found[name].append(
                    tolerance.compare_gradients(
                        gradients, *inputs, case.causal, case.scale, **given
                    )
                )
    checked = {}
    for name, of_pieces in found.items():
        whole = tolerance.GradientComparison(
            tuple(map(max, zip(*(piece.errors for piece in of_pieces), strict=True))),
            tuple(map(max, zip(*(piece.bounds for piece in of_pieces), strict=True))),
        )
        checked[name] = {
            "errors": whole.errors,
            "error_bounds": whole.bounds,
            "correct": whole.passed,
        }
    return checked


def _of_documents(
    case: Case,
    tensors: Sequence[torch.Tensor],
    results: Mapping[str, Result],
    check: Callable[..., dict[str, dict[str, Any]]],
    limit: int,
) -> dict[str, dict[str, Any]]:
    """Each document is checked as a dense case. What is worst of all is told."""
    worst: dict[str, dict[str, Any]] = {}
    first, first_k = 0, 0
    for part in case.parts():
        rows, keys = slice(first, first + part.q_len), slice(first_k, first_k + part.kv_len)
        first, first_k = rows.stop, keys.stop

        def dense(
            x: torch.Tensor | None, rows: slice = rows, keys: slice = keys
        ) -> torch.Tensor | None:
            # (rows, heads, columns), or (heads, rows) of an LSE
            if x is None:
                return None
            if x.dim() == 2:
                return x[:, rows][None]
            return x[rows if len(x) == case.q_len else keys].transpose(0, 1)[None]

        of_part = {name: tuple(map(dense, result)) for name, result in results.items()}
        for name, row in check(part, tuple(map(dense, tensors)), of_part, limit).items():
            so_far = worst.setdefault(name, row)
            for key, value in row.items():
                if key == "correct":
                    so_far[key] = so_far[key] and value
                elif isinstance(value, float):
                    so_far[key] = max(so_far[key], value)
                elif isinstance(value, tuple):
                    so_far[key] = tuple(map(max, so_far[key], value))
    return worst
