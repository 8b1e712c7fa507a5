"""Small calls of every kernel for NVIDIA's compute-sanitizer: `make sanitize` runs it under each of
its tools, and says which. Inputs come from the host, so that initcheck knows them as written.
racecheck wants a build with NVCC_APPEND_FLAGS=-DFLASH_CUTE_RACECHECK (csrc/cute_fa2/sm90/hopper.h).
It is too slow for the calls of many tiles, and makes the others. `sanitize.py racecheck 0 6` makes
the first of six shares of them.
"""

from __future__ import annotations

import functools
import itertools
import sys

import torch

from flash_cute import ops

#: The tiles of sm_86, sm_89 and sm_120, which lend a CTA 99 KB.
SMALL_SHARED_MEMORY = "smem_limit=101376"

#: (Hq, Hkv, Nq, Nk, causal): ragged on both sides, one and several key blocks, rows that see no
#: key; one query, and several, of heads that share tiles.
SHAPES = [
    (2, 1, 200, 200, True),
    (2, 1, 70, 193, False),
    (2, 1, 130, 33, True),
    (8, 2, 1, 193, False),
    (20, 1, 3, 70, True),
    (40, 1, 2, 70, False),
]
#: More tiles than a GPU has multiprocessors; with these lengths each tile of sm90 has its turn on
#: one of 132, whole and as subtiles.
LARGE_SHAPES = [
    (280, 140, len_q, 129, is_causal) for len_q in (130, 200) for is_causal in (False, True)
]
#: (D, Dv), where they differ. Of the first two, whole TMA boxes lie outside of v, or of q and k.
HEAD_DIM_PAIRS = [(128, 8), (8, 128), (192, 128)]
#: Lengths of packed sequences: few tiles, and more than a GPU has multiprocessors.
PACKED = [[5, 0, 130, 1, 70], [64, 128, 257], [7000, 100]]


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("sanitize.py needs a GPU")
    torch.manual_seed(0)
    share, shares = map(int, sys.argv[2:] or (0, 1))
    is_slow = sys.argv[1:2] == ["racecheck"]
    # initcheck does not see what TMA stores: to it nobody writes sm90's `out`, sums of dq, or dk
    # and dv where they are stored as they are.
    knows_out = sys.argv[1:2] != ["initcheck"]
    build = ops.build_info()
    has_sm90 = torch.cuda.get_device_capability()[0] == 9 and "sm_90a" in build["archs"]
    head_dims = [(head_dim, head_dim) for head_dim in build["head_dims"]]
    dtypes = [torch.float16, torch.bfloat16][0 if "fp16" in build["dtypes"] else 1 :]
    dense = [
        *itertools.product([*head_dims, (72, 72), (100, 100), *HEAD_DIM_PAIRS], SHAPES, dtypes),
        *itertools.product(head_dims, [] if is_slow else LARGE_SHAPES, [torch.bfloat16]),
        *itertools.product([(64, 64), (128, 128), (256, 256), (100, 40)], SHAPES, [torch.float32]),
    ]
    for (head_dim, head_dim_v), shape, dtype in dense[share::shares]:
        heads, heads_kv, len_q, len_k, is_causal = shape
        q = torch.randn(1, heads, len_q, head_dim).to("cuda", dtype)
        k = torch.randn(1, heads_kv, len_k, head_dim).to("cuda", dtype)
        v = torch.randn(1, heads_kv, len_k, head_dim_v).to("cuda", dtype)
        window_right = 0 if is_causal else -1
        call = functools.partial(ops.fwd, q, k, v, window_right=window_right)
        sm80 = functools.partial(call, softmax_scale=-0.1)
        assert_close(sm80(tuning="arch=80"), sm80(tuning=SMALL_SHARED_MEMORY))
        if len_k > 128:  # more than one block
            assert_close(sm80(tuning="splits=2"), sm80(tuning="splits=1"))
        has_sm90_too = has_sm90 and dtype != torch.float32
        if has_sm90_too and (knows_out or head_dim_v % 8 == 0):  # else `out` is copied, so read
            sm90 = functools.partial(call, softmax_scale=0.1)
            assert_close(sm90(tuning="arch=90"), sm90(tuning="arch=80"), knows_out)
            if len_k > 128:
                splits = (sm90(tuning=f"arch=90,splits={count}") for count in (2, 1))
                assert_close(*splits, knows_out)
        if shape in SHAPES:
            dout = torch.randn(*q.shape[:3], head_dim_v).to("cuda", dtype)
            dlse = torch.randn(q.shape[:3]).to("cuda") if dtype == torch.float16 else None
            inputs = dout, q, k, v, *call(tuning="arch=80"), dlse  # initcheck sees this `out`

            def bwd(inputs=inputs, window_right=window_right, **options):
                return ops.bwd(*inputs, window_right=window_right, **options)[:3]

            in_order = bwd(deterministic=True)
            for tuning in ("arch=80", SMALL_SHARED_MEMORY):
                assert_close(bwd(tuning=tuning), in_order)
            known = 3 if knows_out or not has_sm90_too else 1  # dq alone
            if known == 3 or head_dim % 8 == 0:  # else dk and dv are copied, so read
                whole = bwd(tuning="head_splits=1", deterministic=not knows_out)
                assert_close(whole[:known], in_order[:known])
    print("calls of head dims to 256 done", flush=True)
    large = [*itertools.product([*build["large_head_dims"], 257, 1000], SHAPES)]
    for head_dim, shape in large[share::shares]:
        heads, heads_kv, len_q, len_k, is_causal = shape
        q = torch.randn(1, heads, len_q, head_dim).to("cuda", torch.bfloat16)
        k, v = torch.randn(2, 1, heads_kv, len_k, head_dim).to("cuda", torch.bfloat16)
        window_right = 0 if is_causal else -1
        call = functools.partial(ops.fwd, q, k, v, window_right=window_right)
        sm80 = call(tuning="arch=80")
        assert_close(sm80, call(tuning=SMALL_SHARED_MEMORY))
        assert_close(call(tuning="arch=80,splits=2"), call(tuning="arch=80,splits=1"))
        if has_sm90 and head_dim <= 512 and (knows_out or head_dim % 8 == 0):
            assert_close(call(tuning="arch=90"), sm80, knows_out)
        inputs = torch.randn_like(q), q, k, v, *sm80
        first, second = (ops.bwd(*inputs, window_right=window_right)[:3] for _ in range(2))
        assert all(map(torch.equal, first, second))
    print("calls of larger head dims done", flush=True)
    lengths_of_calls = PACKED[:2] if is_slow else PACKED
    packed = [*itertools.product([*head_dims, *HEAD_DIM_PAIRS], lengths_of_calls)]
    for sizes, lengths in packed[share::shares]:
        check_packed(*sizes, lengths, ("arch=80", "arch=90") if has_sm90 else ("arch=80",))
    biased = [*((d, torch.bfloat16) for d in (*build["head_dims"], 320, 512))]
    biased += [(64, torch.float32), (100, torch.float32)]
    for head_dim, dtype in biased[share::shares]:
        check_biased(head_dim, dtype, has_sm90 and knows_out)
    narrow = [d for d in build["head_dims"] if has_sm90 and d <= 128]
    for head_dim in narrow[share::shares]:
        check_narrow(head_dim)
    print("all calls done")


