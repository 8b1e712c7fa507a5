"""Code to copy. README.md says what each file shows and how to run it."""

import sys
from pathlib import Path

# `python -m` puts the checkout first, but an installed flash_cute is to run, not the folder beside
# this one. (PYTHONSAFEPATH would do it, but only from Python 3.11 on.)
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [*(entry for entry in sys.path if Path(entry).resolve() != _ROOT), str(_ROOT)]
