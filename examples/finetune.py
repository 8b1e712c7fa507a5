"""A model of Hugging Face's transformers on flash_cute, by one line: trained for a few steps on
documents of unequal lengths, padded or packed.

    python -m examples.finetune
    python -m examples.finetune --model path/to/a/model --attention sdpa --pack

Without --model it is a small Llama with random weights, whose tokens are bytes. The documents are
functions of Python's standard library.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

import flash_cute


def documents(count: int, longest: int) -> list[Tensor]:
    """Sources of functions, as bytes, each of at most `longest`."""
    functions = [x for _, x in inspect.getmembers(textwrap.TextWrapper, inspect.isfunction)]
    functions += [x for _, x in inspect.getmembers(json.JSONEncoder, inspect.isfunction)]
    functions += [x for _, x in inspect.getmembers(inspect, inspect.isfunction)]
    sources = [inspect.getsource(x).encode()[:longest] for x in functions[:count]]
    return [torch.tensor(list(source)) for source in sources]


def padded(batch: list[Tensor]) -> dict[str, Tensor]:
    """(B, N), on the right side filled up with padding, which is masked."""
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    lengths = torch.tensor([[len(document)] for document in batch])
    mask = torch.arange(ids.shape[1]) < lengths
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def packed(batch: list[Tensor]) -> dict[str, Tensor]:
    """(1, T): one after the other. Their positions say where they begin, as those of transformers'
    DataCollatorWithFlattening."""
    labels = torch.cat(batch)
    starts = torch.tensor([0, *(len(document) for document in batch[:-1])]).cumsum(0)
    labels = labels.index_fill(0, starts, -100)  # nobody predicts a first byte
    positions = torch.cat([torch.arange(len(document)) for document in batch])
    inputs = {"input_ids": torch.cat(batch), "position_ids": positions, "labels": labels}
    return {name: x[None] for name, x in inputs.items()}


def load(path: str | None) -> Any:
    if path is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def main(argv: list[str] | None = None) -> list[float]:
    """Returns the loss of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m examples.finetune")
    parser.add_argument("--model", help="a folder of transformers' with a causal language model")
    parser.add_argument("--attention", default="cute_fa", help="cute_fa is flash_cute; or sdpa")
    parser.add_argument("--pack", action="store_true", help="pack the documents, do not pad them")
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="documents of a step")
    parser.add_argument("--longest", type=int, default=512, help="bytes of a document")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = load(args.model).to(args.device).train()
    flash_cute.register(transformers=True)  # the one line,
    model.set_attn_implementation(args.attention)  # and transformers' own

    texts = documents(64, args.longest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if args.model is None else 1e-5)
    losses: list[float] = []
    for step in tqdm(range(args.steps), disable=None):
        batch = [texts[(step * args.batch + i) % len(texts)] for i in range(args.batch)]
        inputs = (packed if args.pack else padded)(batch)
        inputs = {name: x.to(args.device) for name, x in inputs.items()}
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"{args.attention}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {args.steps}")
    return losses


if __name__ == "__main__":
    main()
