"""What the built library holds for sm_80 and sm_90, read with cuobjdump: the instructions that the
kernels stand on, no spills, and no more registers than the tile table allows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_cute.ops import LIBRARY

INFO: dict[str, Any] = json.loads(torch.ops.flash_cute.build_info())
ROWS: list[dict[str, Any]] = [
    row for row in INFO["tiles"] if (row["arch"], row["op"]) == ("sm80", "fwd")
]
ARCHS = [arch for arch in ("sm_80", "sm_90") if arch in INFO["archs"]]
# In the order of FwdConfig's members in csrc/cute_fa2/config.h, which is that of a mangled name.
CONFIG = ("head_dim", "block_m", "block_n", "warps", "stages")
DTYPES, MASKS = 2, 2


def config_of(kernel: str) -> tuple[int, ...]:
    """The tile of a kernel, by the FwdConfig in its mangled name."""
    found = re.search(r"FwdConfigE((?:Li\d+E)+)", kernel)
    assert found, kernel
    return tuple(int(number) for number in re.findall(r"\d+", found[1]))


def cuobjdump(*arguments: str) -> str:
    packaged = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin")  # with nvdisasm beside it
    path = f"{packaged}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/local/cuda/bin"
    program = shutil.which("cuobjdump", path=path)
    if not program or not shutil.which("nvdisasm", path=path):
        pytest.skip("needs cuobjdump and nvdisasm: the PyPI packages of nvidia-cuda-<name>")
    command = [program, *arguments, str(LIBRARY)]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module", params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def opcodes(arch: str) -> dict[str, Counter[str]]:
    """For each forward kernel, how often each instruction stands in it."""
    kernels: dict[str, Counter[str]] = {}
    opcodes: Counter[str] = Counter()
    for line in cuobjdump("-sass", "-arch", arch).splitlines():
        if function := re.search(r"Function : (\S+)", line):
            opcodes = Counter()
            if "fwd_kernel" in function[1]:
                kernels[function[1]] = opcodes
        elif instruction := re.match(
            r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9]+)", line
        ):
            opcodes[instruction[1]] += 1
    return kernels


@pytest.fixture(scope="module")
def resources(arch: str) -> dict[str, dict[str, int]]:
    """For each forward kernel: REG, STACK, LOCAL and so on."""
    text = cuobjdump("-res-usage", "-arch", arch)
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d\])?:(\d+)", usage)}
        for name, usage in re.findall(r"Function (\S+):\n(.*)", text)
        if "fwd_kernel" in name
    }


def test_there_is_something_to_read() -> None:
    if not ARCHS:
        pytest.skip(f"this build has neither sm_80 nor sm_90 ({', '.join(INFO['archs'])})")
    assert ROWS


def test_machine_code_for_every_chip() -> None:
    listed = cuobjdump("-lelf")
    assert set(re.findall(r"\.(sm_\d+)\.cubin", listed)) == set(INFO["archs"]) - {"compute_80"}
    assert "compute_80" not in INFO["archs"] or ".sm_80.ptx" in cuobjdump("-lptx")


def test_every_row_has_its_kernels(
    opcodes: dict[str, Counter[str]], resources: dict[str, dict[str, int]]
) -> None:
    """So that the tests below miss none."""
    configs = {tuple(row[field] for field in CONFIG) for row in ROWS}
    assert Counter(map(config_of, opcodes)) == dict.fromkeys(configs, DTYPES * MASKS)
    assert set(resources) == set(opcodes)


def test_instructions(opcodes: dict[str, Counter[str]]) -> None:
    """ldmatrix, cp.async and the tensor cores are used."""
    for kernel, counts in opcodes.items():
        missing = {"LDSM", "LDGSTS", "HMMA"} - set(counts)
        assert not missing, (kernel, missing)


def test_no_spills(opcodes: dict[str, Counter[str]], resources: dict[str, dict[str, int]]) -> None:
    spills = {
        kernel: (counts["LDL"], counts["STL"], resources[kernel])
        for kernel, counts in opcodes.items()
        if counts["LDL"]
        or counts["STL"]
        or resources[kernel]["STACK"]
        or resources[kernel]["LOCAL"]
    }
    assert not spills


def test_registers_within_the_budget(resources: dict[str, dict[str, int]]) -> None:
    for kernel, usage in resources.items():
        rows = [row for row in ROWS if tuple(row[f] for f in CONFIG) == config_of(kernel)]
        assert usage["REG"] <= min(row["max_registers"] for row in rows), (kernel, usage)
