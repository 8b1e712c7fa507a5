"""What only a GPU can show of the backward: tiles, order and repeats, memory, graphs, launches.
Numbers are in test_backward.py.
"""

from __future__ import annotations

import functools
import math

import pytest
import support
import torch
from support import (
    GPU_KERNELS,
    HEAD_DIM_PAIRS,
    HEAD_DIMS,
    LARGE_HEAD_DIMS,
    check_gradients,
    gpu_has_sm90,
    launched,
    poisoned,
    random_inputs,
    run,
    tuning_of,
)
from test_gpu import needs_memory, peak_memory

import flash_cute
from flash_cute import ops, tolerance

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: What sm_80, and sm_86, sm_89 and sm_120 lend a CTA.
SHARED_MEMORY = {"default": 0, "163 KB": 166912, "99 KB": 101376}
MODES_AND_LENGTHS = ((300, 300, False), (129, 1000, False), (700, 200, False), (129, 1000, True))
BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def gpu_inputs(*sizes: int, **options):
    return random_inputs(*sizes, **{"dtype": BF16, "device": "cuda", **options})


def arguments(*sizes: int, is_causal: bool = True, **options):
    """Of `bwd`, with a random dout and dlse."""
    q, k, v = gpu_inputs(*sizes, **options)
    out, lse = flash_cute.forward(q, k, v, is_causal)
    return torch.randn_like(out), q, k, v, out, lse, torch.randn_like(lse)


def causal_gradients(args, **options):
    return ops.bwd(*args, window_right=0, **options)[:3]


@BOTH_MASKS
@pytest.mark.parametrize("smem_limit", SHARED_MEMORY.values(), ids=SHARED_MEMORY)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, *LARGE_HEAD_DIMS])
def test_tiles(head_dim, smem_limit, is_causal):
    for len_q, len_k, deterministic in MODES_AND_LENGTHS:
        inputs = gpu_inputs(1, 6, len_q, head_dim, heads_kv=2, len_k=len_k)
        options = {"smem_limit": smem_limit, "deterministic": deterministic}
        check_gradients(*map(poisoned, inputs), is_causal, **options)


@pytest.mark.parametrize("smem_limit", SHARED_MEMORY.values(), ids=SHARED_MEMORY)
@pytest.mark.parametrize("head_dim, head_dim_v", HEAD_DIM_PAIRS)
def test_tiles_of_two_head_dims(head_dim, head_dim_v, smem_limit):
    for len_q, len_k, deterministic in MODES_AND_LENGTHS:
        inputs = gpu_inputs(1, 6, len_q, head_dim, heads_kv=2, len_k=len_k, head_dim_v=head_dim_v)
        options = {"smem_limit": smem_limit, "deterministic": deterministic}
        check_gradients(*map(poisoned, inputs), True, **options)


@BOTH_MASKS
@pytest.mark.parametrize("head_splits", [1, 2, 3, 1000])
@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
@GPU_KERNELS
def test_ctas_that_share_a_group(kernels, head_dim, head_splits, is_causal):
    inputs = gpu_inputs(2, 10, 200, head_dim, heads_kv=2, len_k=333)
    for deterministic in (False, True):
        options = {"head_splits": head_splits, "deterministic": deterministic}
        check_gradients(*map(poisoned, inputs), is_causal, **options)


@pytest.fixture
def other_work():
    """Another stream keeps most multiprocessors busy."""
    a = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    stream = torch.cuda.Stream()

    def start(count: int = 40):
        with torch.cuda.stream(stream):
            for _ in range(count):
                torch.mm(a, a)

    yield start
    torch.cuda.synchronize()


MASKS = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 99, "window_right": 9},
    "narrow window": {"window_left": 64, "window_right": 64},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length, heads_kv", [(128, 4), (1000, 4), (1000, 1)])
@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [*((d, d) for d in (32, 64, 96, 128, 192, 256, 320, 512, 1024)), (192, 128)],
)
@GPU_KERNELS
def test_repeats_are_bitwise_equal(
    kernels, head_dim, head_dim_v, length, heads_kv, mask, other_work, request
):
    """dk and dv always; dq too where that is asked for."""
    if kernels == "other" and head_dim > 256:
        pytest.skip("there all get sm80's kernels")
    q, k, v = gpu_inputs(2, 8, length, head_dim, heads_kv=heads_kv, head_dim_v=head_dim_v)
    out, lse = ops.fwd(q, k, v, **MASKS[mask])
    args = torch.randn_like(out), q, k, v, out, lse, torch.randn_like(lse)

    def gradients(**options):
        return ops.bwd(*args, **MASKS[mask], **options, tuning=tuning_of())[:3]

    other_work()
    first = gradients(deterministic=True)
    for i in range(1000 if request.config.getoption("--full") else 30):
        if i % 10 == 0:
            other_work(10)
        assert all(map(torch.equal, gradients(deterministic=True), first))
        assert all(map(torch.equal, gradients()[1:], first[1:]))
    dq = gradients()[0]
    bound = 2 * torch.finfo(BF16).eps * dq.float().abs().max().item()
    torch.testing.assert_close(dq, first[0], rtol=0, atol=bound)


