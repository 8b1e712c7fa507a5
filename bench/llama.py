"""A training step of a small Llama of transformers, with random weights: flash_cute by
`register(transformers=True)` beside SDPA. Loss and gradients are compared with those of fp32.

    python -m bench.llama --json bench/results/llama.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import flash_cute
from bench import environment, tables
from bench.harness import Row, default_device, turn_order, wake_up
from bench.run import positive, save, without_folders

VOCABULARY = 8192
PROVIDERS = {"flash_cute": "cute_fa", "sdpa": "sdpa"}
#: How the documents of a batch lie.
MODES = ("plain", "padded", "packed")


def make_model(layers: int, hidden: int, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).to(device).train()


def make_batch(mode: str, batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Random tokens (B, N), of documents that fill a half to all of N."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    ends = torch.linspace(length // 2, length, batch).int()[:, None]
    columns = torch.arange(length)
    if mode == "padded":
        is_token = columns < ends
        inputs["attention_mask"] = is_token.long()
        inputs["labels"] = ids.masked_fill(~is_token, -100)
    if mode == "packed":  # two documents a row
        inputs["position_ids"] = torch.where(columns < ends, columns, columns - ends)
    return {name: x.to(device) for name, x in inputs.items()}


def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach()


def gradients(model: Any, inputs: dict[str, Tensor]) -> tuple[float, Tensor]:
    model.zero_grad()
    loss = step(model, inputs)
    return loss.item(), torch.cat([x.grad.float().flatten() for x in model.parameters()])


def measure(args: argparse.Namespace, device: torch.device) -> list[Row]:
    exact = make_model(args.layers, args.hidden, device)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    exact.load_state_dict(model.state_dict())  # what bf16 has of the weights
    rows = []
    for mode in MODES:
        inputs = make_batch(mode, args.batch, args.length, device)
        right_loss, right = gradients(exact, inputs)
        found: dict[str, Row] = {}
        for provider, name in PROVIDERS.items():
            model.set_attn_implementation(name)
            loss, grads = gradients(model, inputs)
            found[provider] = {
                "kind": "llama", "name": f"{mode}, B{args.batch} N{args.length}", "status": "ok",
                "provider": provider, "loss": loss, "loss_of_fp32": right_loss,
                "gradient_error": float((grads - right).norm() / right.norm()),
            }  # fmt: skip
        ours, theirs = (found[provider]["gradient_error"] for provider in PROVIDERS)
        found["flash_cute"]["correct"] = ours <= 1.2 * theirs + 1e-4
        samples: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
        for turn in range(args.rounds + 1):
            for provider in turn_order(list(PROVIDERS), turn):
                model.set_attn_implementation(PROVIDERS[provider])
                model.zero_grad()
                environment.synchronize(device)
                start = time.perf_counter()
                step(model, inputs)
                environment.synchronize(device)
                if turn > 0:  # the first warms up
                    samples[provider].append((time.perf_counter() - start) * 1e3)
        for provider, times in samples.items():
            found[provider]["ms"] = statistics.median(times)
        rows += found.values()
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.llama")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--hidden", type=positive, default=1024, help="heads have 64 of them")
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--length", type=positive, default=4096)
    parser.add_argument("--rounds", type=positive, default=8)
    parser.add_argument("--commit", help="recorded where it cannot be told")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the rows")
    args = parser.parse_args(argv)
    device = default_device()
    flash_cute.register(transformers=True)
    wake_up(device)
    rows = measure(args, device)
    print(tables.llama(rows))
    if args.json:
        meta = environment.describe(device, without_folders(argv))
        meta |= {"commit": meta["commit"] or args.commit, "transformers": transformers.__version__}
        meta |= {"layers": args.layers, "hidden": args.hidden}
        save(args.json, {"meta": meta, "rows": rows})
    return int(not all(row.get("correct", True) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
