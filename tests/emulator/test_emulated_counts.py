"""What the emulated machine counts, for every entry of the tile tables: no bank conflicts, and
traffic and MMAs as few as they can be."""

from __future__ import annotations

import math

import pytest
import torch
from emulator import Emulator
from support import poisoned, random_inputs

from flash_cute import ops

KB = 1024
KEY_BLOCKS = 3
# What a device lends to one CTA: sm_90, sm_80, sm_86.
LIMITS = [227 * KB, 163 * KB, 99 * KB]


def name_of(tile):
    head_dims = "x".join(map(str, dict.fromkeys([tile["head_dim"], tile["head_dim_v"]])))
    return f"{head_dims}-{tile['block_m']}x{tile['block_n']}-{tile['warps']}"


SM80 = {f"{name_of(t)}-{t['column_warps']}": (t, lim) for lim in LIMITS for t in ops.tiles_for(lim)}
FP32 = {name_of(t): (t, lim) for lim in LIMITS for t in ops.tiles_for(lim, "fwd_fp32")}
BWD_OPS = "bwd", "bwd_fp32"
BWD_TILES = [
    (tile, limit) for limit in LIMITS for op in BWD_OPS for tile in ops.tiles_for(limit, op)
]
BWD = {
    f"{t['op']}-{name_of(t)}-{t['stages']}": (t, lim) for t, lim in BWD_TILES if "columns" not in t
}
# Of fp32 they serve where no other fits.
LARGE_BWD = {
    f"{t['op']}-{name_of(t)}-{t['stages']}": (
        t,
        t["smem_bytes"] if t["op"] == "bwd_fp32" else limit,
    )
    for t, limit in BWD_TILES
    if "columns" in t
}
SM90 = {
    f"{name_of(tile)}-{mask}": (tile, mask)
    for tile in ops.build_info()["tiles"]
    for mask in ("full", "banded")
    if (tile["arch"], tile["op"]) == ("sm90", "fwd") and tile["mask"] in ("any", mask)
}


def inputs_of(*sizes, **options):
    return map(poisoned, random_inputs(*sizes, dtype=torch.bfloat16, **options))


