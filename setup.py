"""setuptools' script and, by `backend-path` in pyproject.toml, its PEP 517 backend, which asks for
what this machine lacks. The build itself is in csrc/build_library.py."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))

from setuptools import Extension, build_meta, setup
from setuptools.build_meta import *  # noqa: F403
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

from build_library import MANYLINUX, build_library, missing_packages


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*missing_packages(), *build_meta.get_requires_for_build_wheel(config_settings)]


get_requires_for_build_editable = get_requires_for_build_wheel


class BuildExt(build_ext):
    """Our library in place of an extension module: its name tells no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        build_library(target)


class BdistWheel(bdist_wheel):
    """One wheel for every Python: no symbol of Python's is in the library."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", f"{'manylinux_2_28' if MANYLINUX else 'linux'}_{platform.machine()}"


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("flash_cute._flash_cute", sources=[])],
        cmdclass={"build_ext": BuildExt, "bdist_wheel": BdistWheel},
    )
