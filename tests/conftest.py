"""Markers. `gpu`: skipped without a GPU that flash_cute serves. `sm90` and `other_kernels`: skipped
unless that GPU runs the sm90 kernels too. `full`: skipped without --full.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# pytest puts the checkout first. The tests are for the installed package, not for the folder beside
# this one. So the checkout goes last (bench is found there).
ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [*(entry for entry in sys.path if entry not in ("", ROOT)), ROOT]

# Inductor compiles in this process. With Triton it would start up to 32 workers, which can hang
# (pytorch/pytorch#162199). torch reads this and the next when it is imported.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Without work, OpenMP's threads sleep. By default they spin, on the cores that the emulator needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import support  # noqa: E402
import torch  # noqa: E402

from flash_cute import checks  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full sweep too (marker `full`)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU that flash_cute serves")
    config.addinivalue_line("markers", "sm90: needs a GPU that runs the sm90 kernels")
    config.addinivalue_line(
        "markers", "other_kernels: on such a GPU, takes the kernels that are not its default"
    )
    config.addinivalue_line("markers", "full: part of the full sweep, which runs only with --full")


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return f"no GPU (torch {torch.__version__})"
    refusal = checks.why_not(torch.device("cuda", torch.cuda.current_device()), torch.float16)
    return refusal[1] if refusal else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    why_no_gpu = _why_no_gpu()
    has_sm90 = why_no_gpu is None and support.gpu_has_sm90()
    for item in items:
        if why_no_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=why_no_gpu))
        elif not has_sm90 and any(map(item.get_closest_marker, ("sm90", "other_kernels"))):
            item.add_marker(pytest.mark.skip(reason="this GPU runs the sm80 kernels alone"))
        if not config.getoption("--full") and item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="the full sweep runs with --full"))


@pytest.fixture(autouse=True)
def other_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the marker of that name, `run` and `check` prefer these kernels."""
    if request.node.get_closest_marker("other_kernels"):
        monkeypatch.setattr(support, "preferred_arch", support.gpu_archs()[1])
