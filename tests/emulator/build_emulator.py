"""Builds shared libraries of emulated kernels: the project's own sources, compiled for the CPU
against the emulated machine in this folder.

    python tests/emulator/build_emulator.py    build the one that the tests use
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if str(ROOT / "csrc") not in sys.path:
    sys.path.append(str(ROOT / "csrc"))

from faults import plant  # noqa: E402

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
BOOST = "cmeel.prefix"

#: Stands in for the kernels that a library leaves out.
ABSENT = """\
#include <stdexcept>
#include "host/launch_bwd.h"
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
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_bwd_sm80(const BwdPlan&, const BwdParams&, int, cudaStream_t) {{
  throw std::runtime_error("this kernel of the backward was left out of the build");
}}
template <DType kDType, int kHeadDim>
void launch_bias_gradient_sm80(const BwdPlan&, const BwdParams&, int, cudaStream_t) {{
  throw std::runtime_error("this kernel of the backward was left out of the build");
}}
template <DType kDType, int kColumns>
void launch_bwd_sm80_large(const BwdPlan&, const BwdParams&, int, cudaStream_t) {{
  throw std::runtime_error("this kernel of the backward was left out of the build");
}}
template <DType kDType, int kHeadDim, MaskKind kMask>
void launch_bwd_sm90(const BwdPlan&, const BwdParams&, int, cudaStream_t) {{
  throw std::runtime_error("this kernel of sm90's backward was left out of the build");
}}
{instantiations}
}}  // namespace flash_cute
"""


@dataclass(frozen=True)
class Library:
    """`kernels` are patterns of the names that variants.py gives the kernels' files. `sources` is
    the folder in the checkout that they are compiled from."""

    name: str
    kernels: Sequence[str]
    sources: str = SOURCES
    flags: str = "-O2 -g1"  # -g1 leads from an address to a line of the source

    @property
    def folder(self) -> str:
        return f"{BUILD}/{self.name}"

    @property
    def path(self) -> str:
        return f"{self.folder}/emulated.so"

    def files(self) -> list[str]:
        """What is compiled: the kernels' generated files, and the host's sources."""
        generated = variants.generate(ROOT / self.folder / "variants", sm90=True)
        kernels = [f for f in generated if any(fnmatch(f.stem, name) for name in self.kernels)]

        def unit_of(file: Path) -> str:
            op_and_arch, head_dim = re.findall(r"(\w+)_hdim(\d+)", file.stem)[0]
            pair = variants.ALL_HEAD_DIMS.index(int(head_dim)) // 2
            return f"{op_and_arch}_{'fp32_' * ('_fp32' in file.stem)}{pair}"

        units = variants.combine(kernels, ROOT / self.folder, unit_of)
        left_out = [f.read_text().splitlines() for f in generated if f not in kernels]
        lines = [line for file in left_out for line in file if line.startswith("template ")]
        absent = write(f"{self.folder}/absent.cpp", ABSENT.format(instantiations="\n".join(lines)))
        others = [f for f in (ROOT / self.sources).rglob("*") if f.suffix in (".cpp", ".cu")]
        sources = [f for f in sorted(others) if f.parent.name != "torch"]
        return [
            *(f.relative_to(ROOT).as_posix() for f in units),
            absent,
            *(f.relative_to(ROOT).as_posix() for f in sources),
        ]


#: What the tests use: a copy that has faults, switched off. fp16 differs by types alone: one head
#: dim has it.
TESTED = Library(
    "tested", ("*_bf16*", "*_hdim64_fp16*", "*_fp32*"), sources=f"{BUILD}/planted/cute_fa2"
)


def why_not() -> str | None:
    """Why nothing can be emulated here; None if it can."""
    if not find_package(BOOST):
        return "cmeel-boost, which has the context switches, is not installed"
    if not (find_cuda() and find_cutlass() and find_program("ninja")):
        return "the headers of CUDA, those of CUTLASS or ninja were not found"
    return None


def write_ninja(library: Library) -> str:
    compiler, cuda, cutlass = find_compiler(), find_cuda(), find_cutlass()
    assert cuda and cutlass  # see `why_not`
    cuda_include = link("cuda_include", cuda.folder_of("cuda_runtime.h"), BUILD)
    boost = link("boost", find_package(BOOST) or "", BUILD)
    includes = [f"-I{MACHINE}", "-isystem", link("cutlass", cutlass, BUILD)]
    includes += ["-isystem", cuda_include, "-isystem", f"{cuda_include}/cccl"]
    includes += ["-isystem", f"{boost}/include"]
    cxx = [compiler, "-std=c++20", "-fPIC", "-fvisibility=hidden", *includes, "-Wall", "-x", "c++"]
    cxx += ['-DFLASH_CUTE_ARCHS="emulated"', '-DFLASH_CUTE_LEFT_OUT=""']
    cxx += ["-include", f"{MACHINE}/planted.h"]
    kernel = [*cxx, "-include", f"{MACHINE}/device_intrinsics.h"]
    # Registers are seen now as elements, now as words, by CUTLASS too.
    kernel += ["-fno-strict-aliasing", "-Wno-array-bounds"]
    # Each plain access to memory becomes a call of ours (machine.cpp); libtsan is not linked.
    kernel += ["-fsanitize=thread", "-fno-threadsafe-statics"]
    if "clang" not in output_of(compiler, "--version"):
        # Half the time goes into templates: gcc would sweep its memory for a seventh of it all.
        kernel += ["--param=ggc-min-heapsize=2500000", "--param=tsan-instrument-func-entry-exit=0"]
    fill_variables = "-ftrivial-auto-var-init=pattern"  # which gcc has from 12 on, clang from 8
    if "unrecognized" not in output_of(compiler, fill_variables, "-x", "c++", "-E", os.devnull):
        kernel.append(fill_variables)
    libraries = [f"-L{ROOT / boost}/lib", f"-Wl,-rpath,{ROOT / boost}/lib", "-Wl,-z,defs"]
    libraries += ["-lboost_context", "-lpthread", "-ldl"]

    text = f"builddir = {BUILD}\n" + compile_rule("cxx", cxx, BUILD)
    text += compile_rule("kernel", kernel, BUILD)
    text += f"rule link\n  command = {compiler} -shared -o $out $in {shlex.join(libraries)}\n"
    # The machine's objects come first: of inline functions that both have, the linker keeps those
    # that do not call us back.
    machine = [f"{MACHINE}/{file.name}" for file in sorted(HERE.glob("*.cpp"), key=has_kernels)]
    flags = f"{library.flags} -I{library.sources} -I{library.folder}/variants"
    compiled = [(f"{BUILD}/machine", file, f"-O3 -g1 -I{library.sources}") for file in machine]
    compiled += [(library.folder, file, flags) for file in library.files()]
    objects = []
    for folder, file, flags in compiled:
        objects.append(f"{folder}/{Path(file).parent.name}_{Path(file).stem}.o")
        rule = "kernel" if has_kernels(Path(file)) else "cxx"
        text += f"build {objects[-1]}: {rule} {file}\n  flags = {flags}\n"
    return f"{text}build {library.path}: link {' '.join(objects)}\n"


def has_kernels(source: Path) -> bool:
    return source.suffix == ".cu" or source.name.startswith("small_")


def build(library: Library) -> Path:
    """Brings the library up to date and returns where it is."""
    reason = why_not()
    if reason:
        raise BuildError(reason)
    with one_build(BUILD):
        if library.sources != SOURCES:
            plant(library.sources)
        file = write(f"{library.folder}/build.ninja", write_ninja(library))
        result = ninja(file, capture_output=True)
    if result.returncode:
        raise BuildError(f"the emulated kernels do not compile:\n{result.stdout}{result.stderr}")
    return ROOT / library.path


if __name__ == "__main__":
    print(build(TESTED))
