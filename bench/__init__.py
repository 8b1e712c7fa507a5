"""Benchmarks of flash_cute beside its peers: a library that returns rows, a CLI, a plotter.

    python -m bench.run --suite quick                   # measures
    python -m bench.plot bench/results/train.json       # draws what was saved
    python -m bench.results                             # writes what documents say of it
    python -m bench.compare_wheels OLD NEW              # two wheels
    python -m bench.llama                               # a training step in transformers
    torchrun --nproc-per-node 2 -m bench.context_parallel

Shapes are in cases.py, peers in baselines.py, the clock in harness.py.
"""

import sys
from pathlib import Path

# `python -m` puts the checkout first, and what is measured is the installed flash_cute, not the
# folder beside this one. (PYTHONSAFEPATH would do it, but only from Python 3.11 on.)
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [*(entry for entry in sys.path if Path(entry).resolve() != _ROOT), str(_ROOT)]
