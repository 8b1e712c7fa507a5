"""Writes what documents say of speed from bench/results/*.json, so that no number is typed by hand:
bench/RESULTS.md, and README.md's table between <!-- numbers:summary --> and <!-- end:summary -->.

    python -m bench.results             # writes both, and the chart (bench/results/train.png)
    python -m bench.results --readme    # prints README's table
    python -m bench.results --check     # exit status 1 if one of the two is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import tables
from bench.environment import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results"
DOCUMENT = REPOSITORY / "bench" / "RESULTS.md"
README = REPOSITORY / "README.md"
PART = re.compile(r"(<!-- numbers:summary -->\n).*(<!-- end:summary -->)", re.DOTALL)
CHART = "train.png"
Result = dict[str, Any]

INTRODUCTION = """\
# Results

Written by `python -m bench.results` from the files in [results](results). Do not edit.

- All providers of a table ran in one process and took turns. Times are medians of five rounds.
- Inputs are random normal. The L2 cache is flushed before each call.
- A causal call with Nq = Nk counts half of the operations of a full one.
- Compare ratios within a table. Do not compare rates of different machines or days.
- "to fa2" is the speed of flash_cute as a multiple of SDPA's flash backend, and so for others.
"""


@dataclass(frozen=True)
class Section:
    """A title, a sentence or two, and the files with the table to make of each."""

    title: str
    text: str
    files: tuple[str, ...]
    table: Callable[[Sequence[tables.Row]], str] = tables.speed


SECTIONS = (
    Section(
        "Training shapes",
        "bf16, 16384 tokens (B x N), H x D = 2048.",
        ("train", "train_h100"),
        tables.lengths,
    ),
    Section(
        "Every head dim",
        "The same at each head dim that has a tile.",
        ("tuning", "tuning_h100"),
    ),
    Section("fp16 beside bf16", "", ("fp16", "fp16_h100")),
    Section(
        "Grouped heads",
        "Grouped and multi-query heads beside as many heads of K and V, and queries that continue "
        "a longer context. `gqa.json` has the backward of grouped heads, too.",
        ("gqa", "gqa_h100"),
    ),
    Section("One prompt", "Few tiles for a large GPU.", ("prefill_h200", "prefill")),
    Section("One long document", "Few heads.", ("doc",)),
    Section(
        "Decoding",
        "One query against a long context, 32 query heads on 8 key heads. `splits=4` is flash_cute "
        "with the keys in at most 4 splits, whatever it would choose. GB/s count K and V once.",
        ("decode_h200", "decode"),
    ),
    Section(
        "Backward",
        "bf16. Of the first 14 points the means come apart.",
        ("bwd_h100", "bwd_h200"),
    ),
    Section(
        "Backward of the sm80 kernels",
        "The same points by sm80's kernels alone, on Hopper before it had its own.",
        ("bwd_sm80_h100",),
    ),
    Section(
        "Forward and backward", "At the same points.", ("fwdbwd", "fwdbwd_h100", "fwdbwd_h200")
    ),
    Section(
        "Packed documents",
        "Causal. Equal lengths, beside the dense call of the same; and lengths as corpora have "
        "them (log-normal). FA2 is `torch.nn.attention.varlen`.",
        ("varlen_h200", "varlen_h100", "varlen_0f530c0_h100", "varlen_01ad88e_h100"),
    ),
    Section(
        "Windows",
        "Causal, beside the whole mask. FA2 is `torch.nn.attention.varlen`. `/ ideal` is our time "
        "as a multiple of the ideal: the whole mask's time by the share of its blocks that the "
        "window touches; or a copy of as many bytes as the tensors have, if that takes longer.",
        ("window_h200", "window_h100"),
        tables.windows,
    ),
    Section(
        "Chunks",
        "Some queries against a longer context. Causal masks are aligned to the bottom right; "
        "there FA2 is `aten::_flash_attention_forward`, as SDPA aligns to the top left.",
        ("chunks_h200", "chunks_h100", "chunks_01ad88e_h100"),
    ),
    Section(
        "Splits of the keys of chunks",
        "The same calls, each with 1, 2, 4 and 8 splits. Medians of three rounds. The costs of "
        "rows were set by these; flash_cute has the splits that the costs before chose.",
        ("chunks_splits_h200",),
    ),
    Section(
        "Softcap, ALiBi and biases",
        "Causal, beside the plain call; `/ plain` is our time as a multiple of its. A bias is "
        "(1, H, N, N), one of keys (B, 1, 1, N). Trained ones have a gradient.",
        ("scores_h200", "scores_h100", "scores_2b32ff6_h100", "scores_01ad88e_h100"),
        tables.scores,
    ),
    Section(
        "Large head dims",
        "One long document with few heads.",
        ("large_d_h200", "large_d_h100"),
    ),
    Section(
        "V with a head dim of its own",
        "D 192/128 is Q and K of 192 columns with V of 128.",
        ("unequal_h200", "unequal_h100"),
    ),
    Section("fp32", "", ("fp32_h200", "fp32_h100", "fp32_0f530c0_h100", "fp32_01ad88e_h100")),
    Section(
        "A tile of fp32",
        "`smem_limit=198000` has the tile that was kept, flash_cute here another.",
        ("fp32_tiles_h100",),
    ),
    Section("All providers", "One shape.", ("peers",)),
    Section(
        "Tiles for 99 KB",
        "GPUs of compute capability 8.6, 8.9 and 12.0 lend a CTA 99 KB of shared memory. Their "
        "tiles run here on a GPU that has more. They have not been timed on such a GPU.",
        ("small_smem",),
        tables.lengths,
    ),
    Section("Tiles for 99 KB at every head dim", "", ("small_smem_tuning",)),
    Section(
        "Q in registers in tiles for 99 KB",
        "`smem_limit=101376` has Q in registers, `smem_limit=98304` the tile before. That of D 256 "
        "was dropped.",
        ("small_smem_192_h100", "small_smem_256_h100"),
    ),
    Section(
        "Host time",
        "400 calls in a row, medians of 15 rounds. Nothing is flushed. No input requires grad.",
        ("host_time",),
        tables.host_time,
    ),
    Section(
        "Host time behind other functions",
        "100 calls in a row, medians of 15 rounds, B1 H8 N128 D64, bf16, causal: with flash_cute "
        "registered, and with PyTorch's own flash attention.",
        ("doors",),
        tables.doors,
    ),
    Section(
        "Memory",
        "What a forward takes at its peak beyond its inputs. D 100 needs copies: its rows are no "
        "multiple of 16 bytes.",
        ("memory",),
        tables.memory,
    ),
    Section(
        "Memory of a training step",
        "The same of a forward and its backward, and of a backward alone. Gradients are results.",
        ("memory_fwdbwd", "memory_bwd"),
        tables.memory,
    ),
    Section(
        "Accuracy of gradients",
        'Errors against the formula in fp64. Here "to fa2" is our error as a multiple of theirs.',
        ("accuracy",),
        tables.accuracy,
    ),
    Section(
        "Accuracy of fp32",
        'Of 16384 keys. x6: the queries are six times as large. "to efficient" likewise.',
        ("accuracy_fp32",),
        tables.accuracy,
    ),
    Section(
        "A training step in transformers",
        "A Llama of 8 layers, 1024 wide, bf16, with `register(transformers=True)` and with SDPA. "
        "Errors are of all gradients together, relative to those in fp32.",
        ("llama",),
        tables.llama,
    ),
    Section(
        "Context parallelism",
        "PyTorch's `context_parallel`, causal, B1 H8 D128, bf16, with `register(torch=True)` and "
        "without. The greatest of the relative errors of out, dq, dk and dv, beside one GPU.",
        ("context_parallel",),
        tables.context_parallel,
    ),
    Section(
        "Training a GPT",
        "`python -m examples.train_gpt`, 2000 steps of 32 x 1024 bytes, runs of the same seed. "
        "Losses in nats a byte. Pictures are of the first run.",
        ("train_gpt", "train_gpt_h200"),
        tables.training,
    ),
    Section(
        "Training a GPT on documents",
        "`python -m examples.train_gpt --pack`, 2000 steps of 32 documents of up to 1024 bytes: "
        "padded, and packed by `forward_varlen`. Padding counts for no tokens.",
        ("train_gpt_pack_h200", "train_gpt_pack"),
        tables.training,
    ),
)


#: What README's table sums up: points, whose speed, beside whom, and the files of H100 and H200.
SUMMARY: tuple[tuple[str, str, tuple[str, ...], tuple[str | None, str | None]], ...] = (
    ("{} points, N 512 to 16384", "flash_cute", ("fa2", "cudnn"), ("train_h100", "train")),
    ("{} points, the sm80 kernels", "sm80", ("fa2",), ("train_h100", "train")),
    ("one prompt, {} points", "flash_cute", ("fa2", "cudnn"), ("prefill", "prefill_h200")),
    ("decoding, {} points", "flash_cute", ("fa2", "cudnn"), ("decode", "decode_h200")),
    ("backward, {} points", "flash_cute", ("fa2", "cudnn"), ("bwd_h100", "bwd_h200")),
    ("packed documents, {} points", "flash_cute", ("fa2",), ("varlen_h100", "varlen_h200")),
    (
        "D 320 to 1024 in fp16, {} points",
        "flash_cute",
        ("efficient",),
        ("large_d_h100", "large_d_h200"),
    ),
    ("fp32, {} points", "flash_cute", ("efficient",), ("fp32_h100", "fp32_h200")),
)


def load(path: Path) -> Result:
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or not {"meta", "rows"} <= result.keys():
        raise ValueError(f"{path} is no result file: it has no meta and rows")
    return result


def source(result: Result) -> str:
    meta = result["meta"]
    driver = f", driver {meta['driver']}" if meta.get("driver") else ""
    commit = f", commit `{meta['commit'][:10]}`" if meta.get("commit") else ""
    machine = meta.get("gpu") or "CPU"
    return f"{machine}{driver}, torch {meta['torch']}{commit}, {meta['date'][:10]}"


def document(results: Path = RESULTS) -> str:
    """bench/RESULTS.md: the sections whose files are there."""
    text = INTRODUCTION
    for section in SECTIONS:
        if not any((results / f"{name}.json").exists() for name in section.files):
            continue
        text += f"\n## {section.title}\n"
        text += f"\n{section.text}\n" if section.text else ""
        for name in section.files:
            path = results / f"{name}.json"
            if not path.exists():
                continue
            result = load(path)
            text += f"\n[{name}.json](results/{name}.json): {source(result)}.\n"
            text += f"\n{section.table(result['rows'])}\n"
            lines = tables.means(result["rows"])
            text += "\n" + "\n".join(f"- {line}" for line in lines) + "\n" if lines else ""
            if (results / f"{name}.png").exists():
                text += f"\n![{section.title}](results/{name}.png)\n"
    return text


def readme(results: Path = RESULTS) -> str:
    """README's table: how many times as fast as its peers, geometric mean and lowest, by GPU; of
    the files that are there."""
    lines = []
    for text, ours, peers, files in SUMMARY:
        paths = [results / f"{name}.json" for name in files]
        rows = [load(path)["rows"] if path.exists() else [] for path in paths]
        for peer in peers:
            known = [tables.ratios(of_gpu, peer, ours).values() for of_gpu in rows]
            if not any(known):
                continue
            cells = [f"{tables.geometric_mean(k):.2f} ({min(k):.2f})" if k else "-" for k in known]
            points = text.format(max(map(len, known)))
            lines.append([f"{points}, beside {tables.label(peer)}", *cells])
    return tables.grid(["bf16, if not said", "H100", "H200"], lines)


def documents() -> dict[Path, str]:
    """What the two are to be. A README without the comments is an error."""
    before = README.read_text()
    after, count = PART.subn(lambda match: f"{match[1]}\n{readme()}\n\n{match[2]}", before)
    if count != 1:
        raise ValueError(f"{README} has no <!-- numbers:summary --> ... <!-- end:summary -->")
    return {DOCUMENT: document(), README: after}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.results", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--readme", action="store_true", help="print README's table alone")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    args = parser.parse_args(argv)
    if args.readme:
        print(readme())
        return 0
    stale = [path for path, text in documents().items()
             if not path.exists() or path.read_text() != text]  # fmt: skip
    if args.check:
        print("".join(f"{path} is not up to date\n" for path in stale) or "up to date\n", end="")
        return int(bool(stale))
    for path, text in documents().items():
        path.write_text(text)
    from bench.plot import plot

    plot(load(RESULTS / "train.json"), RESULTS / CHART)
    print(f"wrote {DOCUMENT.name}, the table of {README.name} and {CHART}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
