"""Small calls of every kernel for NVIDIA's compute-sanitizer: `make sanitize` runs it under each of
its tools. Inputs come from the host, so that initcheck knows them as written.
"""

from __future__ import annotations

import itertools

import torch

import flash_cute
from flash_cute import ops

SMALL_SHARED_MEMORY = 101376  # what sm_86, sm_89 and sm_120 lend a block

#: (Nq, Nk, causal): ragged on both sides, one and several key blocks, rows that see no key.
SHAPES = [(200, 200, True), (70, 193, False), (130, 33, True)]


def main() -> None:
    torch.manual_seed(0)
    for head_dim, (len_q, len_k, is_causal) in itertools.product(
        [*ops.build_info()["head_dims"], 72, 100], SHAPES
    ):
        for dtype in (torch.float16, torch.bfloat16):
            q = torch.randn(1, 2, len_q, head_dim).to("cuda", dtype)
            k, v = torch.randn(2, 1, 1, len_k, head_dim).to("cuda", dtype)
            out, lse = flash_cute.forward(q, k, v, is_causal, softmax_scale=-0.1)
            window_right = 0 if is_causal else -1
            limited = ops.fwd(q, k, v, -0.1, -1, window_right, len_k - len_q, SMALL_SHARED_MEMORY)
            torch.testing.assert_close(out, limited[0], rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse, limited[1], rtol=0, atol=1e-5)
    print("all calls done")


if __name__ == "__main__":
    main()
