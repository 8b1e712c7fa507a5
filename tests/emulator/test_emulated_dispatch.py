"""Which kernels a call gets, on emulated devices. In the library of the SM90 kernels, those of sm80
are left out: a call that is given to them says so. There, Hopper gets sm90 by default."""

from __future__ import annotations

import emulator
import pytest
import torch
from emulator import EmulationError, Emulator
from support import NOT_FOR_SM90, random_inputs

TO_SM80 = "kernel of sm80 was left out"
SCALE = 0.125


@pytest.fixture(scope="session")
def default(hopper) -> Emulator:
    """Calls that name no architecture."""
    return Emulator(hopper[torch.bfloat16].path, arch=0)


@pytest.fixture(scope="session")
def sm90(hopper) -> Emulator:
    return hopper[torch.bfloat16]


def inputs(len_k: int = 100):
    return random_inputs(2, 4, 70, 64, heads_kv=4, len_k=len_k, dtype=torch.bfloat16)


def test_hopper_gets_sm90(default, sm90):
    out, lse, counters = default.forward(*inputs(), SCALE)
    named_out, named_lse, _ = sm90.forward(*inputs(), SCALE)
    assert torch.equal(out, named_out) and torch.equal(lse, named_lse)
    assert counters.box_bytes > 0  # which the copy engine alone counts


@pytest.mark.parametrize("capability_major", [8, 10, 11, 12])
def test_every_other_device_gets_sm80(default, sm90, capability_major):
    with pytest.raises(EmulationError, match=TO_SM80):
        default.forward(*inputs(), SCALE, capability_major=capability_major)
    with pytest.raises(EmulationError, match=r"arch is 'sm90', but .*capability is not 9\.x"):
        sm90.forward(*inputs(), SCALE, capability_major=capability_major)


def test_hopper_splits_keys(default, sm90):
    """Where that keeps it busy, or as is asked for. Of parts each row's results are combined, which
    takes barriers of thread blocks."""
    q, k, v = random_inputs(1, 2, 1, 64, heads_kv=1, len_k=5000, dtype=torch.bfloat16)
    (out, lse, chosen), (named, _, _) = (e.forward(q, k, v, SCALE) for e in (default, sm90))
    assert torch.equal(out, named) and chosen.box_bytes > 0
    whole_out, whole_lse, whole = default.forward(q, k, v, SCALE, splits=1)
    assert chosen.block_barriers > 10 > whole.block_barriers
    torch.testing.assert_close(lse, whole_lse)
    torch.testing.assert_close(out, whole_out, rtol=2e-2, atol=1e-3)
    asked = default.forward(*inputs(200), SCALE, splits=2)[2]
    assert asked.block_barriers > default.forward(*inputs(200), SCALE)[2].block_barriers
    # Three tiles for five multiprocessors: parts would not spare a quarter.
    three = random_inputs(1, 3, 1, 64, len_k=5000, dtype=torch.bfloat16)
    assert default.forward(*three, SCALE, multiprocessors=5)[2].block_barriers == 3


FULL, TRIANGLE = {}, {"is_banded": True}
BAND = {"is_banded": True, "is_triangle": False}


@pytest.mark.parametrize(
    "head_dim, batch, heads, heads_kv, len_q, mask, block_m",
    [
        # On 132 multiprocessors. Of 256 rows 64 tiles, and 128: 128 and 256 of 128 rows.
        (64, 1, 16, 16, 1024, FULL, 128),
        (64, 1, 16, 16, 2048, FULL, 256),
        (64, 1, 16, 16, 2048, TRIANGLE, 128),
        (64, 1, 16, 16, 2048, BAND, 256),
        (64, 1, 16, 16, 4096, TRIANGLE, 256),
        # An eighth to a quarter less to do, in tiles that take two fifths more time for a row.
        (64, 16, 32, 32, 1152, FULL, 256),
        (64, 25, 32, 32, 640, FULL, 256),
        (64, 42, 32, 32, 384, TRIANGLE, 256),
        # Of 512 keys blocks of 96 waste an eighth.
        (96, 32, 21, 21, 512, FULL, 256),
        (96, 32, 21, 21, 512, TRIANGLE, 192),
        (96, 4, 21, 21, 4096, FULL, 192),
        (128, 32, 16, 16, 512, FULL, 128),
        (128, 8, 16, 16, 2048, FULL, 192),
        (128, 4, 16, 16, 4096, TRIANGLE, 192),
        # Heads that are rows of one sequence: 64 for a query, but no more.
        (128, 64, 64, 1, 6, FULL, 192),
        (128, 64, 128, 1, 128, TRIANGLE, 128),
    ],
)
def test_tiles_of_sm90(sm90, head_dim, batch, heads, heads_kv, len_q, mask, block_m):
    sizes = {"batch": batch, "heads": heads, "heads_kv": heads_kv}
    tile = sm90.tile(head_dim, len_q, max(len_q, 128), **sizes, **mask, multiprocessors=132)
    assert tile["block_m"] == block_m


@pytest.mark.parametrize("case", NOT_FOR_SM90)
def test_what_sm90_cannot_read_goes_to_sm80(default, sm90, case):
    change, scale, reason = NOT_FOR_SM90[case]
    scale = SCALE if scale is None else scale
    with pytest.raises(EmulationError, match=TO_SM80):
        default.forward(*change(*inputs()), scale)
    with pytest.raises(EmulationError, match=f"arch is 'sm90', but .*{reason}"):
        sm90.forward(*change(*inputs()), scale)


def test_enormous_strides_go_to_sm80(default, sm90, monkeypatch):
    def far_apart(x):
        tensor = as_c(x)
        tensor.strides[1] = 2**38
        return tensor

    as_c = emulator._as_c
    monkeypatch.setattr(emulator, "_as_c", far_apart)
    with pytest.raises(EmulationError, match=TO_SM80):
        default.forward(*inputs(), SCALE)
    with pytest.raises(EmulationError, match=r"arch is 'sm90', but .*a stride .* is 2\^40 bytes"):
        sm90.forward(*inputs(), SCALE)


def test_what_the_driver_refuses_goes_to_sm80(default, sm90):
    with pytest.raises(EmulationError, match=TO_SM80):
        default.forward(*inputs(), SCALE, refuses_tensor_maps=True)
    with pytest.raises(EmulationError, match=TO_SM80):
        default.forward(*inputs(200), SCALE, refuses_tensor_maps=True, splits=2)
    with pytest.raises(EmulationError, match=r"arch is 'sm90', but .*driver refused a tensor map"):
        sm90.forward(*inputs(), SCALE, refuses_tensor_maps=True)


def test_tiles_of_sm80_are_chosen_by_shared_memory_alone(default, sm90):
    with pytest.raises(EmulationError, match=TO_SM80):
        default.forward(*inputs(), SCALE, smem_limit=101376)
    with pytest.raises(EmulationError, match=r"arch is 'sm90', but .*smem_limit"):
        sm90.forward(*inputs(), SCALE, smem_limit=101376)
