"""Finds what a build needs: the compilers, CUTLASS, torch and ninja.

Torch is found without importing it, and packages are looked for by path, because a build may run
in an environment of its own (pip's build isolation) that hides them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OLDEST_CUDA = (12, 4)
OLDEST_TORCH = (2, 10)

# Whether the library is linked for old systems.
MANYLINUX = bool(os.environ.get("FLASH_CUTE_MANYLINUX"))

TORCH_PACKAGE = "torch==2.13.0"
CUTLASS_PACKAGE = "nvidia-cutlass==4.2.0.0"
CUDA_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.*",  # not to the micro version, which CUDA builds of torch choose
)


class BuildError(SystemExit):
    """Ends the build with one sentence and no traceback."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"flash_cute: {sentence}")


def site_folders() -> list[Path]:
    """Where packages are: in this environment, and in the one that build isolation hides."""
    folders = [*sys.path, *site.getsitepackages()]
    folders += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def find_package(relative: str) -> Path | None:
    """The first `relative` path that exists among the installed packages."""
    paths = (folder / relative for folder in site_folders())
    return next((path for path in paths if path.exists()), None)


def find_program(name: str) -> str | None:
    """A program on the PATH, or beside this Python, whose environment need not be activated."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), sysconfig.get_path("scripts")])
    return shutil.which(name) or shutil.which(name, path=beside)


def find_torch() -> Path | None:
    """The folder of a torch that is new enough."""
    for folder in site_folders():
        version = folder / "torch/version.py"
        if version.is_file():
            found = re.search(r"__version__ = '(\d+)\.(\d+)", version.read_text())
            if found and (int(found[1]), int(found[2])) >= OLDEST_TORCH:
                return version.parent
    return None


def find_cutlass() -> Path | None:
    """CUTLASS's headers: the submodule's if it is checked out, else the PyPI package's."""
    submodule = ROOT / "third_party/cutlass/include"
    return submodule if submodule.is_dir() else find_package("cutlass_library/source/include")


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit."""

    root: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"CUDA {self.version[0]}.{self.version[1]}"

    def folder_of(self, file: str) -> str | None:
        """The folder of a header or library, relative to the toolkit; None if it has none such."""
        targets = [f"targets/{machine}-linux/*" for machine in (platform.machine(), "sbsa")]
        for pattern in ("include", "lib64", "lib", *targets):
            for folder in sorted(self.root.glob(pattern)):
                if (folder / file).is_file():
                    return str(folder.relative_to(self.root))
        return None


def nvcc_candidates() -> Iterator[Path]:
    """Where an nvcc may be, best first."""
    if not os.environ.get("FLASH_CUTE_PYPI_CUDA"):
        if home := os.environ.get("CUDA_HOME"):
            nvcc = Path(home, "bin/nvcc")
            if not nvcc.is_file():
                raise BuildError(
                    f"there is no {nvcc}; set CUDA_HOME to a CUDA toolkit, or unset it to use "
                    "the nvcc on the PATH or the one from PyPI"
                )
            yield nvcc
        if on_path := shutil.which("nvcc"):
            yield Path(on_path)
        yield Path("/usr/local/cuda/bin/nvcc")
    for folder in site_folders():
        toolkit = folder / "nvidia/cu13"
        if all((toolkit / part).exists() for part in ("nvvm/bin/cicc", "bin/crt", "include/cccl")):
            yield toolkit / "bin/nvcc"


def find_cuda() -> Cuda | None:
    """The toolkit of the first nvcc that there is."""
    nvcc = next((nvcc for nvcc in nvcc_candidates() if nvcc.is_file()), None)
    if nvcc is None:
        return None
    release = re.search(r"release (\d+)\.(\d+)", output_of([str(nvcc), "--version"]))
    if not release:
        raise BuildError(f"{nvcc} --version names no release; set CUDA_HOME to a CUDA toolkit")
    version = (int(release[1]), int(release[2]))
    if version < OLDEST_CUDA:
        raise BuildError(
            f"{nvcc} is of CUDA {release[1]}.{release[2]}, and 12.4 is the oldest that does; set "
            "CUDA_HOME to a newer toolkit, or FLASH_CUTE_PYPI_CUDA=1 to use the one from PyPI"
        )
    # nvcc may be a wrapper script that stands elsewhere; it says itself where its toolkit is.
    dry_run = output_of([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull])
    top = re.search(r"^#\$ TOP=(.*)$", dry_run, re.MULTILINE)
    root = Path(top[1].strip()) if top else nvcc.parent.parent
    return Cuda(root.resolve(), version)


def find_compiler() -> str:
    """The host compiler: CXX, else what there is."""
    if named := os.environ.get("CXX"):
        if not shutil.which(named):
            raise BuildError(
                f"CXX is {named!r}, and there is no such program; name one C++ compiler in it, "
                "without arguments"
            )
        return named
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return name
    raise BuildError(
        "there is no C++ compiler; install g++ (on Debian and Ubuntu: apt install g++) or set CXX"
    )


def missing_packages() -> list[str]:
    """The PyPI packages that a build in this environment still needs."""
    missing = []
    if not find_program("ninja"):
        missing.append("ninja")
    if not find_torch():
        missing.append(TORCH_PACKAGE)
    if not find_cutlass():
        missing.append(CUTLASS_PACKAGE)
    if not find_cuda():
        missing.extend(CUDA_PACKAGES)
    if MANYLINUX and not find_package("ziglang"):
        missing.append("ziglang")
    return missing


def output_of(command: list[str]) -> str:
    """What `command` prints, errors included, whatever its exit status."""
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        ).stdout
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None