@pytest.mark.parametrize("name", SM80)
def test_sm80(sm80, name):
    tile, smem_limit = SM80[name]
    m, n, d = tile["block_m"], KEY_BLOCKS * tile["block_n"], tile["head_dim"]
    dv = tile["head_dim_v"]
    sharing = tile["column_warps"]  # warps that have a row together
    readers = tile["warps"] // sharing  # that read all of K and V, alone or together
    counters = sm80.check(*inputs_of(1, 1, m, d, len_k=n, head_dim_v=dv), smem_limit=smem_limit)[2]

    assert counters.bank_conflicts() == 0
    # Each chunk of 16 bytes, 8 elements, goes from global to shared memory once, 8 at a time.
    assert counters.global_reads_16 == (m * d + n * (d + dv)) // 8 and counters.global_reads == 0
    assert counters.copy_async.wavefronts == (m * d + n * (d + dv)) // 64
    # Of Q each warp reads its rows, once if it is in registers, or for each block of keys; likewise
    # of a P that it shares, for each group of V's columns that comes in a chunk.
    p = m * n // 64 if sharing > 1 else 0
    groups = dv // (tile["v_columns"] or dv)
    p_and_keys = sharing * groups * p + readers * n * (d + dv) // 64
    once = tile["q_in_registers"] or (tile["stages"] == 2 and not tile["k_columns"])
    q = (1 if once else KEY_BLOCKS) * sharing * m * d // 64
    assert counters.load_matrix.wavefronts == p_and_keys + q
    # Two gemms, in MMAs of 16 x 8 x 16.
    assert counters.mma == m * n * (d + dv) // (16 * 8 * 16)
    # O and P go through shared memory in words, O leaves in chunks; the LSE leaves in words. Of
    # shared rows a warp writes a word each, of 8 at a time, and reads everybody's: the maxima of
    # the first block, after which no row exceeds its limit here, and the sums.
    words = 2 * sharing * m // 8 if sharing > 1 else 0
    assert counters.store.wavefronts == m * dv // 2 // 32 + p + words
    assert counters.load.wavefronts == m * dv // 64 + words * sharing
    assert (counters.global_writes_16, counters.global_writes) == (m * dv // 8, m)
    # Two a block of keys, and one ahead of the first with Q in registers; with two blocks in shared
    # memory, one, and another ahead of the first; one before O is read. Of shared rows one for each
    # P, and those of maxima and sums. Of blocks in chunks one for each chunk, one for the vote on
    # limits, and one ahead of the first.
    shared = 2 + KEY_BLOCKS if sharing > 1 else 0
    blocks = KEY_BLOCKS + 1 if tile["stages"] == 2 else 2 * KEY_BLOCKS + tile["q_in_registers"]
    if tile["k_columns"]:
        of_v = tile["block_n"] // tile["v_keys"] * groups
        blocks = KEY_BLOCKS * (d // tile["k_columns"] + of_v + 1) + 1
    assert counters.cta_barriers == 1 + blocks + shared


@pytest.mark.parametrize("name", FP32)
def test_fp32(sm80, name):
    tile, smem_limit = FP32[name]
    m, n, d = tile["block_m"], KEY_BLOCKS * tile["block_n"], tile["head_dim"]
    inputs = map(poisoned, random_inputs(1, 1, m, d, len_k=n, dtype=torch.float32))
    counters = sm80.check(*inputs, smem_limit=smem_limit)[2]
    # Chunks of 16 bytes have 4 elements. Each goes to shared memory once.
    assert counters.global_reads_16 == (m + 2 * n) * d // 4 and counters.global_reads == 0
    assert counters.copy_async.wavefronts == (m + 2 * n) * d // 32
    # Each warp reads its rows of Q for each block of keys, and all of K; V in words.
    assert counters.load_matrix.wavefronts == (KEY_BLOCKS * m + tile["warps"] * n) * d // 32
    assert counters.load.wavefronts == (tile["warps"] * n + m) * d // 32
    # Three products for each of two gemms, in MMAs of 16 x 8 x 8.
    assert counters.mma == 3 * 2 * m * n * d // (16 * 8 * 8)
    # O alone has conflicts, on its way through shared memory: of two rows each.
    assert counters.bank_conflicts() == counters.store.conflicts == counters.store.wavefronts
    assert (counters.global_writes_16, counters.global_writes) == (m * d // 4, m)
    assert counters.cta_barriers == 1 + 2 * KEY_BLOCKS


@pytest.mark.parametrize("name", SM80)
def test_gemms_of_sm80(sm80, name):
    tile, smem_limit = SM80[name]
    m, n, d, dv = (tile[x] for x in ("block_m", "block_n", "head_dim", "head_dim_v"))
    # Whether a warp has two MMAs along the rows, one in each half of the tile, and all columns.
    has_halves = m == 32 * tile["warps"]

    def multiplied(rows, len_k, is_causal):
        inputs = inputs_of(1, 1, rows, d, len_k=len_k, head_dim_v=dv)
        return sm80.check(*inputs, is_causal, smem_limit=smem_limit)[2].mma * (16 * 8 * 16)

    # A tile with at most half of its rows multiplies only these, except under a mask at head dim
    # 128. To a single row, as in decoding, a causal mask is none.
    for rows in (1, m // 2, m // 2 + 1):
        for is_causal in (False, True):
            takes_half = has_halves and (rows == 1 or not (is_causal and d == 128))
            halves = 1 if takes_half and rows <= m // 2 else 2
            assert multiplied(rows, 2 * n, is_causal) == halves * m * n * (d + dv)
    # In a square tile on the diagonal, the upper half of the rows sees half of the keys.
    leaves_out = has_halves and n <= m // 2
    keys = math.ceil(m / n) * n
    assert multiplied(m, m, True) == (3 if leaves_out else 4) * m * keys * (d + dv) // 4


@pytest.mark.parametrize("name", BWD)
def test_backward(sm80, name):
    tile, smem_limit = BWD[name]
    blocks_q, blocks_k = 2, 2
    m, n, d = blocks_q * tile["block_m"], blocks_k * tile["block_n"], tile["head_dim"]
    is_fp32 = tile["op"] == "bwd_fp32"
    dtype = torch.float32 if is_fp32 else torch.bfloat16
    inputs = list(map(poisoned, random_inputs(1, 1, m, d, len_k=n, dtype=dtype)))
    counters = sm80.check_backward(*inputs, smem_limit=smem_limit)[1]

    assert counters.bank_conflicts() == 0
    # Five gemms, in MMAs of 16 x 8 x 16; in fp32 three times as many, of 16 x 8 x 8.
    assert counters.mma == 5 * m * n * d // (16 * 8 * 16) * (6 if is_fp32 else 1)
    # In chunks of 16 bytes: K and V once; Q and dO, and the statistics of two rows, once for each
    # block of keys. In words: dQ's sums and the LSE. And ahead of all, O and dO: in chunks, but g++
    # makes elements of them.
    elements = 4 if is_fp32 else 8  # of a chunk
    chunks = (2 * n * d + blocks_k * 2 * m * d) // elements + blocks_k * m // 2
    words = m * d + m
    ahead = counters.global_reads_16 - chunks
    assert elements * ahead + counters.global_reads - words == 2 * m * d
    # To dQ, which begins as zeros, each block of keys adds.
    assert counters.global_reductions == blocks_k * m * d
    assert counters.global_writes_16 == m * d // 4
    # Gradients leave in words of two elements, the two statistics of a row in words.
    assert counters.global_writes == (m + 2 * n) * d // 2 + 2 * m
    # In each step one when Q and dO are there, one when P and dS are; with one stage, another
    # before the next Q and dO arrive.
    assert counters.cta_barriers == blocks_q * blocks_k * (4 - tile["stages"])

    # One block of keys has dQ to itself. At head dim 256 it is summed all the same.
    inputs[1:] = (x[:, :, : tile["block_n"]] for x in inputs[1:])
    counters = sm80.check_backward(*inputs, smem_limit=smem_limit)[1]
    assert counters.global_reductions == (0 if d <= 192 else m * d)


@pytest.mark.parametrize("name", LARGE_BWD)
def test_backward_of_large_head_dims(sm80, name):
    tile, smem_limit = LARGE_BWD[name]
    d, groups = tile["head_dim"], tile["head_dim"] // tile["columns"]
    rows, other_rows = tile["block_n"], tile["block_m"]  # of a tile; of a block
    n = other_rows  # queries, and keys
    is_fp32 = tile["op"] == "bwd_fp32"
    dtype = torch.float32 if is_fp32 else torch.bfloat16
    inputs = map(poisoned, random_inputs(1, 1, n, d, len_k=n, dtype=dtype))
    counters = sm80.check_backward(*inputs, smem_limit=smem_limit)[1]

    assert counters.bank_conflicts() == 0
    # Gemms of S once for each gradient and group of columns, those of dP not for dV; one gemm for
    # each gradient. In MMAs of 16 x 8 x 16; in fp32 three times as many, of 16 x 8 x 8.
    gemms = (5 * groups + 3) * (6 if is_fp32 else 1)
    assert counters.mma == gemms * n * n * d // (16 * 8 * 16)
    assert counters.global_reductions == 0
    # Each chunk has a barrier, and so have the weights of a step, a tile's first chunk, and which
    # tile it is.
    steps = groups * (n // rows) * (n // other_rows)
    chunks, of_sum = d // tile["chunk_columns"], other_rows // tile["chunk_rows"]
    barriers = 5 * steps * chunks + 3 * steps * (of_sum + 1)
    assert counters.cta_barriers == barriers + 3 * 2 * groups * (n // rows)


@pytest.mark.parametrize("name", SM90)
def test_sm90(sm90, name):
    """Each serves two heads with as many queries as it has in a tile."""
    tile, mask = SM90[name]
    heads, d, m, n = 2, tile["head_dim"], tile["block_m"], KEY_BLOCKS * tile["block_n"]
    dv = tile["head_dim_v"]
    # Under a mask that keeps the last key from the first query.
    band = {"window_right": 0, "diagonal_offset": n - 2} if mask == "banded" else {}
    inputs = inputs_of(1, heads, m, d, len_k=n, head_dim_v=dv)
    counters = sm90.check(*inputs, **band, multiprocessors=1)[2]
    assert counters.bank_conflicts() == 0
    # TMA reads each element once, threads read none.
    assert counters.tma_load_bytes == heads * (m * d + n * (d + dv)) * 2
    assert counters.global_reads_16 == counters.global_reads == 0
    # It writes each once as well, from where it lies in shared memory once. Threads write the LSE.
    assert counters.tma_store_bytes == heads * m * dv * 2
    # Above head dim 256 P goes there, too.
    groups = tile["column_groups"]
    is_large = groups > 1
    assert counters.store_matrix.wavefronts == heads * m * (dv + is_large * n) * 2 // 128
    assert (counters.global_writes_16, counters.global_writes) == (0, heads * m)
    # The producer tells each consumer of the tiles and of the end, in 16 bytes. The consumer's four
    # warps read them, g++ word by word. Of a large head dim three consumers share a tile. Behind
    # each block, and at the end, one tells the two others by what they multiply their two rows;
    # without a mask these do not ask for a tile's last row.
    told = (heads + 1) * m // 64
    factors = is_large * 4 * heads * (KEY_BLOCKS + 1)
    words = 4 if not is_large else 3 * 4 - 2 * (mask == "full")
    stored_and_loaded = told + factors, 4 * words * told + 2 * groups * factors
    assert (counters.store.wavefronts, counters.load.wavefronts) == stored_and_loaded
    # 16 deep each: along the head for S, along the keys for O, of up to 256 columns, or 192.
    products_of_o = groups * math.ceil(dv / groups / (192 if is_large else 256))
    assert counters.wgmma == heads * m // 16 * (KEY_BLOCKS * d // 16 + products_of_o * n // 16)
    assert counters.cta_barriers == 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gemms_of_sm90(sm90, head_dim):
    # Consumers without rows have none.
    for len_q in (1, 64, 65, 300):
        sizes = {"heads_q": 1, "len_q": len_q, "len_k": 256, "head_dim": head_dim}
        n = sm90.plan(**sizes, multiprocessors=1, splits=1)["block_n"]
        inputs = inputs_of(1, 1, len_q, head_dim, len_k=256)
        counters = sm90.check(*inputs, multiprocessors=1, splits=1)[2]
        assert counters.wgmma == 4 * math.ceil(len_q / 64) * 256 // n * (head_dim + n) // 16
    # Under a causal mask each consumer stops at the last block of which its 64 rows see a key.
    sizes = {"len_q": 512, "len_k": 512, "head_dim": head_dim, "window_right": 0}
    n = sm90.plan(**sizes, multiprocessors=1)["block_n"]
    counters = sm90.check(*inputs_of(1, 1, 512, head_dim), True, multiprocessors=1)[2]
    blocks = sum(math.ceil(end / n) for end in range(64, 513, 64))
    assert counters.wgmma == 4 * blocks * (head_dim + n) // 16


def test_splits_read_keys_once(library):
    """And Q once for each, and of the splits' output, 4 bytes an element, all."""
    rows, len_k, d, splits = 20, 640, 64, 5
    elements = (splits * rows + 2 * len_k) * d
    for arch in (80, 90):
        inputs = inputs_of(1, 1, rows, d, len_k=len_k)
        counters = Emulator(library, arch).check(*inputs, splits=splits)[2]
        read_by_threads = splits * rows * d // 4 + (elements // 8 if arch == 80 else 0)
        assert counters.global_reads_16 == read_by_threads
        assert counters.tma_load_bytes == (2 * elements if arch == 90 else 0)
        assert counters.tma_store_bytes == 0


def test_packed_heads_read_the_keys_of_their_window_once(sm80):
    band = {"window_left": 10, "window_right": 0, "diagonal_offset": 100}
    inputs = inputs_of(1, 3, 1, 64, heads_kv=1, len_k=200)
    block_n = sm80.plan(head_dim=64)["block_n"]  # the window lies in one block
    assert sm80.check(*inputs, **band)[2].global_reads_16 == (3 + 2 * block_n) * 64 // 8