def test_deterministic_by_argument_and_by_torch():
    q, k, v = (x.requires_grad_() for x in gpu_inputs(2, 16, 2000, 64))

    def gradients(deterministic):
        out, _ = flash_cute.forward(q, k, v, True, deterministic=deterministic)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    expected = gradients(True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            assert all(map(torch.equal, gradients(None), expected))
    finally:
        torch.use_deterministic_algorithms(False)


@BOTH_MASKS
@pytest.mark.parametrize("heads_kv", [16, 2])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_blocks_of_dq_that_ctas_share(head_dim, heads_kv, is_causal, other_work):
    """sm90: hundreds of CTAs put finished blocks of dq into a queue, and take them from it."""
    args = arguments(8, 16, 1024, head_dim, heads_kv=heads_kv, is_causal=is_causal)
    band = {"window_right": 0} if is_causal else {}
    first = ops.bwd(*args, **band, deterministic=True)[0]
    in_order = first.float()
    first.fill_(math.nan)  # whose memory the next one gets: a block that nobody makes is NaN
    bound = 2 * torch.finfo(BF16).eps * in_order.abs().max().item()
    for i in range(40):
        if i % 10 == 5:
            other_work(10)
        dq = ops.bwd(*args, **band)[0]
        assert (dq.float() - in_order).abs().max().item() <= bound
        dq.fill_(math.nan)


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_and_nothing_else(deterministic):
    """Behind the preprocess one for all gradients, and one that makes dq of sums, or sm90's own for
    dq."""
    of_sums = 2 if gpu_has_sm90() and not deterministic else 3
    for length, head_dim, tuning, count in (
        (300, 64, "arch=80", 3),
        (300, 64, "", of_sums),
        (300, 256, "", 3),
        (100, 64, "", 2),  # one key block: dq is stored at once
        (300, 320, "", 4),  # a kernel for each gradient
    ):
        options = {"deterministic": deterministic, "tuning": tuning}
        call = functools.partial(
            causal_gradients, arguments(2, 4, length, head_dim, heads_kv=4), **options
        )
        assert len(launched(call)) == count, (length, head_dim, tuning)


@pytest.mark.parametrize("heads_kv, head_splits", [(8, 1), (2, 1), (2, 4)])
@pytest.mark.parametrize("head_dim, bucket", [(64, 64), (80, 96), (128, 128), (256, 256)])
def test_memory(head_dim, bucket, heads_kv, head_splits):
    """Gradients, 8 bytes a row, and dq in fp32, which is given back. CTAs that share a group have
    a dk and dv each."""
    args = arguments(2, 8, 2048, head_dim, heads_kv=heads_kv)
    peak, results = peak_memory(lambda: causal_gradients(args, tuning=f"head_splits={head_splits}"))
    rows, rows_kv = 2 * 8 * 2048, 2 * heads_kv * 2048
    gradients = (rows + 2 * rows_kv) * 2 * head_dim
    of_splits = head_splits * 2 * rows_kv * 4 * bucket if head_splits > 1 else 0
    assert peak <= gradients + rows * (8 + 4 * bucket) + of_splits + (2 << 20)
    held = torch.cuda.memory_allocated()
    del results
    assert held - torch.cuda.memory_allocated() <= gradients + (1 << 20)


def test_never_synchronises_and_runs_on_the_current_stream():
    args = arguments(2, 4, 300, 64)
    expected = causal_gradients(args, deterministic=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(2e8))
        late = [None if x is None else x.clone() for x in args]
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = causal_gradients(late, deterministic=True)
            assert not stream.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("deterministic", [False, True])
@GPU_KERNELS
def test_cuda_graph_of_a_training_step(kernels, deterministic):
    """Forward, backward and optimizer in one graph; replays train as eager steps do."""

    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(64, 3 * 64, device="cuda", dtype=BF16)

    def step(layer, optimizer, x):
        optimizer.zero_grad(set_to_none=True)
        q, k, v = layer(x).view(2, 300, 3, 2, 32).permute(2, 0, 3, 1, 4)
        options = {"deterministic": deterministic, "arch": support.preferred_arch}
        out, lse = flash_cute.forward(q, k, v, True, **options)
        loss = (out.transpose(1, 2).flatten(2) - x).square().mean() + 0.01 * lse.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(2, 300, 64, device="cuda", dtype=BF16)
    layer, other = model(), model()
    options = {"lr": 0.1, "foreach": False}
    optimizer, of_other = (torch.optim.SGD(y.parameters(), **options) for y in (layer, other))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        captured = step(layer, optimizer, x)
    losses = []
    for _ in range(20):
        graph.replay()
        losses.append(captured.item())
    expected = [step(other, of_other, x).item() for _ in range(23)][3:]
    assert losses[-1] < losses[0]
    if deterministic:
        assert losses == expected
    assert math.isclose(losses[-1], expected[-1], rel_tol=1e-2)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(128, 384), torch.nn.Linear(128, 128)

    def attend(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 64).permute(2, 0, 3, 1, 4)
        return self.out(flash_cute.forward(q, k, v, True)[0].transpose(1, 2).flatten(2))

    def forward(self, x):
        return x + torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False)


