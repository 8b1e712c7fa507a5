"""What only a GPU can show: streams, graphs, memory, addresses, the launch. Numbers are in
test_forward.py.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import support
import torch
from support import (
    GPU_KERNELS,
    HEAD_DIM_PAIRS,
    HEAD_DIMS,
    LARGE_HEAD_DIM_PAIRS,
    LARGE_HEAD_DIMS,
    check,
    gpu_archs,
    launched,
    poisoned,
    random_inputs,
    run,
)
from test_varlen import check_packed, padded_inputs

import flash_cute
from flash_cute import ops, tolerance

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: What sm_86, sm_89 and sm_120 lend a CTA.
SMALL_SHARED_MEMORY = 101376


def gpu_inputs(*sizes: int, **options):
    return random_inputs(*sizes, **{"dtype": BF16, "device": "cuda", **options})


@GPU_KERNELS
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_one_kernel_and_nothing_else(kernels, head_dim, is_causal):
    q, k, v = gpu_inputs(2, 4, 129, head_dim, heads_kv=2)
    (name,) = launched(lambda: run(q, k, v, is_causal))
    assert gpu_archs()[kernels == "other"] in name


@GPU_KERNELS
def test_no_copy_of_strided_rows(kernels):
    x = torch.randn(2, 70, 3, 4, 64, device="cuda", dtype=BF16)
    q, k, v = (x[:, :, i].transpose(1, 2) for i in range(3))
    k = k[:, :1].expand(2, 4, 70, 64)
    names = launched(lambda: run(q, k, v))
    assert len(names) == 1, names


def peak_memory(function) -> tuple[int, list[torch.Tensor]]:
    """The bytes that `function` takes at its peak, its results included, which are returned too."""
    function()
    gc.collect()  # garbage of other tests would go while this one measures
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a cached block that is a little too large counts as a whole
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = function()
    return torch.cuda.max_memory_allocated() - before, results


@GPU_KERNELS
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 104, 256])
def test_memory_is_that_of_the_results(kernels, head_dim, is_causal):
    q, k, v = gpu_inputs(2, 8, 2048, head_dim)
    peak, results = peak_memory(lambda: run(q, k, v, is_causal))
    sizes = [(x.shape, x.dtype) for x in results]
    del results
    # What they alone take, by the same allocator in the same state: blocks may be larger.
    expected, _ = peak_memory(
        lambda: [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in sizes]
    )
    assert peak == expected


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, *LARGE_HEAD_DIMS])
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_for_small_shared_memory(head_dim, is_causal):
    inputs = gpu_inputs(1, 4, 129, head_dim, heads_kv=2, len_k=200)
    check(*map(poisoned, inputs), is_causal, smem_limit=SMALL_SHARED_MEMORY)


@pytest.mark.parametrize("head_dim, head_dim_v", [*HEAD_DIM_PAIRS, *LARGE_HEAD_DIM_PAIRS])
def test_head_dims_of_v_for_small_shared_memory(head_dim, head_dim_v):
    inputs = gpu_inputs(1, 4, 129, head_dim, heads_kv=2, len_k=200, head_dim_v=head_dim_v)
    for splits in (1, 2):
        check(*map(poisoned, inputs), True, smem_limit=SMALL_SHARED_MEMORY, splits=splits)


def test_tiles_fit_this_gpu():
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for bytes_lent in (limit, SMALL_SHARED_MEMORY):
        tiles = ops.tiles_for(bytes_lent)
        info = ops.build_info()
        built = [*info["head_dims"], *info["large_head_dims"]]
        assert list(dict.fromkeys(tile["head_dim"] for tile in tiles)) == built
        assert all(tile["smem_bytes"] <= bytes_lent for tile in tiles)


@GPU_KERNELS
@pytest.mark.parametrize("is_causal", [False, True])
def test_runs_on_the_current_stream(kernels, is_causal):
    """Everything happens on a side stream behind a long wait; a kernel on another stream would read
    the zeros.
    """
    q, k, v = gpu_inputs(2, 4, 300, 64)
    expected = run(q, k, v, is_causal)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        results = run(late, k, v, is_causal)
        assert not stream.query()  # the wait goes on: nothing has waited for the GPU
    stream.synchronize()
    assert all(map(torch.equal, results, expected))


@GPU_KERNELS
def test_never_synchronises(kernels):
    inputs = gpu_inputs(2, 4, 300, 64)
    odd_rows = gpu_inputs(1, 2, 70, 20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*inputs, True)
        run(*odd_rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU_KERNELS
@pytest.mark.parametrize("head_dim", [64, 20])
def test_cuda_graph(kernels, head_dim):
    q, k, v = gpu_inputs(2, 4, 300, head_dim)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(q, k, v, True)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = run(q, k, v, True)
    for seed in (1, 2):
        for x, new in zip((q, k, v), gpu_inputs(2, 4, 300, head_dim, seed=seed), strict=True):
            x.copy_(new)
        graph.replay()
        assert all(map(torch.equal, captured, run(q, k, v, True)))


#: Batch, heads, heads of k and v, queries, keys, head dim: few tiles, which get split-KV.
FEW_TILES = {
    "one query": (1, 8, 2, 1, 20_000, 128),
    "a few": (2, 6, 2, 5, 9_000, 64),
    "one head": (1, 1, 1, 300, 5_000, 256),
    "two heads": (1, 2, 2, 300, 5_000, 128),
    "odd rows": (3, 4, 4, 1, 20_003, 20),
}


@pytest.fixture(params=FEW_TILES)
def few_tiles(request):
    batch, heads, heads_kv, len_q, len_k, head_dim = FEW_TILES[request.param]
    return gpu_inputs(batch, heads, len_q, head_dim, heads_kv=heads_kv, len_k=len_k)


@GPU_KERNELS
@pytest.mark.parametrize("splits", [0, 1, 3, 1000])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["fp16", "bf16"])
def test_split_kv(kernels, few_tiles, dtype, is_causal, splits):
    check(*(poisoned(x.to(dtype)) for x in few_tiles), is_causal, splits=splits)


@GPU_KERNELS
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_split_kv_at_every_head_dim(kernels, head_dim):
    inputs = gpu_inputs(2, 6, 130, head_dim, heads_kv=2, len_k=1500)
    check(*map(poisoned, inputs), True, splits=4)


@GPU_KERNELS
def test_many_splits_of_many_rows(kernels):
    check(*map(poisoned, gpu_inputs(1, 9, 130, 64, len_k=2**15)), True, splits=512)


@GPU_KERNELS
def test_split_kv_takes_two_kernels(kernels, few_tiles):
    q, k, v = few_tiles
    readable = q.shape[3] % 8 == 0
    names = launched(lambda: run(q, k, v))
    assert sum("CombineKernel" in name for name in names) == 1
    assert any(gpu_archs()[kernels == "other"] in name for name in names)
    assert len(names) == 2 or not readable, names


@GPU_KERNELS
@pytest.mark.parametrize("head_dim", [64, 128, 320])
def test_split_kv_of_sequences(kernels, head_dim):
    lengths_q, lengths_k = [1, 3, 1, 0, 0], [9000, 300, 20_000, 40, 0]
    inputs = padded_inputs(lengths_q, lengths_k, BF16, "cuda", (8, 2), head_dim)
    sink = torch.randn(8, device="cuda")
    for options in ({}, {"learnable_sink": sink}, {"softcap": 3.0}):
        check_packed(*inputs, lengths_q, lengths_k, True, 3, **options)
    q, k, v = inputs
    used = torch.tensor(lengths_k, dtype=torch.int32, device="cuda")
    result = flash_cute.forward(q, k, v, seqused_k=used, key_start=used // 3)
    options = {"seqused_k": used, "key_start": used // 3}
    comparison = tolerance.compare(*result, q, k, v, False, None, **options)
    assert comparison.passed, str(comparison)
    names = launched(lambda: flash_cute.forward(q, k, v, **options))
    assert sum("CombineKernel" in name for name in names) == 1, names


@GPU_KERNELS
def test_split_kv_on_streams_and_in_graphs(kernels, few_tiles):
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = run(*few_tiles)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:  # side by side, each with a workspace of its own
            with torch.cuda.stream(stream):
                results.append(run(*few_tiles))
    torch.cuda.synchronize()
    for result in results:
        assert all(map(torch.equal, result, expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*few_tiles), run(*few_tiles)
    for _ in range(2):
        few_tiles[0].neg_()
        graph.replay()
        for result in captured:
            assert all(map(torch.equal, result, run(*few_tiles)))


@GPU_KERNELS
@pytest.mark.parametrize("len_q, len_k", [(300, 300), (1, 9_000)], ids=["whole", "split-KV"])
def test_the_first_call_of_a_process_can_be_captured(kernels, tmp_path, len_q, len_k):
    program = f"""
