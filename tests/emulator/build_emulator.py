"""Builds shared libraries of emulated kernels: the project's own sources, compiled for the CPU
against the emulated machine in this folder.

    python tests/emulator/build_emulator.py    build the one that the tests use
"""

from __future__ import annotations

import operator
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if str(ROOT / "csrc") not in sys.path:
    sys.path.append(str(ROOT / "csrc"))

from build_library import (  # noqa: E402
    SOURCES,
    BuildError,
    compile_rule,
    find_compiler,
    find_cuda,
    find_cutlass,
    find_package,
    find_program,
    link,
    ninja,
    one_build,
    output_of,
    variants,
    write,
)

BUILD = "build/emulator"
MACHINE = HERE.relative_to(ROOT).as_posix()
COMBINE_LAUNCH = "combine/launch.cu"
BOOST = "cmeel.prefix"

#: Stands in for the kernels that a library leaves out.
ABSENT = """\
#include <stdexcept>
#include "host/launch_fwd.h"
namespace flash_cute {{
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_fwd_sm80(const FwdPlan&, const FwdParams&, int, cudaStream_t) {{
  throw std::runtime_error("this kernel of sm80 was left out of the build");
}}
template <DType kDType, int kHeadDim, MaskKind kMask, bool kSplitKV>
void launch_fwd_sm90(const FwdPlan&, const FwdParams&, int, cudaStream_t) {{
  throw std::runtime_error("this kernel of sm90 was left out of the build");
}}
{instantiations}
}}  // namespace flash_cute
"""


@dataclass(frozen=True)
class Library:
    """Kernels to emulate, with their headers from `sources`, a folder in the checkout."""

    name: str = "kernels"
    arch: int = 80
    sources: str = SOURCES
    head_dims: Sequence[int] = variants.ALL_HEAD_DIMS
    dtypes: Sequence[str] = tuple(variants.DTYPES)
    kinds: Sequence[str] = tuple(variants.OPS["fwd"]["sm90"])  # each of which has a file
    debug: bool = False  # for a debugger
    combines: bool = False  # COMBINE_LAUNCH is one of the files from `sources`

    @property
    def folder(self) -> str:
        return f"{BUILD}/{self.name}"

    @property
    def path(self) -> str:
        return f"{self.folder}/emulated.so"

    @property
    def dispatch(self) -> str:
        """The folder of all but the kernels, which is shared by the libraries that have the same
        kernels: it depends on nothing else."""
        parts = (f"{BUILD}/sm{self.arch}", *self.head_dims, *self.dtypes, *self.kinds)
        return "_".join(map(str, parts))

    def generate(self) -> tuple[list[str], list[str]]:
        """Writes the generated sources; returns the kernels' and the others."""
        everything = variants.generate(
            ROOT / self.dispatch / "variants", self.head_dims, sm90=self.arch == 90
        )
        chosen = (f"sm{self.arch}",), self.dtypes, self.kinds
        # fwd_<arch>_hdim<n>_<dtype>, of sm90 with _<kind>
        names = {f: f.stem.split("_")[1:2] + f.stem.split("_")[3:] for f in everything}
        kernels = [f for f in everything if all(map(operator.contains, chosen, names[f]))]
        absent = [f for f in everything if f not in kernels]
        lines = [
            line
            for file in absent
            for line in file.read_text().splitlines()
            if line.startswith("template ")
        ]
        others = []
        for file in sorted((ROOT / SOURCES).rglob("*.c*")):
            if file.suffix in (".cpp", ".cu") and not file.stem.startswith("torch"):
                folder = self.sources if self.combines and file.suffix == ".cu" else SOURCES
                others.append(f"{folder}/{file.relative_to(ROOT / SOURCES).as_posix()}")
        if absent:
            text = ABSENT.format(instantiations="\n".join(lines))
            others.append(write(f"{self.dispatch}/absent.cpp", text))
        return [str(file.relative_to(ROOT)) for file in kernels], others


#: Those that the tests use. Of sm90, bf16 has every head dim; fp16 differs by types alone.
SM80 = Library()
SM90 = {
    "bf16": Library("sm90_bf16", 90, dtypes=("bf16",)),
    "fp16": Library("sm90_fp16", 90, dtypes=("fp16",), head_dims=(64,)),
}


def why_not() -> str | None:
    """Why nothing can be emulated here; None if it can."""
    if not find_package(BOOST):
        return "cmeel-boost, which has the context switches, is not installed"
    if not (find_cuda() and find_cutlass() and find_program("ninja")):
        return "the headers of CUDA, those of CUTLASS or ninja were not found"
    return None


def has_kernels(source: Path) -> bool:
    """Of the files here."""
    return source.stem.startswith("small_kernels")


