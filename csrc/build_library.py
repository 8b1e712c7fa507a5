"""Builds flash_cute/_flash_cute.so: writes build.ninja and runs ninja.

    python csrc/build_library.py           build the library in place
    python csrc/build_library.py --needs   print the PyPI packages that a build here lacks

setup.py calls the same functions. Only the standard library is used. From the environment:

    FLASH_CUTE_HEAD_DIMS    head dims to build, as "64,128" (default: all)
    FLASH_CUTE_ARCHS        chips to build machine code for, as "80,90" (default: all); 90a is for
                            the kernels that only Hopper runs, the others for those that all do
    FLASH_CUTE_CACHE        the folder of the object cache (object_cache.py), or nothing for none
    FLASH_CUTE_PYPI_CUDA=1  leave the machine's CUDA toolkits aside for the one from PyPI
    FLASH_CUTE_MANYLINUX=1  link for old systems (manylinux_2_28) by PyPI's ziglang
    MAX_JOBS                how many compilers run side by side (default: by cores and memory)
    CUDA_HOME, CXX          the CUDA toolkit, the host compiler
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from toolchain import (
    CUDA_PACKAGES,
    CUTLASS_PACKAGE,
    MANYLINUX,
    ROOT,
    TORCH_PACKAGE,
    BuildError,
    Cuda,
    find_compiler,
    find_cuda,
    find_cutlass,
    find_package,
    find_program,
    find_torch,
    missing_packages,
    output_of,
)

SOURCES = "csrc/cute_fa2"
BUILD = "build/library"
GENERATED = f"{BUILD}/variants"
LIBRARY = "flash_cute/_flash_cute.so"

ARCHS = ("80", "90", "90a", "100", "120")
ARCHS_OF_CUDA_12_8 = ("100", "120")
GIGABYTES_PER_JOB = 5.0  # a heavy CuTe file takes up to 4.5


def load_variants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("variants", ROOT / SOURCES / "variants.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


variants = load_variants()


T = TypeVar("T", int, str)


def chosen_items(variable: str, allowed: Sequence[T]) -> list[T]:
    """What the environment variable chooses of `allowed`, separated by commas; all by default."""
    text = os.environ.get(variable, "")
    if not text:
        return list(allowed)
    chosen = {item.strip() for item in text.split(",")}
    if not chosen <= set(map(str, allowed)):
        choices = ", ".join(map(str, allowed))
        raise BuildError(f"{variable} is {text!r}; choose among {choices}, separated by commas")
    return [item for item in allowed if str(item) in chosen]


def chosen_archs(cuda: Cuda) -> list[str]:
    archs = chosen_items("FLASH_CUTE_ARCHS", ARCHS)
    if cuda.version >= (12, 8) or not set(archs) & set(ARCHS_OF_CUDA_12_8):
        return archs
    if os.environ.get("FLASH_CUTE_ARCHS"):
        raise BuildError(
            f"sm_100 and sm_120 need CUDA 12.8 and this is {cuda}; narrow FLASH_CUTE_ARCHS"
        )
    print(f"flash_cute: {cuda} has no sm_100 and sm_120 yet: the PTX will serve them")
    return [arch for arch in archs if arch not in ARCHS_OF_CUDA_12_8]


def available_gigabytes() -> float:
    """What processes may still allocate, by the machine and by the control group we are in."""
    limits = []
    try:
        meminfo = Path("/proc/meminfo").read_text()
        limits += [int(kib) * 1024 for kib in re.findall(r"MemAvailable:\s+(\d+) kB", meminfo)]
        group = Path("/sys/fs/cgroup")
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        caches = re.findall(
            r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE
        )
        limits.append(int(limit) - int(used) + sum(map(int, caches)))
    except (OSError, ValueError):
        pass  # no such file, or a group without a limit ("max")
    return min(limits, default=0) / 1e9


def jobs(cores: int, gigabytes: float, asked: str | None) -> int:
    """How many compilers run side by side: as many as there are cores and memory for."""
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise BuildError(f"MAX_JOBS is {asked!r}; set it to a positive number or unset it")
        return int(asked)
    return max(1, min(cores, int(gigabytes / GIGABYTES_PER_JOB)))


def not_found(what: str, package: str) -> BuildError:
    return BuildError(f"{what} was not found; run: {sys.executable} -m pip install {package}")


def link(name: str, target: Path, folder: str = BUILD) -> str:
    """A link in the build folder to `target`, whose path differs from environment to environment:
    so the compile commands do not, and the object cache serves them all."""
    path = ROOT / folder / "links" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return str(path.relative_to(ROOT))


def write(path: str, text: str) -> str:
    variants.write_if_changed(ROOT / path, text)
    return path


def manylinux_linker(compiler: str) -> tuple[list[str], list[str]]:
    """A linker for systems as old as glibc 2.28, and what it links beside our objects.

    libstdc++ goes in. libgcc_s does not: past a static unwinder no exception leaves the library.
    glibc has __libc_single_threaded, which libstdc++ reads, from 2.32 on; 0 is its safe value.
    """
    if not find_package("ziglang"):
        raise not_found("ziglang, which links for old systems,", "ziglang")
    inputs = [
        write(
            f"{BUILD}/single_threaded.c",
            '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n',
        )
    ]
    for name in ("libstdc++.a", "libgcc_s.so.1"):
        path = output_of([compiler, f"-print-file-name={name}"]).strip()
        if not os.path.isabs(path):
            raise BuildError(
                f"{compiler} has no {name}, which manylinux wheels need; set CXX to g++"
            )
        inputs.append(path)
    target = f"{platform.machine()}-linux-gnu.2.28"
    return [sys.executable, "-m", "ziglang", "cc", "-target", target, "-Wl,-s"], inputs


def toolkit_folder(cuda: Cuda, file: str, compiler: str) -> str | None:
    """The toolkit's folder with `file`; None where the compiler finds it without being told."""
    folder = cuda.folder_of(file)
    if folder is None:
        # The whole path of a library that the compiler finds; of anything else the name again.
        answer = output_of([compiler, f"-print-file-name={file}"]).strip()
        given = [os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH")]
        places = ["/usr/include", "/usr/local/include", *os.pathsep.join(given).split(os.pathsep)]
        if not any(Path(place, answer).is_file() for place in places):
            raise BuildError(
                f"{cuda} in {cuda.root} has no {file}; install the toolkit's development files, "
                "or set FLASH_CUTE_PYPI_CUDA=1 to use the toolkit from PyPI"
            )
    return folder


def for_ninja(command: list[str]) -> str:
    """A command line as a value in build.ninja; $in and $out stay references."""
    words = [
        word if word in ("$in", "$out", "$out.d", "$flags") else shlex.quote(word)
        for word in command
    ]
    return re.sub(r"\$(?!in|out|flags)", "$$$$", " ".join(words))


def find_tools() -> tuple[Path, Path, Cuda, str]:
    """torch, CUTLASS, the CUDA toolkit and the C++ compiler; an error where one is missing."""
    torch, cutlass, cuda, compiler = find_torch(), find_cutlass(), find_cuda(), find_compiler()
    if not torch:
        raise not_found("torch 2.10 or newer", TORCH_PACKAGE)
    if not cutlass:
        raise not_found("CUTLASS (neither third_party/cutlass nor a package)", CUTLASS_PACKAGE)
    if not cuda:
        raise not_found("nvcc", " ".join(CUDA_PACKAGES))
    return torch, cutlass, cuda, compiler


def write_ninja() -> tuple[str, str]:
    """Writes the build file; returns its path and the library's, both relative to the checkout.
    Within `one_build`."""
    torch, cutlass, cuda, compiler = find_tools()
    cuda_include = toolkit_folder(cuda, "cuda_runtime.h", compiler)
    cuda_library = toolkit_folder(cuda, "libcudart_static.a", compiler)
    head_dims = chosen_items("FLASH_CUTE_HEAD_DIMS", variants.ALL_HEAD_DIMS)
    code = [*(f"sm_{arch}" for arch in chosen_archs(cuda)), "compute_80"]
    sm90 = variants.SM90_CODE in code
    sm80_code = [item for item in code if item != variants.SM90_CODE]
    found = f"{cuda} in {cuda.root}, CUTLASS in {cutlass}, torch in {torch}, {compiler}"
    print(f"flash_cute: {found}; head dims {head_dims}; {' '.join(code)}", flush=True)

    kernels = variants.generate(ROOT / GENERATED, head_dims, sm90=sm90)
    targets = {"torch": torch, "cutlass": cutlass, "cuda": cuda.root}
    links = {name: link(name, target) for name, target in targets.items()}

    flags = ["-std=c++20", "-O3", "-DNDEBUG", f"-I{SOURCES}", f"-I{GENERATED}"]
    cxx = [compiler, *flags, "-fPIC", "-fvisibility=hidden", "-DUSE_CUDA"]
    cxx += ["-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{links['torch']}/include"]
    cxx += [f"-I{links['cuda']}/{cuda_include}"] if cuda_include else []
    cxx += [f'-DFLASH_CUTE_ARCHS="{" ".join(code)}"']
    nvcc = [f"{links['cuda']}/bin/nvcc", *flags, "-Xcompiler=-fPIC,-fvisibility=hidden"]
    nvcc += ["--expt-relaxed-constexpr", f"-I{links['cutlass']}", f"-ccbin={compiler}"]

    # What the compilers do follows from the commands and from these; part of every cache key.
    versions = [output_of([tool, "--version"]) for tool in (f"{cuda.root}/bin/nvcc", compiler)]
    names = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH")
    settings = "\n".join([*versions, *(os.environ.get(name, "") for name in names)])
    identity = hashlib.sha256(settings.encode()).hexdigest()[:16]
    cached = [sys.executable, "csrc/object_cache.py", "$out", "$out.d", identity]

    folder = f"{BUILD}/manylinux" if MANYLINUX else BUILD
    library = f"{folder}/_flash_cute.so"
    linker, inputs = manylinux_linker(compiler) if MANYLINUX else ([compiler], [])
    # torch finds the ops through their registration: nothing has to be exported.
    exports = write(f"{BUILD}/exports.map", "{ local: *; };\n")
    # CUDA's symbols are found through libtorch as a whole; a CPU build of torch has none to name.
    libraries = [f"-L{links['torch']}/lib", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    libraries += ["-ltorch_cpu", "-lc10"]
    libraries += [f"-L{links['cuda']}/{cuda_library}"] if cuda_library else []
    libraries += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    shared = [*linker, "-shared", f"-Wl,--version-script={exports}", "-o", "$out", "$in"]

    text = f"builddir = {BUILD}\n"
    for name, tool, output in (("cxx", cxx, "-c"), ("nvcc", nvcc, "-c"), ("ptx", nvcc, "-ptx")):
        depfile = ["-MD", "-MF", "$out.d"]
        command = for_ninja([*cached, *tool, "$flags", *depfile, output, "$in", "-o", "$out"])
        text += f"rule {name}\n  command = {command}\n  description = compiling $in\n"
        text += "  deps = gcc\n  depfile = $out.d\n"
    text += (
        f"rule link\n  command = {for_ninja([*shared, *libraries])}\n  description = linking $out\n"
    )
    objects = []
    sources = [p for p in sorted((ROOT / SOURCES).rglob("*")) if p.suffix in (".cpp", ".cu")]
    for source in [*kernels, *sources]:
        name = source.stem if source in kernels else "_".join(
            source.relative_to(ROOT / SOURCES).with_suffix("").parts
        )
        objects.append(f"{BUILD}/{name}.o")
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        text += f"build {objects[-1]}: {rule} {source.relative_to(ROOT)}\n"
        if rule == "nvcc":
            text += f"  flags = {variants.nvcc_flags(source, sm80_code)}\n"
        if "_sm90_" in source.name:  # no part of the library, but tests/ptx asks for it
            text += f"build {BUILD}/{source.stem}.ptx: ptx {source.relative_to(ROOT)}\n"
            text += f"  flags = {variants.nvcc_flags(source, [])}\n"
    text += f"build {library}: link {' '.join(objects + inputs)} | {exports}\n"
    text += f"default {library}\n"
    return write(f"{folder}/build.ninja", text), library


@contextmanager
def one_build() -> Iterator[None]:
    """Alone in the build folder, after another build if one is under way there. Of two, each would
    change files that the other reads, and miss what the other has compiled."""
    (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
    with (ROOT / BUILD / "lock").open("w") as lock:  # given up when the file is closed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("flash_cute: another build is under way here: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_library(target: Path) -> None:
    """Brings `target`, a copy of the library, up to date."""
    find_tools()  # what is missing is said at once
    with one_build():
        ninja_file, library = write_ninja()
        build(ninja_file)
        built = ROOT / library
        if not target.exists() or target.read_bytes() != built.read_bytes():
            # Replaced, not overwritten: a process may have the old one loaded.
            new = target.with_suffix(".new")
            shutil.copyfile(built, new)
            os.replace(new, target)


def build(ninja_file: str, *targets: str) -> None:
    """Brings these up to date, by default the library; within `one_build`."""
    ninja = find_program("ninja")
    if not ninja:
        raise not_found("ninja", "ninja")
    count = jobs(len(os.sched_getaffinity(0)), available_gigabytes(), os.environ.get("MAX_JOBS"))
    print(f"flash_cute: compiling what has changed, {count} at a time", flush=True)
    environment = {"NINJA_STATUS": "[%f/%t] %e s ", **os.environ}
    command = [ninja, "-f", ninja_file, "-j", str(count), *targets]
    if subprocess.call(command, cwd=ROOT, env=environment) != 0:
        raise BuildError("the build failed; the messages above say why")


if __name__ == "__main__":
    if sys.argv[1:] == ["--needs"]:
        print(*missing_packages())
    else:
        build_library(ROOT / LIBRARY)
