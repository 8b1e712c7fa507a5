"""What the emulated machine counts in the forward kernels, for every row of the tile table: no bank
conflict anywhere, and traffic and work as few as they can be."""

from __future__ import annotations

import pytest
import torch
from cases import check
from emulator import ACCESSES
from support import poisoned, random_inputs

from flash_cute import ops

KB = 1024
# What a device lends to one block: sm_90, sm_80, sm_86.
LIMITS = [227 * KB, 163 * KB, 99 * KB]
TILES = {
    f"{t['head_dim']}-{t['block_m']}x{t['block_n']}-{t['warps']}-{t['column_warps']}": (t, limit)
    for limit in LIMITS
    for t in ops.tiles_for(limit)
}
KEY_BLOCKS = 3


@pytest.mark.parametrize("name", TILES)
def test_counts(emulator, name):
    tile, smem_limit = TILES[name]
    m, n, d = tile["block_m"], KEY_BLOCKS * tile["block_n"], tile["head_dim"]
    sharing = tile["column_warps"]  # warps that have a row together
    readers = tile["warps"] // sharing  # that read all of K and V, alone or together
    inputs = random_inputs(1, 1, m, d, len_k=n, dtype=torch.bfloat16)
    counters = check(emulator, *map(poisoned, inputs), smem_limit=smem_limit)[2]

    assert {access: getattr(counters, access).conflicts for access in ACCESSES} == dict.fromkeys(
        ACCESSES, 0
    )
    # Each chunk of 16 bytes, 8 elements, goes from global to shared memory once, 8 at a time.
    assert counters.global_reads_16 == (m + 2 * n) * d // 8 and counters.global_reads == 0
    assert counters.copy_async.wavefronts == (m + 2 * n) * d // 64
    # Of Q each warp reads its rows, once or for each block of keys; likewise of a P that it shares.
    p = m * n // 64 if sharing > 1 else 0
    assert counters.load_matrix.wavefronts - readers * 2 * n * d // 64 - sharing * p in (
        sharing * m * d // 64,
        sharing * KEY_BLOCKS * m * d // 64,
    )
    # Two products of 16 x 8 x 16.
    assert counters.mma == 2 * m * n * d // (16 * 8 * 16)
    # O and P go through shared memory in words, O leaves in chunks; the LSE leaves in words. Of
    # shared rows a warp tells a word each, of 8 at a time, and reads everybody's: the maxima of the
    # first block, after which no row rises here, and the sums.
    words = 2 * sharing * m // 8 if sharing > 1 else 0
    assert counters.store.wavefronts == m * d // 2 // 32 + p + words
    assert counters.load.wavefronts == m * d // 64 + words * sharing
    assert (counters.global_writes_16, counters.global_writes) == (m * d // 8, m)
    # Two a block of keys; with two of these in shared memory, one, and another ahead of the first;
    # one before O is read. Of shared rows one for each P, and those of maxima and sums.
    shared = 2 + KEY_BLOCKS if sharing > 1 else 0
    of_blocks = KEY_BLOCKS + 1 if tile["stages"] == 2 else 2 * KEY_BLOCKS
    assert counters.block_barriers == 1 + of_blocks + shared


@pytest.mark.parametrize(
    "head_dim, flops", [(32, 32.0), (64, 32.0), (96, 25.6), (128, 21.3), (192, 14.2), (256, 14.2)]
)
def test_flops_for_each_byte_of_shared_memory(emulator, head_dim, flops):
    """Of the tiles for 99 KB, as notes/sm80_forward.md has them: what a block of keys adds."""
    (tile,) = (t for t in ops.tiles_for(LIMITS[-1]) if t["head_dim"] == head_dim)
    m, n = tile["block_m"], tile["block_n"]
    read = []
    for key_blocks in (2, 3):
        inputs = random_inputs(1, 1, m, head_dim, len_k=key_blocks * n, dtype=torch.bfloat16)
        counters = check(emulator, *inputs, smem_limit=LIMITS[-1])[2]
        read.append(128 * counters.load_matrix.wavefronts)
    assert round(4 * m * n * head_dim / (read[1] - read[0]), 1) == flops


def has_halves(tile):
    """Whether a warp has two MMAs along the rows, one in each half of the tile, and all columns."""
    return tile["block_m"] == 32 * tile["warps"]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", TILES)
def test_products_of_few_rows(emulator, name, is_causal):
    """A tile that has no more than half of its rows multiplies no others, except under a mask at
    head dim 128; to a single row, as in decoding, a causal mask is none."""
    tile, smem_limit = TILES[name]
    m, n, d = tile["block_m"], KEY_BLOCKS * tile["block_n"], tile["head_dim"]
    for rows in (1, 2, m // 2, m // 2 + 1):
        takes_half = has_halves(tile) and (rows == 1 or not (is_causal and d == 128))
        halves = 1 if takes_half and rows <= m // 2 else 2
        inputs = random_inputs(1, 1, rows, d, len_k=n, dtype=torch.bfloat16)
        counters = check(emulator, *map(poisoned, inputs), is_causal, smem_limit=smem_limit)[2]
        assert counters.mma == halves * m * n * d // (16 * 8 * 16)


@pytest.mark.parametrize("name", TILES)
def test_products_under_a_causal_mask(emulator, name):
    """Of a square tile on the diagonal a quarter is neither seen nor computed, if a warp has two
    MMAs along the rows: those of the first half see nothing of the keys of the second."""
    tile, smem_limit = TILES[name]
    m, d = tile["block_m"], tile["head_dim"]
    inputs = random_inputs(1, 1, m, d, dtype=torch.bfloat16)
    counters = check(emulator, *map(poisoned, inputs), is_causal=True, smem_limit=smem_limit)[2]
    leaves_out = has_halves(tile) and tile["block_n"] <= m // 2
    quarters = 3 if leaves_out else 4
    assert counters.mma == quarters * 2 * m * m * d // (16 * 8 * 16) // 4
