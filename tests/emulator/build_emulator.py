"""Builds shared libraries of emulated kernels: the project's own sources, compiled for the CPU
against the emulated machine in this folder.

    python tests/emulator/build_emulator.py    build the one that the tests use
"""

from __future__ import annotations

import fcntl
import hashlib
import operator
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if str(ROOT / "csrc") not in sys.path:
    sys.path.append(str(ROOT / "csrc"))

from build_library import SOURCES, BuildError, for_ninja, link, variants, write  # noqa: E402
from toolchain import (  # noqa: E402
    find_compiler,
    find_cuda,
    find_cutlass,
    find_package,
    find_program,
    output_of,
)

BUILD = "build/emulator"
MACHINE = HERE.relative_to(ROOT).as_posix()
COMBINE_LAUNCH = "combine/launch.cu"
#: The sources without kernels.
HOST = (
    *(f"host/{name}.cpp" for name in ("build_info", "device", "launch_fwd", "plan_fwd")),
    *(f"host/{name}.cpp" for name in ("split_kv", "tile_schedule")),
    "sm90/tensor_map.cpp",
)
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
    combines: bool = False  # with COMBINE_LAUNCH from `sources` as well, not as the other libraries have it

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
        others = [f"{SOURCES}/{name}" for name in HOST]
        others.append(f"{self.sources if self.combines else SOURCES}/{COMBINE_LAUNCH}")
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
    compiler, cuda = find_compiler(), find_cuda()
    targets = {"cutlass": find_cutlass(), "cuda": cuda and cuda.root, "boost": find_package(BOOST)}
    links = {name: link(name, target, BUILD) for name, target in targets.items() if target}
    cuda_include = f"{links['cuda']}/{cuda.folder_of('cuda_runtime.h')}"
    includes = [f"-I{MACHINE}", "-isystem", links["cutlass"], "-isystem", cuda_include]
    includes += ["-isystem", f"{cuda_include}/cccl", "-isystem", f"{links['boost']}/include"]
    cxx = [compiler, "-std=c++20", "-fPIC", "-fvisibility=hidden", *includes]
    cxx += ["-Wall", '-DFLASH_CUTE_ARCHS="emulated"']
    kernel = [*cxx, "-include", f"{MACHINE}/device_intrinsics.h"]
    # Registers are seen now as elements, now as words, by CUTLASS too.
    kernel += ["-fno-strict-aliasing", "-Wno-array-bounds"]
    # Each plain access to memory becomes a call of ours (machine.cpp); libtsan is not linked.
    kernel += ["-fsanitize=thread", "-fno-threadsafe-statics"]
    # Half the time goes into templates; without this gcc sweeps its memory for a seventh of it all.
    version = output_of([compiler, "--version"])
    if "clang" not in version:
        kernel += ["--param", "ggc-min-heapsize=500000"]
    fill_variables = "-ftrivial-auto-var-init=pattern"  # which gcc has from 12 on, clang from 8
    if "unrecognized" not in output_of([compiler, fill_variables, "-x", "c++", "-E", os.devnull]):
        kernel.append(fill_variables)

    identity = version + os.environ.get("CPLUS_INCLUDE_PATH", "")
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cached = [sys.executable, "csrc/object_cache.py", "$out", "$out.d", digest]
    boost = ROOT / links["boost"] / "lib"
    shared = [compiler, "-shared", "-o", "$out", "$in", f"-L{boost}", f"-Wl,-rpath,{boost}"]
    shared += ["-Wl,-z,defs", "-lboost_context", "-lpthread", "-ldl"]

    text = f"builddir = {BUILD}\n"
    for name, tool in (("cxx", cxx), ("kernel", kernel)):
        steps = [*cached, *tool, "-MD", "-MF", "$out.d", "-x", "c++", "-c", "$in", "-o", "$out"]
        command = for_ninja(steps).replace("-MD", "$flags -MD", 1)
        text += f"rule {name}\n  command = {command}\n  description = compiling $in\n"
        text += "  deps = gcc\n  depfile = $out.d\n"
    text += f"rule link\n  command = {for_ninja(shared)}\n  description = linking $out\n"

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
    lock = (ROOT / write(f"{BUILD}/lock", "")).open()
    fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time
    file = write(f"{BUILD}/build.ninja", write_ninja(libraries))
    count = os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))
    command = [find_program("ninja") or "ninja", "-f", file, "-j", str(count), "--quiet"]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if result.returncode:
        raise BuildError(f"the emulated kernels do not compile:\n{result.stdout}{result.stderr}")
    return [ROOT / library.path for library in libraries]


if __name__ == "__main__":
    print(*build(SM80))
