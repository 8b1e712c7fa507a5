"""The kernels of sm80 and sm90 beside each other, on a GPU that runs both: which of them serve a
call, and that they agree. What holds for each of them alone is in test_forward.py and test_gpu.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support import (
    BANDS,
    HEAD_DIMS,
    LENGTHS,
    NOT_FOR_SM90,
    check,
    nan_in_new_memory,
    poisoned,
    random_inputs,
    run,
)

import flash_cute

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def gpu_inputs(*sizes: int, **options):
    return random_inputs(*sizes, **{"dtype": torch.bfloat16, "device": "cuda", **options})


def assert_both_agree(q, k, v, is_causal=False, **band):
    """Within what rounding the weights and the output to the dtype may do to each."""
    with nan_in_new_memory():
        out, lse = run(q, k, v, is_causal, arch="sm90", **band)
        expected_out, expected_lse = run(q, k, v, is_causal, arch="sm80", **band)
    what = f"{tuple(q.shape)}, {tuple(k.shape)}, causal {is_causal}, {band}"
    bound = 4 * torch.finfo(q.dtype).eps
    for a, b, rtol, atol in ((out, expected_out, bound, bound), (lse, expected_lse, 1e-6, 1e-5)):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


@DTYPES
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 320, 512])
def test_lengths_and_heads(dtype, head_dim):
    for (len_q, len_k), heads_kv, is_causal in itertools.product(LENGTHS, (4, 2, 1), (False, True)):
        inputs = gpu_inputs(2, 4, len_q, head_dim, heads_kv=heads_kv, len_k=len_k, dtype=dtype)
        assert_both_agree(*map(poisoned, inputs), is_causal)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 512])
def test_bands(dtype, head_dim):
    for (len_q, len_k), band in itertools.product(((129, 129), (100, 300), (700, 300)), BANDS):
        inputs = gpu_inputs(1, 4, len_q, head_dim, heads_kv=2, len_k=len_k, dtype=dtype)
        names = ("window_left", "window_right", "diagonal_offset")
        assert_both_agree(*map(poisoned, inputs), **dict(zip(names, band, strict=True)))


@pytest.mark.parametrize("group", [2, 3, 4, 5, 8, 33, 64, 65])
def test_few_queries_of_a_group(group):
    """The heads that share K and V are rows of one tile, as far as they fit."""
    for len_q, is_causal in itertools.product((1, 2, 5, 17, 64, 100, 191), (False, True)):
        inputs = gpu_inputs(2, 2 * group, len_q, 64, heads_kv=2, len_k=300)
        assert_both_agree(*map(poisoned, inputs), is_causal)
        band = {"window_left": 70, "window_right": 3, "diagonal_offset": 100}
        assert_both_agree(*inputs, **band)
    q, k, v = gpu_inputs(2, 2 * group, 3, 96, heads_kv=2, len_k=200)
    assert_both_agree(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, True)
    assert_both_agree(q[:, :1].expand(q.shape), k, v, True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_more_tiles_than_multiprocessors(head_dim, is_causal):
    """Each CTA has several tiles, and not all have equally many. The first get the large
    tiles of head dims 64 and 96, if there are 132 multiprocessors."""
    assert_both_agree(*gpu_inputs(8, 16, 512, head_dim), is_causal)
    assert_both_agree(*gpu_inputs(3, 16, 1100, head_dim, heads_kv=4, len_k=1500), is_causal)
    assert_both_agree(*gpu_inputs(1, 7, 5003, head_dim, heads_kv=7), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_thousand_repeats_are_bitwise_equal(is_causal):
    q, k, v = gpu_inputs(4, 16, 1000, 128, heads_kv=4)
    with nan_in_new_memory():
        first = run(q, k, v, is_causal, arch="sm90")
        differences = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            for a, b in zip(run(q, k, v, is_causal, arch="sm90"), first, strict=True):
                differences += (a != b).sum()
    assert differences.item() == 0


@pytest.mark.parametrize("case", NOT_FOR_SM90)
def test_what_sm90_cannot_read_goes_to_sm80(case):
    change, scale, reason = NOT_FOR_SM90[case]
    q, k, v = change(*gpu_inputs(2, 4, 129, 64, len_k=200))
    with pytest.raises(RuntimeError, match=f"arch is 'sm90', but .*{reason}"):
        run(q, k, v, softmax_scale=scale, arch="sm90")
    served, named = (run(q, k, v, softmax_scale=scale, arch=arch) for arch in (None, "sm80"))
    assert all(map(torch.equal, served, named))
    if case != "large scale":  # the tolerance is for ordinary scores
        check(q, k, v, softmax_scale=scale)


def test_expanded_heads_and_batch_are_read_by_sm90():
    q, k, v = gpu_inputs(2, 4, 129, 64)
    check(q[:1].expand(q.shape), k[:, :1].expand(k.shape), v[:1, :1].expand(v.shape), arch="sm90")
    q, k, v = gpu_inputs(2, 4, 129, 64, len_k=1)
    check(q, *(x.as_strided(x.shape, (*x.stride()[:2], 0, 1)) for x in (k, v)), arch="sm90")


def test_tiles_of_sm80_are_chosen_by_shared_memory_alone():
    q, k, v = gpu_inputs(1, 2, 129, 64)
    with pytest.raises(RuntimeError, match=r"arch is 'sm90', but .*smem_limit"):
        run(q, k, v, arch="sm90", smem_limit=101376)
    limited = [run(q, k, v, smem_limit=101376, arch=arch) for arch in (None, "sm80")]
    assert all(map(torch.equal, *limited))


def test_compiled_and_mapped_calls_take_the_named_kernels():
    q, k, v = gpu_inputs(3, 4, 129, 64)
    for arch in ("sm80", "sm90"):

        def forward(q, k, v, arch=arch):
            return flash_cute.forward(q, k, v, True, arch=arch)

        expected = forward(q, k, v)
        torch._dynamo.reset()
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
        assert all(map(torch.equal, compiled(q, k, v), expected))
        mapped = torch.vmap(forward)(q[None], k[None], v[None])
        assert all(torch.equal(a[0], b) for a, b in zip(mapped, expected, strict=True))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            cast = forward(q.float(), k.float(), v.float())
        assert all(map(torch.equal, cast, expected))