def test_compiled_with_dynamic_lengths_checkpoints_and_autocast():
    """One graph for all lengths."""
    block = Block().cuda()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    for length in (300, 64, 777):
        x = torch.randn(2, length, 128, device="cuda")
        gradients = []
        for function in (block, compiled):
            block.zero_grad()
            with torch.autocast("cuda", BF16):
                loss = function(x).square().mean()
            loss.backward()
            gradients.append([p.grad.clone() for p in block.parameters()])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * b.abs().max().item())
    assert counter.frame_count == 1


def _process(rank: int, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"tcp://localhost:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,))
    x = torch.randn(4, 300, 128, generator=torch.Generator().manual_seed(1)).cuda()

    def loss(model, x):
        with torch.autocast("cuda", BF16):
            return model(x).square().mean()

    expected = Block().cuda()
    loss(expected, x).backward()
    for parallel in (torch.nn.parallel.DistributedDataParallel, fully_shard):
        block = Block().cuda()
        wrapped = parallel(block, **({"mesh": mesh} if parallel is fully_shard else {}))
        loss(wrapped, x[2 * rank : 2 * rank + 2]).backward()
        for a, b in zip(block.parameters(), expected.parameters(), strict=True):
            gradient = a.grad.full_tensor() if parallel is fully_shard else a.grad
            torch.testing.assert_close(gradient, b.grad, rtol=0, atol=2e-2 * b.grad.abs().max())
    qkv = [x.requires_grad_() for x in gpu_inputs(2, 4, 300, 64, heads_kv=2)]
    whole = torch.autograd.grad(flash_cute.forward(*qkv, True)[0].square().sum(), qkv)
    for dim in (0, 1):  # batch, heads
        placements = [Shard(dim)]
        sharded = [distribute_tensor(x.detach(), mesh, placements).requires_grad_() for x in qkv]
        out, _ = flash_cute.forward(*sharded, True)
        gradients = torch.autograd.grad(out.full_tensor().square().sum(), sharded)
        for a, b in zip(gradients, whole, strict=True):
            bound = 2e-2 * b.abs().max().item()
            torch.testing.assert_close(a.full_tensor(), b, rtol=0, atol=bound)
    dist.destroy_process_group()


def test_two_gpus():
    """Data parallel, FSDP2, and tensors that are sharded over batch or heads."""
    import socket

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_process, (port,), nprocs=2)


def test_many_heads():
    """More than 65,535 of them."""
    q, k, v = gpu_inputs(300, 256, 8, 16)
    out, lse = flash_cute.forward(q, k, v)
    gradients = ops.bwd(torch.ones_like(out), q, k, v, out, lse)[:3]
    part = slice(299, 300)
    result = tolerance.compare_gradients(
        [x[part] for x in gradients], torch.ones_like(out[part]), q[part], k[part], v[part]
    )
    assert result.passed, str(result)


