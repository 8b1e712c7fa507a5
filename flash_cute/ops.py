"""Loads the compiled library: the ops `torch.ops.flash_cute.fwd` and `bwd`, and what else the
library tells.

The ops are defined, and implemented for CUDA, in csrc/cute_fa2/torch/. cpu.py implements them for
the CPU, autograd.py and transforms.py say what torch's transforms make of them.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any, TypedDict, cast

import torch

LIBRARY = Path(__file__).parent / "_flash_cute.so"


def _load(library: Path) -> None:
    if sys.platform == "win32":
        raise ImportError(
            "flash_cute does not run on Windows: use it under WSL 2, or use "
            "torch.nn.functional.scaled_dot_product_attention instead"
        )
    if not library.exists():
        raise ImportError(
            f"flash_cute's compiled library is missing ({library}): install the package with `pip "
            "install .` in the source tree, or, if it is installed, run Python outside of that tree"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise ImportError(
            f"flash_cute's compiled library does not load under torch {torch.__version__} (it "
            "needs 2.10 or newer, and the operating system and processor that it was built for): "
            f"{error}"
        ) from error


_load(LIBRARY)

#: The tensors that both ops take if they are given, in their order there.
OPTIONAL = (
    "learnable_sink",
    "alibi_slopes",
    "bias",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "key_start",
)
#: fwd(q, k, v, *OPTIONAL, *, softmax_scale=None, window_left=-1, window_right=-1,
#: diagonal_offset=None, softcap=0.0, deterministic=None, tuning=None) -> (out, softmax_lse).
fwd = torch.ops.flash_cute.fwd.default
#: bwd(dout, q, k, v, out, softmax_lse, dlse=None, *OPTIONAL, *, as fwd, with deterministic=False,
#: bias_grad=False) -> (dq, dk, dv, dsink, dbias). A dout or dlse that is None counts as zeros.
#: dsink and dbias have no elements where there is no sink, or where `bias_grad` asks for none.
bwd = torch.ops.flash_cute.bwd.default


class TileOfAnyArch(TypedDict):
    arch: str
    op: str  #: fwd, bwd or dq; on sm80 fwd_fp32 and bwd_fp32 as well
    mask: str  #: full, banded, any or none: the calls without split-KV that it serves
    head_dim: int  #: serves head dims of q and k up to this one
    head_dim_v: int  #: and of v
    block_m: int  #: query rows of a tile; in the backward, of a block
    block_n: int  #: keys of a block; in the backward, of a tile
    warps: int
    #: Blocks in shared memory: of keys; in the backward, of query rows. Or chunks of K and V.
    stages: int
    smem_bytes: int
    ctas_per_sm: int  #: CTAs that fit a multiprocessor together
    max_registers: int  #: registers of a thread, of what the register file has then


class Tile(TileOfAnyArch, total=False):
    """An entry of the kernels' tile tables."""

    # sm80's forward only.
    column_warps: int  #: how many of the warps share their query rows
    q_in_registers: int  #: 1 if V takes the shared memory of Q, which stays in registers
    k_columns: int  #: of a chunk of K, which has all of a block's keys; 0: there are no chunks
    v_keys: int  #: of a chunk of V
    v_columns: int  #: likewise
    dense_only: int  #: 1 if it serves no packed or padded sequences and no changed scores
    # sm80's backward above head dim 256, and in fp32.
    columns: int  #: of a gradient in a tile
    chunk_columns: int  #: of a chunk of the operands of S and dP
    chunk_rows: int  #: of a chunk of what is summed
    # sm90's forward only.
    split_kv: int  #: 1 if it serves split-KV, else 0
    packed: int  #: 1 if it serves packed and padded sequences, else 0
    bias: int  #: 1 if it serves a bias, else 0
    ping_pong: int  #: 1 if consumers issue their products in turns, else 0
    q_stages: int  #: query tiles in shared memory
    producer_registers: int  #: registers of a thread in the warpgroup that loads
    consumer_registers: int  #: and in those that compute
    column_groups: int  #: consumers that share rows; above 1 another warpgroup computes scores,
    scores_registers: int  #: with so many registers, else 0
    # sm90's kernel of q's gradient only.
    k_stages: int  #: blocks of K in shared memory
    v_stages: int  #: and of V


class BuildInfo(TypedDict):
    """What the compiled library holds, beside what a full build does."""

    cuda_runtime: int  #: as CUDA counts: 13000 is 13.0
    max_length: int  #: sequence lengths are at most this
    max_head_dim: int  #: head dims are at most this
    max_head_dim_fp32: int  #: those of fp32 on GPUs
    archs: list[str]
    dtypes: list[str]  #: of fp16, bf16, fp32
    head_dims: list[int]
    large_head_dims: list[int]  #: of sm80; sm90's forward has those to 512
    fp32_head_dims: list[int]  #: of sm80 in fp32
    left_out: str  #: what FLASH_CUTE_HEAD_DIMS, _DTYPES and _ARCHS left out
    tiles: list[Tile]


@functools.cache
def build_info() -> BuildInfo:
    return cast(BuildInfo, json.loads(torch.ops.flash_cute.build_info()))


def tiles_for(smem_limit: int, op: str = "fwd") -> list[Tile]:
    """The sm80 entries of an op for a device that gives a CTA `smem_limit` bytes of shared memory,
    one for each pair of head dims.
    """
    tiles = cast("list[Tile]", json.loads(torch.ops.flash_cute.tiles_for(smem_limit)))
    return [tile for tile in tiles if tile["op"] == op]


def plan(request: str, tuning: str = "") -> dict[str, Any]:
    """The plan of a call that `plan.request` describes: which kernel, tile and splits it gets."""
    return cast("dict[str, Any]", json.loads(torch.ops.flash_cute.plan(request, tuning)))