def write_ninja(libraries: Iterable[Library]) -> str:
    compiler, cuda, cutlass, boost = (
        find_compiler(),
        find_cuda(),
        find_cutlass(),
        find_package(BOOST),
    )
    assert cuda and cutlass and boost  # see `why_not`
    cuda_include = link("cuda_include", cuda.folder_of("cuda_runtime.h"), BUILD)
    boost_link = link("boost", boost, BUILD)
    includes = [f"-I{MACHINE}", "-isystem", link("cutlass", cutlass, BUILD)]
    includes += ["-isystem", cuda_include, "-isystem", f"{cuda_include}/cccl"]
    includes += ["-isystem", f"{boost_link}/include"]
    cxx = [compiler, "-std=c++20", "-fPIC", "-fvisibility=hidden", *includes]
    cxx += ["-Wall", '-DFLASH_CUTE_ARCHS="emulated"', '-DFLASH_CUTE_LEFT_OUT=""']
    kernel = [*cxx, "-include", f"{MACHINE}/device_intrinsics.h"]
    # Registers are seen now as elements, now as words, by CUTLASS too.
    kernel += ["-fno-strict-aliasing", "-Wno-array-bounds"]
    # Each plain access to memory becomes a call of ours (machine.cpp); libtsan is not linked.
    kernel += ["-fsanitize=thread", "-fno-threadsafe-statics"]
    # Half the time goes into templates; without this gcc sweeps its memory for a seventh of it all.
    if "clang" not in output_of(compiler, "--version"):
        kernel += ["--param", "ggc-min-heapsize=500000"]
    fill_variables = "-ftrivial-auto-var-init=pattern"  # which gcc has from 12 on, clang from 8
    if "unrecognized" not in output_of(compiler, fill_variables, "-x", "c++", "-E", os.devnull):
        kernel.append(fill_variables)

    boost_lib = ROOT / boost_link / "lib"
    link_flags = [f"-L{boost_lib}", f"-Wl,-rpath,{boost_lib}", "-Wl,-z,defs", "-lboost_context"]
    command = f"{compiler} -shared -o $out $in {shlex.join(link_flags)} -lpthread -ldl"

    text = f"builddir = {BUILD}\n"
    text += compile_rule("cxx", [*cxx, "-x", "c++"], BUILD)
    text += compile_rule("kernel", [*kernel, "-x", "c++"], BUILD)
    text += f"rule link\n  command = {command}\n  description = linking $out\n"

    compiled: dict[str, str] = {}  # target: its rule
    linked: list[str] = []

    def compile_to(folder: str, file: str, rule: str, flags: str, *includes: str) -> str:
        target = f"{folder}/{Path(file).stem}.o"
        flags = " ".join([flags, *(f"-I{include}" for include in includes)])
        compiled[target] = f"build {target}: {rule} {file}\n  flags = {flags}\n"
        return target

    machine = []
    for source in sorted(HERE.glob("*.cpp"), key=has_kernels):
        rule = "kernel" if has_kernels(source) else "cxx"
        file = f"{MACHINE}/{source.name}"
        machine.append(compile_to(f"{BUILD}/machine", file, rule, "-O2 -g", SOURCES))
    for library in libraries:
        kernels, others = library.generate()
        # The machine's objects come first: of inline functions that both have, the linker keeps
        # those that call us not back.
        objects = list(machine)
        # -g1 leads from an address to a line of the source.
        flags = "-O0 -g" if library.debug else "-O2 -g1"
        for file in kernels:
            objects.append(compile_to(library.folder, file, "kernel", flags, library.sources))
        for file in others:
            sources = library.sources if file.startswith(library.sources) else SOURCES
            includes = sources, f"{library.dispatch}/variants"
            flags = "-O2 -g1"
            rule = "kernel" if file.endswith(".cu") else "cxx"
            folder = library.folder if library.combines else library.dispatch
            objects.append(compile_to(folder, file, rule, flags, *includes))
        linked.append(f"build {library.path}: link {' '.join(objects)}\n")
    return "".join([text, *compiled.values(), *linked])


def build(*libraries: Library) -> list[Path]:
    """Brings the libraries up to date and returns where they are."""
    reason = why_not()
    if reason:
        raise BuildError(reason)
    with one_build(BUILD):
        file = write(f"{BUILD}/build.ninja", write_ninja(libraries))
        result = ninja(file, capture_output=True)
    if result.returncode:
        raise BuildError(f"the emulated kernels do not compile:\n{result.stdout}{result.stderr}")
    return [ROOT / library.path for library in libraries]


if __name__ == "__main__":
    print(*build(SM80))
