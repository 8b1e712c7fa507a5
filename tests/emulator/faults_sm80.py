"""Faults in the SM80 kernels and in what both architectures share."""

from __future__ import annotations

from faults import (
    BOUNDS,
    COMBINE,
    CONFLICTS,
    COPY,
    EPILOGUE,
    HOLDERS,
    MAINLOOP,
    MASK,
    ORDER,
    RACE,
    SEQUENCE,
    SOFTMAX,
    STUCK,
    TILE,
    TRAITS,
    UNFINISHED,
    UNWRITTEN,
    WRONG,
    Fault,
)

SM80_FAULTS = [
    Fault(
        "barrier removed before K is read",
        f"{RACE}|{UNWRITTEN}|{UNFINISHED}",
        [
            (
                MAINLOOP,
                "platform::sync_cta();\n    if constexpr (!kPipelinedQk) {",
                "if constexpr (!kPipelinedQk) {",
            )
        ],
    ),
    Fault(
        "barrier removed before V is read",
        f"{RACE}|{UNFINISHED}",
        [(MAINLOOP, "platform::sync_cta();\n        load_next_keys", "load_next_keys")],
        head_dim=96,
    ),
    Fault(
        "barrier removed before the first block is read",
        f"{RACE}|{UNWRITTEN}|{UNFINISHED}",
        [(MAINLOOP, "platform::sync_cta();  // Q and K", "// Q and K")],
    ),
    Fault(
        "first block not waited for",
        UNFINISHED,
        [
            (
                MAINLOOP,
                "platform::wait_copies<kPipelinedQk ? 1 : 0>",
                "platform::wait_copies<kPipelinedQk ? 2 : 0>",
            )
        ],
    ),
    Fault(
        "rises of the next block missed",
        WRONG,
        [
            (
                MAINLOOP,
                "may_rise = softmax_.may_rise(as_matrix(tSrS_next));",
                "may_rise = false;",
            )
        ],
    ),
    Fault(
        "barrier removed before O is read",
        RACE,
        [(EPILOGUE, "platform::sync_cta();  // O is", "// O is")],
    ),
    Fault(
        "wait for the wrong group",
        UNFINISHED,
        [
            (
                MAINLOOP,
                "platform::wait_copies<0>();\n    platform::sync_cta();",
                "platform::wait_copies<1>();\n    platform::sync_cta();",
            )
        ],
    ),
    Fault(
        "next block loaded into the stage in use",
        UNFINISHED,
        [
            (
                MAINLOOP,
                "load_k(n_block - 2);",
                "kv_source_.template load_k<true>(n_block - 2, sK(n_block - 1));",
            )
        ],
    ),
    Fault(
        "last block taken for whole",
        BOUNDS,
        [
            (
                MAINLOOP,
                "load_v<false>(n_block);\n      if",
                "load_v(n_block);\n      if",
            )
        ],
    ),
    Fault(
        "causal edge off by one",
        WRONG,
        [(MASK, "offsets(r, c)) >= row_end", "offsets(r, c)) > row_end")],
    ),
    Fault(
        "first masked block left unmasked",
        WRONG,
        [
            (
                MASK,
                "return end(row_origin) < key_origin + keys ||",
                "return end(row_origin) < key_origin ||",
            )
        ],
    ),
    Fault(
        "output not rescaled",
        WRONG,
        [(SOFTMAX, "out(r, c) *= rescale_[kFirstRow + r];", "out(r, c) *= 1.f;")],
    ),
    Fault(
        "swizzle dropped where O is read",
        WRONG,
        [
            (
                EPILOGUE,
                "thread_copy.partition_S(sO)",
                "thread_copy.partition_S(make_tensor(make_smem_ptr(smem.o), "
                "Layout<ShapeO, Stride<Int<Traits::kHeadDimV>, _1>>{}))",
            )
        ],
    ),
    Fault(
        "swizzle dropped everywhere",
        CONFLICTS,
        [(TRAITS, "cute::Swizzle<kStrip == 64 ? 3 : 2, 3, 3>", "cute::Swizzle<0, 3, 3>")],
    ),
    Fault(
        "load predicate off by one row",
        BOUNDS,
        [(COPY, "get<0>(beside(0, r, c)) < rows_left", "get<0>(beside(0, r, c)) <= rows_left")],
    ),
    Fault(
        "load predicate off by one column",
        BOUNDS,
        [(COPY, "column < columns_left", "column <= columns_left")],
    ),
    Fault(
        "address of the next block wrong",
        f"{BOUNDS}|{WRONG}",
        [(COPY, "place -= 2 * kRows<Shape>", "place -= kRows<Shape>")],
    ),
    Fault(
        "address of the first block wrong",
        f"{BOUNDS}|{WRONG}",
        [
            (
                COPY,
                "find(values_, params_.v.stride_row, n_block)",
                "find(values_, params_.v.stride_row, 0)",
            )
        ],
    ),
    Fault(
        "address of the next block not kept",
        f"{BOUNDS}|{WRONG}",
        [(COPY, "const Element*& place, int64_t", "const Element* place, int64_t")],
        head_dim=128,
    ),
    Fault(
        "LSE in base 2",
        WRONG,
        [(SOFTMAX, "log2(row.sum)) * kLn2;", "log2(row.sum)) * (0.f * kLn2 + 1.f);")],
    ),
    # CuTe fills fragments with zeros of its own accord: to leave `clear` out alone is no fault.
    Fault(
        "S not initialised",
        WRONG,
        [
            (
                MAINLOOP,
                "clear(fragments.tSrS_all);",
                "auto& scores = fragments.tSrS_all;\n"
                "      float unset[decltype(size(scores))::value];\n"
                "      for (int i = 0; i < size(scores); ++i) scores(i) = unset[i];",
            )
        ],
    ),
    Fault(
        "S not cleared between blocks",
        WRONG,
        [(MAINLOOP, "clear(pair_of_columns(tSrS_next, piece));", "")],
    ),
    Fault(
        "V not transposed",
        WRONG,
        [
            (
                TRAITS,
                "SmemLayoutV{}, cute::Layout<ShapeVt, ",
                "SmemLayoutV{}, cute::Layout<ShapeV, ",
            ),
            (
                TRAITS,
                "cute::Stride<cute::Int<kBlockN>, cute::_1>>{}));",
                "cute::Stride<cute::_1, cute::Int<kBlockN>>>{}));",
            ),
            (TRAITS, "platform::LoadMatrixTransposed", "platform::LoadMatrix"),
        ],
    ),
    Fault(
        "store past the last row of O",
        BOUNDS,
        [
            (
                EPILOGUE,
                "if (exists && column < params.head_dim) {\n              copy(gmem",
                "if (column < params.head_dim) {\n              copy(gmem",
            )
        ],
    ),
    Fault(
        "store past the last row of the LSE",
        f"written already|{BOUNDS}",  # the first row of the head behind, if there is one
        [(EPILOGUE, "exists(row, len_q)) visit", "exists(row, len_q + 1)) visit")],
    ),
    Fault(
        "load past the last row of Q",
        BOUNDS,
        [(COPY, ".with(exists && column", ".with(column")],
    ),
    Fault(
        "row of a head that is not there",
        BOUNDS,
        [(TILE, "exists(row + i * kStep, len_q)", "query(row + i * kStep) < len_q")],
    ),
    Fault(
        "rows one after the other",
        f"{WRONG}|written already",
        [(TILE, "address += kStep * view.stride_row", "address += view.stride_row")],
    ),
    Fault(
        "rows that see keys skipped",
        WRONG,
        [(MAINLOOP, "mask_.end(row0_ + kMmaRows - 1)", "mask_.end(row0_)")],
    ),
    Fault(
        "rows of the second half left out",
        WRONG,
        [(MAINLOOP, "row_end - row0_ > kMmaRows", "row_end - row0_ > kMmaRows + 16")],
    ),
    Fault(
        "no block left for the rows that were skipped",
        f"{BOUNDS}|behind a negative number",  # a block before the first
        [(MAINLOOP, "n_block * kBlockN && has_next(n_block);", "n_block * kBlockN;")],
    ),
    Fault(
        "O is taken for empty",
        WRONG,
        [
            (
                MAINLOOP,
                "mask_.end(end - 1) > (n_block + 1) * kBlockN",
                "mask_.end(end - 1) > (n_block + 2) * kBlockN",
            )
        ],
    ),
    Fault(
        "rows without keys are left as they are",
        WRONG,
        [(SOFTMAX, "platform::any_in_warp(has_keyless)", "false")],
    ),
    Fault(
        "log-sum-exp of another row",
        WRONG,
        [(SOFTMAX, "result.limit = r == row ? limit_[r] : result.limit;", "")],
    ),
    Fault(
        "sections that begin with the same head",
        "written already",
        [(ORDER, "first_section_.divisor + section *", "section *")],
    ),
    Fault(
        "row taken for a query",
        WRONG,
        [(MASK, "pack_gqa_.query(row) + band_end_", "row + band_end_")],
    ),
    Fault(
        "maximum of half a row",
        WRONG,
        [(SOFTMAX, ", 2));", ", 0));")],
    ),
    Fault(
        "scores below zero compared by their bits",
        WRONG,
        [(SOFTMAX, " || limit < 0.f;", ";")],
    ),
    Fault(
        "rises of later blocks missed",
        WRONG,
        [(SOFTMAX, "greatest_bits(scores, r) > std::bit_cast<int>(limit) ||", "")],
    ),
    Fault(
        "barrier removed before P of other warps is read",
        f"{RACE}|{UNWRITTEN}",
        [(MAINLOOP, "platform::sync_cta();  // P is there", "// P is there")],
        head_dim=192,
    ),
    Fault(
        "warps that share rows vote apart",
        f"{RACE}|{UNWRITTEN}|{UNFINISHED}",
        [
            (
                HOLDERS,
                "return platform::sync_cta_or(predicate);",
                "platform::sync_cta();\n    return platform::any_in_warp(predicate);",
            )
        ],
        head_dim=192,
    ),
    Fault(
        "vote of shared rows that is no barrier",
        f"{RACE}|{UNFINISHED}",
        [(HOLDERS, "platform::sync_cta_or(predicate)", "platform::any_in_warp(predicate)")],
        head_dim=192,
    ),
    Fault(
        "words of other warps read before they are there",
        f"{RACE}|{UNWRITTEN}",
        [(HOLDERS, "platform::sync_cta();  // the words", "// the words")],
        head_dim=192,
    ),
    Fault(
        "maximum of one warp of a shared row",
        WRONG,
        [(HOLDERS, "reduce(rows, [](float a, float b) { return fmaxf(a, b); });", "")],
        head_dim=192,
    ),
    Fault(
        "sum of one warp of a shared row",
        WRONG,
        [(HOLDERS, "reduce(rows, [](float a, float b) { return a + b; });", "")],
        head_dim=192,
    ),
    Fault(
        "barrier that half of the warps skip",
        f"{RACE}|{STUCK}",
        [
            (
                EPILOGUE,
                "platform::sync_cta();  // O is",
                "if (thread < Traits::kThreads / 2) platform::sync_cta();  // O is",
            )
        ],
    ),
    # Of keys in parts.
    Fault(
        "parts that begin with the first key",
        WRONG,
        [(SEQUENCE, "key_begin(split * params.splits.keys)", "key_begin(0)")],
    ),
    Fault(
        "parts that end with the last key",
        WRONG,
        [(SEQUENCE, "key_begin + params.splits.keys)", "params.len_k)")],
    ),
    Fault(
        "parts in one place",
        "written already",
        [(EPILOGUE, "tile.batch += tile.split * params.batch;", "")],
    ),
    Fault(
        "part stored past the last row",
        f"{BOUNDS}|written already",
        [(EPILOGUE, "exists = pack_gqa.exists(row, len_q);", "exists = true;")],
    ),
    Fault(
        "parts that weigh what they weigh alone",
        WRONG,
        [(COMBINE, "row.sum * reference.rescale(row.limit, limit)", "row.sum")],
    ),
    Fault(
        "part left out",
        WRONG,
        [(COMBINE, "int split = first; split <", "int split = first + 1; split <")],
    ),
    Fault(
        "limits of parts read before they are there",
        f"{RACE}|{UNWRITTEN}",
        [(COMBINE, "platform::sync_cta();  // the limits", "// the limits")],
    ),
    Fault(
        "weights of parts read before they are there",
        f"{RACE}|{UNWRITTEN}",
        [(COMBINE, "platform::sync_cta();  // the weights", "// the weights")],
    ),
    Fault(
        "combined before all is there",
        f"{RACE}|{UNWRITTEN}",
        [(COMBINE, "platform::sync_cta();  // all sums", "// all sums")],
    ),
]
