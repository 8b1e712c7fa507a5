"""The faults that the tested copy of the kernels has, one a kind. Each is switched on at run time.
In the kernels a comment that ends in `fault: <name>` marks the line that a fault replaces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from build_library import ROOT, SOURCES, write

MARKED = re.compile(r"^( *)(.*?) *//.*\bfault: ([\w-]+)$", re.MULTILINE)

# What catches a fault, as regular expressions.
RACE = "with no barrier in between"
UNWRITTEN = "which nobody has written"
UNFINISHED = "has not waited for"
READ = f"{RACE}|{UNWRITTEN}|{UNFINISHED}"
BOUNDS = "in no row of any tensor"
WRITTEN = "has been written already"
WRONG = "(out|lse|dq|dk|dv|next) error"
STUCK = "every thread waits"


@dataclass(frozen=True)
class Fault:
    """`instead` takes the place of the marked statement. With "= " in front it takes the place of
    the value that the marked line gives to a variable."""

    name: str
    instead: str
    caught_by: str


BOTH = [
    Fault("mask-edge", "= end(first_row + row_of(offsets(r, 0))) + 1 - first_key", WRONG),
    Fault("packed-row", "return query(row) < sequence.len_q;", BOUNDS),
    Fault("limit", "", WRONG),
    Fault("exact-row", "= 0.f", WRONG),
    Fault("keyless-row", "", WRONG),
    Fault("tile-twice", "", WRITTEN),
    Fault("split-weight", "weights[split] = row.sum;", WRONG),
]
SM80 = [
    Fault("key-bound", "= len_k_ + 1 - n_block * kRows", BOUNDS),
    Fault("cta-barrier", "", READ),
    Fault("copy-wait", "platform::wait_copies<1>();", UNFINISHED),
    Fault(
        "stage",
        "if (has_next(n_block - 1)) "
        "kv_source_.template load_k<true>(n_block - 2, sK(n_block - 1));",
        UNFINISHED,
    ),
    Fault("shared-p", "", READ),
    Fault("chunk-wait", "platform::wait_copies<kStages - 1>();", UNFINISHED),
    Fault("tf32-lo", "", WRONG),
    Fault("lse-row", "visit(row, mine);", f"{BOUNDS}|{WRITTEN}"),
]
SM90 = [
    Fault("tile-missing", "tail.whole_tiles = tiles - tail.tail_tiles - 1;", "nobody has written"),
    Fault("init-fence", "", "to TMA, with no fence"),
    Fault("arrivals", "smem.k_empty[stage].init(kWarps);", f"{READ}|still reads|has had its"),
    Fault("parity", "", f"{STUCK}|{READ}|still reads|has had its"),
    Fault("v-wait", "", f"{RACE}|{UNFINISHED}"),
    Fault("wgmma-fence", "", "no wgmma.fence"),
    Fault("wgmma-wait", "hopper::wgmma_wait<kInFlight + 1>();", UNFINISHED),
    Fault("rescale", "", WRONG),
    Fault("p-full", "", READ),
    Fault("turn", "", STUCK),
    Fault("swizzle", "hopper::stmatrix(staged + (first + column), block);", f"{WRONG}|{READ}"),
    Fault("proxy-fence", "", "with no fence.proxy.async ahead"),
    Fault("store-wait", "", "which a TMA store of warp .* (still reads|has read)"),
]
BACKWARD = [
    Fault("bwd-keyless-row", "stats = {lse * kLog2e, sum - dlse};", WRONG),
    Fault("bwd-dlse", "= 0.f", WRONG),
    Fault("bwd-padding", "= exists ? stats : RowGradStats{-INFINITY, 0.f}", WRONG),
    Fault("bwd-group-head", "= block.head + 2", WRONG),
    Fault("bwd-ds-barrier", "", READ),
    Fault("bwd-mask", "= (n_block_ + 1) * kBlockN", WRONG),
    Fault("bwd-scale", "= factor * factor * gradient(r, c)", WRONG),
    Fault("bwd-turn", "", "passes a turn that its CTA has not waited for"),
]
BACKWARD_SM90 = [
    Fault("bwd90-ds-fence", "", "with no fence.proxy.async ahead"),
    Fault("bwd90-ds-full", "", READ),
    Fault("bwd90-staged", "", "still reads|has read"),
    Fault("bwd90-dq-complete", "", "has not waited for"),
    Fault("bwd90-claim", "= platform::fetch_add(waiting, 1) - 1", "nobody has written"),
    Fault("bwd90-order", "return index < tiles - first ? index + first : index;", "launch reads"),
    Fault(
        "bwd90-walk",
        "return {m_block == rows_.end - 1 ? block.head + 1 : block.head, m_block};",
        f"{WRONG}|nobody has written",
    ),
    Fault("bwd90-rest", "= FinishedBlocks::kNone", "nobody has written"),
    Fault("window-ds-full", "", READ),
    Fault("window-ds-empty", "", "still reads|has read"),
    Fault("window-k-empty", "", "still reads|has read"),
]
PACKED = [
    Fault("packed-band", "= len_k - len_q + 1", WRONG),
    Fault("key-start", "= clamp(table.key_start[batch] - 1, k.count)", WRONG),
    Fault(
        "lse-layout",
        "lse = params.lse.data[(rows.first + in_block) * params.heads_q + head];",
        WRONG,
    ),
    Fault("sink-lse", "return of_keys;", WRONG),
    Fault("sink-split", "lse = sink.join(sink.join(lse));", WRONG),
    Fault("sink-gradient", "sum += stats.delta;", WRONG),
    Fault("softcap-derivative", "derivatives(i) = Derivative<Element>(1.f);", WRONG),
]
PACKED_SM90 = [
    Fault("next-tile", "", f"{RACE}|{STUCK}"),
    Fault("ragged-end", "= sequence.first_k + sequence.len_k + 1", WRONG),
    Fault("last-store", "= false", f"{WRITTEN}|{BOUNDS}|{WRONG}"),
    Fault("bwd90-last-store", "= false", f"{WRITTEN}|{BOUNDS}|{WRONG}"),
    Fault("bwd90-store-wait", "", "which a TMA store of warp .* (still reads|has read)"),
]
FAULTS = [*BOTH, *SM80, *SM90, *BACKWARD, *BACKWARD_SM90, *PACKED, *PACKED_SM90]


def plant(folder: str) -> None:
    """Makes the folder a copy of the sources, where a marked line is a choice: it, or its fault."""
    numbers = {fault.name: i for i, fault in enumerate(FAULTS, 1)}

    def with_fault(line: re.Match[str]) -> str:
        indent, code, name = line.groups()
        is_on, instead = f"planted == {numbers[name]}", FAULTS[numbers[name] - 1].instead
        if instead.startswith("= "):
            target, value = code.rstrip(";").split(" = ", 1)
            return f"{indent}{target} = {is_on} ? {instead[2:]} : {value};"
        return f"{indent}if ({is_on}) {{ {instead} }} else {{ {code} }}"

    copied = set()
    for source in sources():
        name = source.relative_to(ROOT / SOURCES)
        copied.add(ROOT / write(f"{folder}/{name}", MARKED.sub(with_fault, source.read_text())))
    for file in (ROOT / folder).rglob("*.*"):
        if file not in copied:
            file.unlink()


def sources() -> list[Path]:
    return [f for f in (ROOT / SOURCES).rglob("*") if f.suffix in (".h", ".cpp", ".cu")]
