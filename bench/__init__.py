"""Benchmarks of flash_cute beside its peers: a library that returns rows, a CLI, a plotter.

    python -m bench.run --suite quick
    python -m bench.plot bench/results/train.json
    python -m bench.transformer_block

The last is no benchmark alone: a GPT-style block that checks itself, and the example to copy from.
"""
