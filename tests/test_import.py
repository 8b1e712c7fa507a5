"""What `import flash_cute` does, and what it says where the library is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flash_cute import checks, ops


def test_the_import_leaves_dynamo_and_dtensor_out():
    code = (
        "import sys, torch; before = set(sys.modules); import flash_cute; "
        "new = set(sys.modules) - before; "
        "sys.exit(bool(new & {'torch._dynamo', 'torch.distributed.tensor'}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
    # So this decorator has to do by itself what torch's does.
    ours, torchs = (
        decorate(lambda: None)
        for decorate in (checks.assume_constant_result, torch.compiler.assume_constant_result)
    )
    assert vars(ours) == vars(torchs) != {}


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch may let nobody register twice")
def test_the_package_can_be_imported_again():
    """As in notebooks: the op and its formula are registered already."""
    code = (
        "import sys, torch, flash_cute\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'flash_cute']:\n"
        "    del sys.modules[name]\n"
        "import flash_cute\n"
        "out, _ = flash_cute.forward(*torch.ones(3, 1, 1, 2, 4))\n"
        "sys.exit(not bool((out == 1).all()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_a_missing_library_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r"compiled library is missing .*pip install"):
        ops._load(tmp_path / "none.so")
    (tmp_path / "broken.so").write_text("no library")
    with pytest.raises(ImportError, match=r"does not load under torch .* needs 2.10"):
        ops._load(tmp_path / "broken.so")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match=r"does not run on Windows: use it under WSL 2"):
        ops._load(tmp_path / "none.so")
