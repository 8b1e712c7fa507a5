"""bench/simulate.py: reading machine code, and simulations of which the result is known."""

from __future__ import annotations

import dataclasses

import pytest
from support import cuobjdump

from bench import simulate
from bench.simulate import CYCLES, Instruction, Partition
from flash_cute import ops

#: As `cuobjdump -sass` prints it: an instruction's two words, its control bits in the second.
CODE = """
        /*0010*/                   LDSM.16.M88.4 R144, [R152+0x4000] ;      /* 0x0040000098900000 */
                                                                           /* 0x000e680000000200 */
        /*0020*/              @!P0 BRA 0x50 ;                               /* 0x0000000000000947 */
                                                                           /* 0x000fea0003800000 */
        /*0030*/                   FMNMX R17, R168, R169, !PT ;             /* 0x0000000000000000 */
                                                                           /* 0x000fc40007800000 */
        /*0040*/                   MUFU.EX2 R17, R17 ;                      /* 0x0000000000000000 */
                                                                           /* 0x000e240000000800 */
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R144, R4 ;   /* 0x0000000000000000 */
                                                                           /* 0x002fec0000041804 */
        /*0060*/              @P1 BRA 0x10 ;                                /* 0xfffffffc00000947 */
                                                                           /* 0x000fea000383ffff */
        /*0070*/                   EXIT ;                                   /* 0x000000000000794d */
                                                                           /* 0x000fea0003800000 */
        /*0080*/                   BRA 0x80 ;                               /* 0xfffffffc00fc7947 */
                                                                           /* 0x000fc0000383ffff */
"""


def instruction(text: str, stall: int = 1, written: int = 7, waits: int = 0) -> Instruction:
    return Instruction(text, 0, stall, written, 7, waits)


PRODUCT = instruction("HMMA.16816.F32.BF16 R4, R8, R12, R4")
EXPONENTIAL = instruction("MUFU.EX2 R4, R5")
FETCH = instruction("LDSM.16.M88.4 R12, [R20]", written=0)
#: Ten products that wait for what comes from shared memory.
FED = [FETCH, dataclasses.replace(PRODUCT, waits=1), *[PRODUCT] * 9]


def test_instructions_and_their_control_bits() -> None:
    load, branch, maximum, exponential, product, loop, end, trap = simulate.parse(CODE)
    assert (load.unit, load.stall, load.written, load.read, load.waits) == ("shared", 4, 1, 7, 0)
    assert (branch.target, branch.always_jumps) == (0x50, False)
    assert (maximum.unit, maximum.stall, maximum.written) == ("integer", 2, 7)
    assert (exponential.unit, exponential.written) == ("special", 0)
    assert (product.unit, product.stall, product.waits) == ("tensor", 6, 2)
    assert (loop.target, end.target, end.unit) == (0x10, None, "")
    assert end.always_jumps and trap.always_jumps and not loop.always_jumps


def test_the_usual_step_leaves_out_what_is_rare() -> None:
    code = simulate.parse(CODE)
    way = [code[0], code[1], code[4], code[5]]
    assert simulate.usual_step(code) == way
    copying = dataclasses.replace(code[2], text="LDGSTS.E.128 [R4], desc[UR4][R6.64]")
    assert simulate.usual_step([*code[:2], copying, *code[3:]]) == [*code[:2], copying, *code[3:6]]
    with pytest.raises(ValueError, match="no loop has products"):
        simulate.usual_step([*code[:5], *code[6:]])


def test_rare_code_behind_the_end() -> None:
    """It jumps back into the loop, and is none itself."""
    texts = ("LDSM.16.M88.4 R4, [R5]", "@P2 BRA 0x60", "HMMA R4", "@P1 BRA 0x0", "STG [R4], R5",
             "EXIT", "FMNMX R4, R5, R6", "BRA 0x20", "BRA 0x80")  # fmt: skip
    code = [dataclasses.replace(instruction(x), address=16 * i) for i, x in enumerate(texts)]
    assert simulate.usual_step(code) == code[:4]


@pytest.mark.parametrize("seed", [0, 1])
def test_products_alone(seed: int) -> None:
    """One warp waits between its products; two keep the tensor cores busy."""
    step = [PRODUCT] * 100
    alone = Partition(step, blocks=1, warps=1, seed=seed).share_of_products()
    assert alone == pytest.approx(CYCLES["tensor"] / simulate.PRODUCT_SPACING, abs=0.01)
    assert Partition(step, blocks=2, warps=1, seed=seed).share_of_products() > 0.99


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_busiest_unit_is_the_limit(blocks: int) -> None:
    share = simulate.share_of_products([PRODUCT, EXPONENTIAL, EXPONENTIAL], blocks)
    assert share == pytest.approx(CYCLES["tensor"] / (2 * CYCLES["special"]), rel=0.02)


def test_more_warps_hide_more_waiting() -> None:
    shares = [simulate.share_of_products(FED, blocks) for blocks in (1, 2, 3)]
    assert shares == sorted(shares) and shares[0] < 0.7 and shares[2] > 0.9


def test_warps_of_a_block_meet() -> None:
    """One block of two warps has to wait where two blocks of one need not."""
    step = [instruction("BAR.SYNC 0x0"), *FED, *[EXPONENTIAL] * 10]
    apart = simulate.share_of_products(step, blocks=2)
    together = simulate.share_of_products(step, blocks=1, threads=256)
    assert together < apart


def test_the_kernels_of_the_library() -> None:
    """A step of 64 keys at head dim 64: of 32 rows a warp 64 products twice, 64 exponentials, and K
    and V of the next block."""
    if "sm_90" not in ops.build_info()["archs"]:
        pytest.skip("this build has no sm_90")
    kernels = simulate.sm80_kernels(cuobjdump("-sass", "-arch", "sm_90"))
    tile = "FwdConfigELi64ELi128ELi64ELi4ELb1ELi1E"
    (name,) = (x for x in kernels if tile in x and "DTypeE1" in x and "MaskKindE0" in x)
    step = simulate.usual_step(kernels[name])
    count = {name: sum(x.opcode.startswith(name) for x in step) for name in ("HMMA", "LDGSTS")}
    assert count == {"HMMA": 2 * 64, "LDGSTS": 8}
    assert sum(x.unit == "special" for x in step) == 64
    assert 0.5 < simulate.share_of_products(step, blocks=2, runs=2) < 0.8


@pytest.mark.parametrize(
    "threads, registers, smem_bytes, blocks",
    [(128, 168, 40 << 10, 3), (128, 169, 40 << 10, 2), (256, 128, 113 << 10, 2),
     (256, 128, 114 << 10, 1), (128, 32, 0, 16), (128, 168, 228 << 10, 0)],
)  # fmt: skip
def test_blocks_on_a_multiprocessor(
    threads: int, registers: int, smem_bytes: int, blocks: int
) -> None:
    assert simulate.blocks_on_multiprocessor(threads, registers, smem_bytes) == blocks