def check_biased(head_dim: int, dtype: torch.dtype, has_sm90: bool) -> None:
    """A bias, of all scores and of keys, with its gradient."""
    q, dout = torch.randn(2, 2, 4, 150, head_dim).to("cuda", dtype)
    k, v = torch.randn(2, 2, 2, 193, head_dim).to("cuda", dtype)
    for shape in ((1, 4, 150, 193), (2, 1, 1, 193)):
        others = None, None, torch.randn(shape).to("cuda", dtype)
        call = functools.partial(ops.fwd, q, k, v, *others, window_right=60)
        results = call(tuning="arch=80,splits=1")
        assert_close(call(tuning="arch=80,splits=2"), results)
        bwd = functools.partial(ops.bwd, dout, q, k, v, *results, None, *others)
        bwd = functools.partial(bwd, window_right=60, bias_grad=True)
        gradients = bwd(tuning="arch=80", deterministic=True)
        if has_sm90:  # where it reads a bias
            assert_close(call(), results)
            for deterministic in (False, True):
                assert_close(bwd(deterministic=deterministic), gradients)


def check_narrow(head_dim: int) -> None:
    """Windows whose backward walks along the diagonal on sm90, of dense and packed sequences."""
    q, k, v, dout = torch.randn(4, 1, 3, 700, head_dim).to("cuda", torch.bfloat16)
    ends = torch.tensor([0, 5, 5, 300, 700]).int().to("cuda")
    for left, right in ((127, 0), (64, 64)):
        band = {"window_left": left, "window_right": right}
        for tensors, sequences in (
            ((q, k, v, dout), ()),
            ((x[0].transpose(0, 1) for x in (q, k, v, dout)), (None, None, None, ends, ends)),
        ):
            *qkv, given = tensors
            results = ops.fwd(*qkv, *sequences, **band, tuning="arch=80")
            bwd = functools.partial(ops.bwd, given, *qkv, *results, None, *sequences, **band)
            assert_close(bwd()[:3], bwd(tuning="arch=80", deterministic=True)[:3])