import torch, flash_cute
q = torch.randn(1, 2, {len_q}, 128, device="cuda", dtype=torch.bfloat16)
k, v = torch.randn(2, 1, 2, {len_k}, 128, device="cuda", dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = flash_cute.forward(q, k, v, True, arch={support.preferred_arch!r})
graph.replay()
expected = flash_cute.forward(q, k, v, True, arch={support.preferred_arch!r})
assert all(map(torch.equal, captured, expected))
"""
    path = os.pathsep.join([str(Path(flash_cute.__file__).parent.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)


@GPU_KERNELS
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 20])
def test_repeats_are_bitwise_equal(kernels, head_dim, is_causal):
    inputs = gpu_inputs(2, 8, 1000, head_dim)
    first = run(*inputs, is_causal)
    for _ in range(10):
        assert all(map(torch.equal, run(*inputs, is_causal), first))


@GPU_KERNELS
def test_a_batch_item_does_not_depend_on_the_batch(kernels):
    """With the same tile, of which head dim 256 has one alone, and whole keys."""
    q, k, v = gpu_inputs(4, 8, 500, 256)
    out, lse = run(q, k, v, True)
    alone = run(q[2:3], k[2:3], v[2:3], True)
    assert torch.equal(out[2:3], alone[0]) and torch.equal(lse[2:3], alone[1])


@GPU_KERNELS
@pytest.mark.parametrize("sizes", [(70_000, 1), (1, 70_000), (300, 300)])
def test_many_heads(kernels, sizes):
    """More than a grid's y and z can count."""
    q, k, v = gpu_inputs(*sizes, 3, 32)
    out, lse = run(q, k, v, True)
    # As one head: nothing else is seen of the order in which they come.
    rows = q.reshape(1, -1, 3, 32), k.reshape(1, -1, 3, 32), v.reshape(1, -1, 3, 32)
    result = tolerance.compare(out.view_as(rows[0]), lse.view(1, -1, 3), *rows, True)
    assert result.passed, str(result)


def needs_memory(gigabytes: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, there are {free:.0f}")


@GPU_KERNELS
@pytest.mark.parametrize("order", ["bhnd", "bnhd"])
def test_beyond_2_to_the_31_elements(kernels, order):
    """q and out have 2.2e9 elements; the last head must come out right, and the first."""
    needs_memory(24)
    batch, heads, length, head_dim = 2, 64, 131_200, 128
    shape = (
        (batch, heads, length, head_dim) if order == "bhnd" else (batch, length, heads, head_dim)
    )
    q = torch.empty(shape, dtype=BF16, device="cuda").normal_(
        generator=torch.Generator("cuda").manual_seed(0)
    )
    q = q if order == "bhnd" else q.transpose(1, 2)
    k, v = gpu_inputs(batch, 1, 65, head_dim)[1:]
    assert q.numel() > 2**31
    out, lse = run(q, k, v)
    for b, h, rows in (
        (0, 0, slice(0, 300)),
        (1, 63, slice(length - 300, length)),
        (1, 31, slice(7, 300)),
    ):
        part = (slice(b, b + 1), slice(h, h + 1), rows)
        result = tolerance.compare(out[part], lse[part], q[part], k[b : b + 1], v[b : b + 1])
        assert result.passed, (b, h, str(result))


@GPU_KERNELS
def test_keys_beyond_2_to_the_31_elements(kernels):
    needs_memory(16)
    # One key and value tensor with rows far apart: 70,000 rows of 2^15 elements.
    storage = torch.zeros(70_000, 2**15, dtype=BF16, device="cuda")
    k_values, v_values = gpu_inputs(1, 1, 70_000, 64)[1:]
    storage[:, :64] = k_values[0, 0]
    storage[:, 64:128] = v_values[0, 0]
    k, v = storage[None, None, :, :64], storage[None, None, :, 64:128]
    q = gpu_inputs(1, 1, 100, 64)[0]
    assert k.stride(2) * k.shape[2] > 2**31
    check(q, k, v, True)


@GPU_KERNELS
def test_lengths_beyond_the_tiles_many_times_over(kernels):
    check(*gpu_inputs(1, 2, 4111, 64, len_k=5003), True)
    check(*gpu_inputs(1, 2, 2049, 128, len_k=4100, dtype=torch.float16))


@GPU_KERNELS
def test_current_device_is_not_the_tensors(kernels):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = gpu_inputs(2, 4, 129, 64)
    expected = run(*inputs, True)
    with torch.cuda.device(0):
        moved = run(*(x.to("cuda:1") for x in inputs), True)
        assert torch.cuda.current_device() == 0
    assert all(x.device.index == 1 for x in moved)
    assert all(torch.equal(a.to("cuda:0"), b) for a, b in zip(moved, expected, strict=True))


@pytest.mark.parametrize("arch", ["sm80", pytest.param("sm90", marks=pytest.mark.sm90)])
def test_the_first_call_of_a_thread(arch):
    """Nothing that it asks of CUDA ahead of the launch has bound the device's context to it."""
    inputs = gpu_inputs(1, 2, 129, 64)
    expected = [x.cpu() for x in run(*inputs, arch=arch)]  # leaves memory behind that is used again
    with ThreadPoolExecutor(1) as new_thread:
        results = new_thread.submit(run, *inputs, arch=arch).result()
    assert all(torch.equal(x.cpu(), y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q[0], k, v), "4 dimensions"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "bfloat16 or all float32"),
        (lambda q, k, v: (q, k.half(), v), "bfloat16 or all float32"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), "same heads and length"),
        (lambda q, k, v: (q, k[..., :32], v), "same head dim"),
        (lambda q, k, v: (q, k, v[..., :0]), "v's head dim must be 1 to 1024"),
        (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 17)), "v's head dim must be 1 to 1024"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple"),
        (lambda q, k, v: (q[:1], k, v), "batch size"),
    ],
)
def test_the_op_itself_guards_memory(change, message):
    """torch.ops can be called past the checks of `forward`."""
    with pytest.raises(RuntimeError, match=message):
        ops.fwd(*change(*gpu_inputs(2, 4, 65, 64, heads_kv=2)))


def test_the_op_refuses_what_cannot_be_launched():
    q, k, v = gpu_inputs(1, 1, 65, 64)
    with pytest.raises(RuntimeError):
        ops.fwd(q, k, v, softmax_scale=math.nan)
    with pytest.raises(RuntimeError):
        run(q, k, v, smem_limit=1024)  # no tile fits
    with pytest.raises(RuntimeError, match="arch is 75: it must be 80, 90, or 0"):
        ops.fwd(q, k, v, tuning="arch=75")
    with pytest.raises(RuntimeError, match="splits in tuning is -1: it must be 0 or more"):
        ops.fwd(q, k, v, tuning="splits=-1")
    with pytest.raises(RuntimeError, match="tuning has 'split': it must be arch, "):
        ops.fwd(q, k, v, tuning="arch=80,split=2")
    check(q, k, v)  # and nothing is left broken