@GPU_KERNELS
def test_beyond_2_to_the_31_elements(kernels):
    """q, out and their gradients have 2.2e9 elements each."""
    needs_memory(48)
    q = torch.empty((2, 64, 131_200, 128), dtype=BF16, device="cuda").normal_(
        generator=torch.Generator("cuda").manual_seed(0)
    )
    k, v = gpu_inputs(2, 64, 1, 128, len_k=200)[1:]
    assert q.numel() > 2**31
    bwd = functools.partial(ops.bwd, tuning=tuning_of())
    out, lse = run(q, k, v)
    dq, dk, dv = bwd(out, q, k, v, out, lse)[:3]
    for b, h in ((0, 0), (1, 63)):
        part = (slice(b, b + 1), slice(h, h + 1))
        rows = (*part, slice(131_000, 131_200))
        expected = bwd(out[rows], q[rows], k[part], v[part], out[rows], lse[rows])[0]
        torch.testing.assert_close(dq[rows], expected, rtol=0, atol=1e-2)
        # All rows in halves give dk and dv, too.
        of_halves = [
            bwd(*(x[(*part, half)] for x in (out, q)), k[part], v[part],
                *(x[(*part, half)] for x in (out, lse)))
            for half in (slice(0, 65_600), slice(65_600, None))
        ]  # fmt: skip
        for whole, halves in ((dk, 1), (dv, 2)):
            total = of_halves[0][halves].float() + of_halves[1][halves].float()
            bound = 2e-2 * total.abs().max().item()
            torch.testing.assert_close(whole[part].float(), total, rtol=0, atol=bound)


@GPU_KERNELS
def test_keys_beyond_2_to_the_31_elements(kernels):
    """k, v and their gradients have 2.2e9 elements each. The rows of dout lie far apart."""
    needs_memory(48)
    size = 2, 64, 131_200, 128
    k, v = (torch.empty(size, dtype=BF16, device="cuda").normal_() for _ in range(2))
    q = gpu_inputs(2, 64, 129, 128)[0]
    bwd = functools.partial(ops.bwd, tuning=tuning_of())
    out, lse = run(q, k, v)
    dout = torch.randn((129, 2, 64, 131_200), dtype=BF16, device="cuda")
    dout = dout.permute(1, 2, 0, 3)[..., -128:]
    assert dout.stride(2) * dout.shape[2] > 2**31
    dq, dk, dv = bwd(dout, q, k, v, out, lse)[:3]
    for b, h in ((0, 0), (1, 63)):
        part = (slice(b, b + 1), slice(h, h + 1))
        rest = [x[part].contiguous() for x in (dout, q, k, v, out, lse)]
        for gradient, expected in zip((dq, dk, dv), bwd(*rest)[:3], strict=True):
            bound = 1e-2 * expected.float().abs().max().item()
            torch.testing.assert_close(gradient[part], expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": lambda x: x[..., :8]}, "same head dim"),
        ({"v": lambda x: x.half()}, "q, k and v must be all float16, all bfloat16 or all float32"),
        ({"k": lambda x: x.cpu()}, "q, k and v must be on the same CUDA device"),
        ({"out": lambda x: x[:, :, 1:]}, "out must have q's shape"),
        ({"v": lambda x: x[..., :32]}, "out must have q's shape with v's head dim"),
        ({"out": lambda x: x.half()}, "out must be of q's dtype"),
        ({"out": lambda x: x.cpu()}, "out must be on q's device"),
        ({"dout": lambda x: x[..., 1:]}, "dout must have q's shape"),
        ({"dout": lambda x: x.float()}, "dout must be of q's dtype"),
        ({"dout": lambda x: x.cpu()}, "dout must be on q's device"),
        ({"lse": lambda x: x[..., None]}, "softmax_lse must have q's shape without the head dim"),
        ({"lse": lambda x: x.double()}, "softmax_lse must be float32"),
        ({"lse": lambda x: x.cpu()}, "softmax_lse must be on q's device"),
        ({"dlse": lambda x: x.half()}, "dlse must be float32"),
        ({"dlse": lambda x: x.cpu()}, "dlse must be on q's device"),
    ],
)
def test_the_op_itself_guards_memory(change, message):
    names = "dout", "q", "k", "v", "out", "lse", "dlse"
    args = dict(zip(names, arguments(1, 2, 65, 64), strict=True))
    for name, of in change.items():
        args[name] = of(args[name])
    with torch._C._AutoDispatchBelowAutograd(), pytest.raises(RuntimeError, match=message):
        ops.bwd(*args.values())
    with pytest.raises(RuntimeError, match="tuning has 'heads': it must be one of"):
        causal_gradients(arguments(1, 2, 65, 64), tuning="heads=1")
    with torch._C._AutoDispatchBelowAutograd(), pytest.raises(RuntimeError, match="must be finite"):
        causal_gradients(arguments(1, 2, 65, 64), softmax_scale=math.inf)