def check_packed(
    head_dim: int, head_dim_v: int, lengths: list[int], tunings: tuple[str, ...]
) -> None:
    """Packed sequences, with rows behind the last one, and a sink. initcheck does not see what TMA
    stores, so both backwards read the `out` of the first forward."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)]).int().to("cuda")
    tokens = sum(lengths) + 3
    q = torch.randn(tokens, 4, head_dim).to("cuda", torch.bfloat16)
    k = torch.randn(tokens, 2, head_dim).to("cuda", torch.bfloat16)
    v = torch.randn(tokens, 2, head_dim_v).to("cuda", torch.bfloat16)
    sequences = torch.randn(4).to("cuda"), None, None, ends, ends
    dout = torch.randn(tokens, 4, head_dim_v).to("cuda", q.dtype)
    dlse = torch.randn(4, tokens).to("cuda")
    is_initcheck = sys.argv[1:2] == ["initcheck"]
    results, gradients = [], []
    for tuning in tunings:
        call = functools.partial(ops.fwd, q, k, v, *sequences, window_right=0, window_left=90)
        results.append(call(tuning=tuning))
        # Short sequences are not split, so that TMA stores their `out`.
        wide = functools.partial(ops.fwd, q, k, v, *sequences, window_right=0)
        for whole, of_call in ((results[0], call), (wide(tuning="arch=80,splits=1"), wide)):
            in_splits = of_call(tuning=f"{tuning},splits=3")
            assert_close(in_splits, whole, compares_rounded=not is_initcheck)
        bwd = functools.partial(
            ops.bwd, dout, q, k, v, *results[0], dlse, *sequences, window_right=0, window_left=90
        )
        for deterministic in (True,) if is_initcheck else (False, True):
            # In sm90's backward pairs with 8 would leave strips of a tile without columns.
            of_bwd = tuning if min(head_dim, head_dim_v) > 8 else ""
            gradients.append(bwd(tuning=of_bwd, deterministic=deterministic)[:3])
    for found in results[1:]:
        assert_close(found, results[0], compares_rounded=not is_initcheck)
    known = 1 if is_initcheck else 3  # of dq, dk and dv
    for found in gradients[1:]:
        assert_close(found[:known], gradients[0][:known])


def assert_close(
    results: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    compares_rounded: bool = True,
) -> None:
    """Of an LSE, which is fp32, with less tolerance than of what is rounded."""
    for pair in zip(results, expected, strict=True):
        is_rounded = pair[0].dtype != torch.float32
        rtol, atol = (2e-2, 2e-2) if is_rounded else (0.0, 1e-5)
        if compares_rounded or not is_rounded:
            torch.testing.assert_close(*pair, rtol=rtol, atol=atol)


if __name__ == "__main__":
    main()
