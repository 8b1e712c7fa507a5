"""Faults in the SM90 kernels."""

from __future__ import annotations

from faults import (
    IN_USE,
    MASK,
    RACE,
    SM90_KERNEL,
    SM90_MAINLOOP,
    SM90_MAP,
    SM90_OPERAND,
    SM90_PRODUCER,
    SM90_RINGS,
    SM90_TRAITS,
    SOFTMAX,
    STUCK,
    UNFINISHED,
    UNWRITTEN,
    WRONG,
    Fault,
    of_sm90,
)


def ping_pong(value: str) -> tuple[str, str, str]:
    """Whether consumers take turns, whatever the tile table says."""
    return SM90_MAINLOOP, "kPingPong = Traits::kConfig.ping_pong;", f"kPingPong = {value};"


#: No faults, and nothing is to be caught: what the tile table may have as well.
SM90_VARIANTS = [
    Fault(f"sm90 in turns {value}", "^$", [ping_pong(value)], arch=90, kinds=("banded", "splits"))
    for value in ("true", "false")
]

SM90_FAULTS = [
    of_sm90(
        "K not waited for",
        f"{RACE}|{UNFINISHED}",
        SM90_MAINLOOP,
        "skip_blocks(work.skipped);\n    smem_.k_full[k_.stage].wait(k_.parity);  // K has arrived",
        "skip_blocks(work.skipped);",
    ),
    of_sm90(
        "V not waited for",
        f"{RACE}|{UNFINISHED}",
        SM90_MAINLOOP,
        "smem_.v_full[v_.stage].wait(v_.parity);  // V has arrived",
        "",
    ),
    of_sm90(
        "Q not waited for",
        f"{RACE}|{UNFINISHED}|{UNWRITTEN}",
        SM90_MAINLOOP,
        "smem_.q_full[q_.stage][index_].wait(q_.parity);  // Q has arrived",
        "",
    ),
    of_sm90(
        "K released before it is read",
        IN_USE,
        SM90_MAINLOOP,
        "hopper::wgmma_wait<kInFlight>();",
        "consumer_release(smem_.k_empty[k_.stage]); hopper::wgmma_wait<kInFlight>();",
        (
            SM90_MAINLOOP,
            "warpgroup_fence_operand(tSrS);\n    release_k();",
            "warpgroup_fence_operand(tSrS);\n    k_.advance();",
        ),
    ),
    of_sm90(
        "Q never released",
        STUCK,
        SM90_MAINLOOP,
        "smem_.q_empty[q_.stage][index_].arrive();",
        "",
    ),
    of_sm90(
        "one warp does not say that it is done with Q",
        f"{RACE}|{UNFINISHED}|{IN_USE}|has had its",
        SM90_RINGS,
        "smem.q_empty[stage][i].init(hopper::kWarpgroup);",
        "smem.q_empty[stage][i].init(hopper::kWarpgroup - 32);",
    ),
    of_sm90(
        "empty K expected of one consumer alone",
        f"{IN_USE}|{RACE}|{UNFINISHED}|has had its",
        SM90_RINGS,
        "smem.k_empty[stage].init(Traits::kConsumers * kWarps);",
        "smem.k_empty[stage].init(kWarps);",
    ),
    of_sm90(
        "producer waits for the wrong parity",
        f"{STUCK}|{IN_USE}",
        SM90_PRODUCER,
        "empty[ring.stage].wait(ring.parity ^ 1);",
        "empty[ring.stage].wait(ring.parity);",
    ),
    of_sm90(
        "parity does not turn",
        f"{STUCK}|{RACE}|{UNFINISHED}|{IN_USE}|has had its",
        SM90_RINGS,
        "parity ^= 1;",
        "",
    ),
    of_sm90(
        "fewer bytes expected than come",
        f"{RACE}|{UNFINISHED}|{STUCK}",
        SM90_PRODUCER,
        "arrive_and_expect(sizeof stages[0]);",
        "arrive_and_expect(sizeof stages[0] / 2);",
    ),
    of_sm90(
        "scores read before they are there",
        UNFINISHED,
        SM90_MAINLOOP,
        "wait_for_scores<1>(tSrS);",
        "wait_for_scores<2>(tSrS);",
    ),
    of_sm90(
        "first scores read before they are there",
        UNFINISHED,
        SM90_MAINLOOP,
        "wait_for_scores<0>(tSrS);",
        "wait_for_scores<1>(tSrS);",
    ),
    of_sm90(
        "P written while the product reads it",
        UNFINISHED,
        SM90_MAINLOOP,
        "softmax.weigh(scores, bounds);",
        "softmax.weigh(scores, bounds);\n      convert_to_words<Element>(tSrS, words);",
    ),
    of_sm90(
        "product issued without a fence",
        "no wgmma.fence",
        SM90_MAINLOOP,
        "warpgroup_fence_operand(tSrP);\n    hopper::wgmma_fence();",
        "warpgroup_fence_operand(tSrP);",
    ),
    of_sm90(
        "scores added to those of the block before",
        WRONG,
        SM90_MAINLOOP,
        "GMMA::ScaleOut::Zero",
        "GMMA::ScaleOut::One",
    ),
    of_sm90(
        "turn not passed",
        STUCK,
        SM90_MAINLOOP,
        "gemm_pv(tSrP, tOrO);\n      scheduler_barrier_arrive();",
        "gemm_pv(tSrP, tOrO);",
        ping_pong("true"),
    ),
    of_sm90(
        "V of a skipped block kept",
        f"{STUCK}|{RACE}|{UNFINISHED}|{WRONG}",
        SM90_MAINLOOP,
        "consumer_skip(smem_.v_full[v_.stage], smem_.v_empty[v_.stage], v_);",
        "",
    ),
    of_sm90(
        "lanes do not look at a skipped stage together",
        STUCK,
        SM90_MAINLOOP,
        "hopper::sync_warp();\n    consumer_release(empty);",
        "consumer_release(empty);",
        head_dim=256,
    ),
    of_sm90(
        "fewer bytes of Q expected than come",
        f"{RACE}|{UNFINISHED}|{STUCK}",
        SM90_PRODUCER,
        "arrive_and_expect(sizeof smem_.q[0][0]);",
        "arrive_and_expect(sizeof smem_.q[0][0] / 2);",
    ),
    of_sm90(
        "tile told before the consumer is done with the one before",
        RACE,
        SM90_PRODUCER,
        "smem_.q_empty[q_.stage][consumer].wait(q_.parity ^ 1);",
        "smem_.tile[q_.stage][consumer] = tile;\n"
        "    smem_.q_empty[q_.stage][consumer].wait(q_.parity ^ 1);",
    ),
    of_sm90(
        "tile told after Q may have arrived",
        f"{RACE}|{UNWRITTEN}",
        SM90_PRODUCER,
        "      announce(i, tile);\n"
        "      const int row0 = tile.row0 + i * Traits::kConsumerRows;\n"
        "      if (row0 < tile.row_end) {\n"
        "        smem_.q_full[q_.stage][i].arrive_and_expect(sizeof smem_.q[0][0]);",
        "      smem_.q_empty[q_.stage][i].wait(q_.parity ^ 1);\n"
        "      const int row0 = tile.row0 + i * Traits::kConsumerRows;\n"
        "      if (row0 < tile.row_end) {\n"
        "        smem_.q_full[q_.stage][i].arrive_and_expect(sizeof smem_.q[0][0]);\n"
        "        announce(i, tile);",
    ),
    of_sm90(
        "rows of other parts of a tile",
        f"{WRONG}|{UNWRITTEN}",
        SM90_MAINLOOP,
        "work.tile.row_end - work.row0;",
        "arguments_.pack_gqa.count(arguments_.params.len_q) - work.row0;",
    ),
    of_sm90(
        "consumers without rows not told",
        STUCK,
        SM90_PRODUCER,
        "      } else {\n        smem_.q_full[q_.stage][i].arrive();\n      }",
        "      }",
    ),
    of_sm90(
        "consumers not told of the end",
        STUCK,
        SM90_PRODUCER,
        "      announce(i, Pipeline::kNoTile);\n      smem_.q_full[q_.stage][i].arrive();",
        "      announce(i, Pipeline::kNoTile);",
    ),
    of_sm90(
        "turn of a skipped block not passed",
        STUCK,
        SM90_MAINLOOP,
        "scheduler_barrier_sync();\n      scheduler_barrier_arrive();",
        "scheduler_barrier_sync();",
        ping_pong("true"),
    ),
    of_sm90(
        "turns that are passed and not waited for",
        "comes to barrier . again before the others have|every thread waits",
        SM90_MAINLOOP,
        "scheduler_barrier_sync();\n    gemm_qk(tSrS);",
        "gemm_qk(tSrS);",
        ping_pong("true"),
    ),
    of_sm90(
        "Q of a consumer without rows kept",
        STUCK,
        SM90_MAINLOOP,
        "      release_q();\n    }\n  }",
        "    }\n  }",
    ),
    of_sm90(
        "O read before it is there",
        UNFINISHED,
        SM90_MAINLOOP,
        "gemm_pv(tSrP, tOrO);\n    hopper::wgmma_wait<0>();",
        "gemm_pv(tSrP, tOrO);",
    ),
    of_sm90(
        "stats of the tile before kept",
        WRONG,
        SM90_MAINLOOP,
        "softmax.start();",
        "",
    ),
    of_sm90(
        "O not rescaled",
        WRONG,
        SM90_MAINLOOP,
        "softmax.rescale(out);",
        "",
    ),
    of_sm90(
        "O rescaled under a product",
        UNFINISHED,
        SM90_MAINLOOP,
        "risen = n_block - 1;",
        "softmax.rescale(out);",
    ),
    of_sm90(
        "some warps of a warpgroup wait for a product",
        "as its warpgroup's other warps have",
        SM90_MAINLOOP,
        "risen = n_block - 1;",
        "risen = n_block - 1;\n        hopper::wgmma_wait<0>();",
    ),
    of_sm90(
        "bounds kept where a reference rises",
        WRONG,
        SM90_MAINLOOP,
        "        bounds = softmax.bounds();\n        risen",
        "        risen",
    ),
    of_sm90(
        "rises from below 0 missed",
        WRONG,
        SOFTMAX,
        "limit_[r] < 0.f ?",
        "limit_[r] == -INFINITY ?",
    ),
    of_sm90(
        "block with an edge at its begin taken for whole",
        WRONG,
        MASK,
        "(begin(row_origin + rows - 1) + block_n - 1) / block_n, end",
        "begin(row_origin + rows - 1) / block_n, end",
    ),
    of_sm90(
        "descriptors of the first stage alone",
        f"{IN_USE}|{RACE}|{UNFINISHED}|{WRONG}",
        SM90_OPERAND,
        "tile * (kTileBytes / 16)",
        "0 * tile",
    ),
    of_sm90(
        "block with an edge taken for whole",
        WRONG,
        MASK,
        "end(row_origin) / block_n}",
        "end(row_origin) / block_n + 1}",
    ),
    of_sm90(
        "barriers not published",
        "has not been told",
        SM90_KERNEL,
        "hopper::fence_barrier_init();",
        "",
    ),
    of_sm90(
        "barriers used before they are there",
        "which nobody has initialised|initialised with no barrier",
        SM90_KERNEL,
        "platform::sync_cta();",
        "",
    ),
    of_sm90(
        "map with another swizzle",
        "refused a tensor map",
        SM90_MAP,
        "strip == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B",
        "strip == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B",
    ),
    of_sm90(
        "layout with another swizzle",
        f"{WRONG}|{RACE}",
        SM90_TRAITS,
        "std::conditional_t<kStrip == 64,",
        "std::conditional_t<kStrip != 64,",
    ),
    of_sm90(
        "strips of V taken for keys",
        WRONG,
        SM90_TRAITS,
        "cute::Step<cute::_2, cute::_1>{}",
        "cute::Step<cute::_1, cute::_2>{}",
        head_dim=128,
    ),
    of_sm90(
        "batches taken for heads",
        f"{WRONG}|nobody has written",
        SM90_MAP,
        "{view.stride_head * group, heads / group, 1},\n"
        "                                   {view.stride_batch, batch, 1}",
        "{view.stride_batch, batch, 1},\n"
        "                                   {view.stride_head * group, heads / group, 1}",
    ),
]
