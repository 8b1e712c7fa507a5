"""Builds flash_cute/_flash_cute.so: finds the compilers, CUTLASS and torch, writes build.ninja and runs ninja.

    python csrc/build_library.py           build the library in place
    python csrc/build_library.py --needs   print the PyPI packages that a build here lacks

setup.py calls the same functions. Only the standard library is used, and torch is found without importing it, because a build
may run in an environment of its own (pip's build isolation) where neither is there.

Environment: FLASH_CUTE_HEAD_DIMS and FLASH_CUTE_ARCHS narrow the build, MAX_JOBS sets the number of parallel jobs, CUDA_HOME
the CUDA toolkit, CXX the host compiler, FLASH_CUTE_CACHE the folder of the object cache (object_cache.py).
FLASH_CUTE_PYPI_CUDA=1 leaves the machine's toolkits aside for the one from PyPI; FLASH_CUTE_MANYLINUX=1 links the library for
old systems with PyPI's ziglang.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "csrc/cute_fa2"
BUILD = "build/library"
LINKS = f"{BUILD}/links"
GENERATED = f"{BUILD}/variants"
LIBRARY = "flash_cute/_flash_cute.so"

ARCHS = (80, 90, 100, 120)
ARCHS_OF_CUDA_12_8 = (100, 120)
OLDEST_CUDA = (12, 4)
OLDEST_TORCH = (2, 10)
GIGABYTES_PER_JOB = 5.5  # a heavy CuTe file takes up to 5.3

TORCH_PACKAGE = "torch==2.13.0"
CUTLASS_PACKAGE = "nvidia-cutlass==4.2.0.0"
# The runtime's micro version is left open, because CUDA builds of torch pin it.
CUDA_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.*",
)


class BuildError(SystemExit):
    """Ends the build with one sentence and no traceback."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"flash_cute: {sentence}")


# ---- what the build needs, and where it is ----------------------------------------------------------------------------------


def site_folders() -> list[Path]:
    """Where packages are installed: in this environment, and in the one that pip's build isolation hides."""
    folders = [
        *sys.path,
        *site.getsitepackages(),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    ]
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def find_package(relative: str) -> Path | None:
    """The first `relative` path that exists in an environment's packages."""
    return next(
        (folder / relative for folder in site_folders() if (folder / relative).exists()), None
    )


def find_program(name: str) -> str | None:
    """A program on the PATH or beside this Python (whose environment need not be activated)."""
    scripts = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(scripts))


def find_torch() -> Path | None:
    """The folder of a torch that is new enough."""
    for folder in site_folders():
        version = folder / "torch" / "version.py"
        if version.is_file():
            found = re.search(r"__version__ = '(\d+)\.(\d+)", version.read_text())
            if found and (int(found[1]), int(found[2])) >= OLDEST_TORCH:
                return version.parent
    return None


def find_cutlass() -> Path | None:
    """CUTLASS's include folder: the submodule's if it is checked out, else the PyPI package's."""
    submodule = ROOT / "third_party/cutlass/include"
    return submodule if submodule.is_dir() else find_package("cutlass_library/source/include")


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit."""

    root: Path
    version: tuple[int, int]

    def folder_of(self, file: str) -> str | None:
        """The folder of a header or library, as a path relative to the toolkit."""
        for pattern in (
            "include",
            "lib64",
            "lib",
            f"targets/{platform.machine()}-linux/*",
            "targets/sbsa-linux/*",
        ):
            for folder in sorted(self.root.glob(pattern)):
                if (folder / file).is_file():
                    return str(folder.relative_to(self.root))
        return None


def nvcc_candidates() -> Iterable[Path]:
    if not os.environ.get("FLASH_CUTE_PYPI_CUDA"):
        if home := os.environ.get("CUDA_HOME"):
            if not (Path(home) / "bin/nvcc").is_file():
                raise BuildError(
                    f"CUDA_HOME is {home}, but there is no bin/nvcc in it; set it to a CUDA toolkit or unset it"
                )
            yield Path(home) / "bin/nvcc"
        if on_path := shutil.which("nvcc"):
            yield Path(on_path)
        yield Path("/usr/local/cuda/bin/nvcc")
    for folder in site_folders():
        if (folder / "nvidia/cu13/nvvm/bin/cicc").is_file() and (
            folder / "nvidia/cu13/include/cccl"
        ).is_dir():
            yield folder / "nvidia/cu13/bin/nvcc"


def find_cuda() -> Cuda | None:
    """The toolkit of the first nvcc that there is."""
    nvcc = next((nvcc for nvcc in nvcc_candidates() if nvcc.is_file()), None)
    if nvcc is None:
        return None
    said = output_of([str(nvcc), "--version"])
    release = re.search(r"release (\d+)\.(\d+)", said)
    if not release:
        raise BuildError(f"{nvcc} --version names no release; set CUDA_HOME to a CUDA toolkit")
    version = (int(release[1]), int(release[2]))
    if version < OLDEST_CUDA:
        raise BuildError(
            f"the CUDA toolkit of {nvcc} is {version[0]}.{version[1]}, and {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]} is the oldest that "
            "will do; set CUDA_HOME to a newer one, or FLASH_CUTE_PYPI_CUDA=1 to use the one from PyPI"
        )
    # nvcc may be a wrapper script that stands elsewhere; it says itself where the toolkit is.
    top = re.search(
        r"^#\$ TOP=(.*)$",
        output_of([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull]),
        re.MULTILINE,
    )
    root = Path(top[1].strip()) if top else nvcc.parent.parent
    return Cuda(root.resolve(), version)


def find_compiler() -> str:
    """The host compiler: CXX, else what there is."""
    if named := os.environ.get("CXX"):
        if not shutil.which(named):
            raise BuildError(
                f"CXX is {named}, and there is no such program; set it to a C++ compiler or unset it"
            )
        return named
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if not found:
        raise BuildError(
            "there is no C++ compiler; install g++ (on Debian and Ubuntu: apt install g++) or set CXX"
        )
    return Path(found).name


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
    if os.environ.get("FLASH_CUTE_MANYLINUX") and not find_package("ziglang"):
        missing.append("ziglang")
    return missing


def output_of(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        ).stdout
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None


# ---- settings ---------------------------------------------------------------------------------------------------------------


def numbers_from(variable: str, allowed: Sequence[int]) -> list[int]:
    """A comma-separated subset of `allowed` from the environment, or all of it."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return list(allowed)
    try:
        chosen = sorted({int(item) for item in text.split(",")})
    except ValueError:
        chosen = []
    if not chosen or not set(chosen) <= set(allowed):
        raise BuildError(
            f"{variable} is {text!r}, and a comma-separated choice of {', '.join(map(str, allowed))} is expected"
        )
    return chosen


def archs_for(cuda: Cuda) -> list[int]:
    archs = numbers_from("FLASH_CUTE_ARCHS", ARCHS)
    too_new = [arch for arch in archs if arch in ARCHS_OF_CUDA_12_8 and cuda.version < (12, 8)]
    if too_new:
        names = ", ".join(f"sm_{arch}" for arch in too_new)
        if os.environ.get("FLASH_CUTE_ARCHS"):
            raise BuildError(
                f"{names} in FLASH_CUTE_ARCHS needs CUDA 12.8, and this is CUDA {cuda.version[0]}.{cuda.version[1]}"
            )
        print(
            f"flash_cute: no machine code for {names}, which needs CUDA 12.8 (the PTX serves them)"
        )
    return [arch for arch in archs if arch not in too_new]


def available_gigabytes() -> float:
    """What a process may still allocate, by the machine and by the control group that this one is in."""
    limits = []
    try:
        meminfo = Path("/proc/meminfo").read_text()
        limits.append(int(re.search(r"MemAvailable:\s+(\d+) kB", meminfo)[1]) * 1024)  # type: ignore[index]
    except (OSError, TypeError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limits.append(
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    except (OSError, ValueError):
        pass  # no control group, or "max"
    return min(limits, default=0) / 1e9


def jobs(cores: int, gigabytes: float, asked: str | None = None) -> int:
    """How many compilers run side by side: as many as there are cores and memory for."""
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise BuildError(f"MAX_JOBS is {asked!r}, and a positive number is expected")
        return int(asked)
    return max(1, min(cores, int(gigabytes / GIGABYTES_PER_JOB)))


def load_variants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("variants", ROOT / SOURCES / "variants.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the build --------------------------------------------------------------------------------------------------------------


def require(found: Path | Cuda | str | None, what: str, package: str) -> None:
    if found is None:
        raise BuildError(f"{what} was not found; run: {sys.executable} -m pip install {package}")


def link(name: str, target: Path) -> str:
    """A link in the build folder, so that compile commands are the same in every clone and environment (see object_cache.py)."""
    path = ROOT / LINKS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return f"{LINKS}/{name}"


def write_if_changed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def manylinux_link(compiler: str, folder: str) -> tuple[str, list[str]]:
    """The linker command and the inputs that make the library run on systems as old as glibc 2.28.

    libstdc++ goes in statically; libgcc_s stays dynamic, because exceptions cannot leave the library past a static unwinder.
    __libc_single_threaded, which libstdc++ reads, came with glibc 2.32: 0 is its safe value.
    """
    require(find_package("ziglang"), "ziglang, which links for old systems,", "ziglang")
    source = f"{folder}/single_threaded.c"
    write_if_changed(
        ROOT / source, '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'
    )
    libraries = [
        output_of([compiler, f"-print-file-name={name}"]).strip()
        for name in ("libstdc++.a", "libgcc_s.so.1")
    ]
    missing = [name for name in libraries if not os.path.isabs(name)]
    if missing:
        raise BuildError(
            f"{compiler} has no {missing[0]}, which the manylinux link needs; set CXX to a g++ that has"
        )
    linker = f"{shlex.quote(sys.executable)} -m ziglang cc -target {platform.machine()}-linux-gnu.2.28 -Wl,-s"
    return linker, [source, *libraries]


def write_ninja(manylinux: bool) -> tuple[str, str]:
    """Writes build.ninja; returns its path and the library's, both relative to the checkout."""
    torch, cutlass, cuda = find_torch(), find_cutlass(), find_cuda()
    require(torch, f"torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer", TORCH_PACKAGE)
    require(cutlass, "CUTLASS (neither as third_party/cutlass nor as a package)", CUTLASS_PACKAGE)
    require(cuda, "nvcc", " ".join(CUDA_PACKAGES))
    assert torch and cutlass and cuda
    compiler = find_compiler()
    archs = archs_for(cuda)
    variants = load_variants()
    head_dims = numbers_from("FLASH_CUTE_HEAD_DIMS", variants.ALL_HEAD_DIMS)
    kernels = [path.relative_to(ROOT) for path in variants.generate(ROOT / GENERATED, head_dims)]

    torch_link, cutlass_link, cuda_link = (
        link("torch", torch),
        link("cutlass", cutlass),
        link("cuda", cuda.root),
    )
    cuda_include = cuda.folder_of("cuda_runtime.h")
    cuda_libraries = cuda.folder_of("libcudart_static.a")

    identity = "\n".join(
        [output_of([f"{cuda.root}/bin/nvcc", "--version"]), output_of([compiler, "--version"])]
        + [
            os.environ.get(name, "")
            for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH")
        ]
    )
    arch_names = [f"sm_{arch}" for arch in archs] + ["compute_80"]
    common = ["-std=c++20", "-O3", "-DNDEBUG", f"-I{SOURCES}", f"-I{GENERATED}"]
    cxx_flags = [
        *common,
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
    ]
    cxx_flags += [f'-DFLASH_CUTE_ARCHS="{" ".join(arch_names)}"', f"-I{torch_link}/include"]
    cxx_flags += [f"-I{cuda_link}/{cuda_include}"] if cuda_include else []
    nvcc_flags = [
        *common,
        "--expt-relaxed-constexpr",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        f"-I{cutlass_link}",
    ]
    nvcc_flags += [f"-gencode=arch=compute_80,code=[{','.join(arch_names)}]"]
    nvcc_flags += [f"-ccbin={compiler}"] if os.environ.get("CXX") else []

    folder = f"{BUILD}/manylinux" if manylinux else BUILD
    linker, extra = manylinux_link(compiler, folder) if manylinux else (shlex.quote(compiler), [])
    write_if_changed(
        ROOT / BUILD / "exports.map", "{ local: *; };\n"
    )  # torch finds the ops through their registration
    library = f"{folder}/_flash_cute.so"
    link_flags = ["-shared", f"-Wl,--version-script={BUILD}/exports.map", f"-L{torch_link}/lib"]
    # libtorch as a whole is needed, because CUDA's symbols are found through it and a CPU build of torch has none to link with.
    link_flags += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu", "-lc10"]
    link_flags += [f"-L{cuda_link}/{cuda_libraries}"] if cuda_libraries else []
    link_flags += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]

    cache = f"{shlex.quote(sys.executable)} csrc/object_cache.py $out $out.d {hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    text = [
        "ninja_required_version = 1.5",
        f"builddir = {BUILD}",
        "rule cxx",
        f"  command = {escaped(cache)} {escaped(shlex.quote(compiler))} {escaped(shlex.join(cxx_flags))} -MD -MF $out.d -c $in -o $out",
        "  deps = gcc\n  depfile = $out.d\n  description = compiling $in",
        "rule nvcc",
        f"  command = {escaped(cache)} {cuda_link}/bin/nvcc {escaped(shlex.join(nvcc_flags))} -MD -MF $out.d -c $in -o $out",
        "  deps = gcc\n  depfile = $out.d\n  description = compiling $in",
        "rule link",
        f"  command = {escaped(linker)} -o $out $in {escaped(shlex.join(link_flags))}",
        "  description = linking $out",
    ]
    objects = []
    for source in [*kernels, Path(SOURCES, "dispatch.cpp"), Path(SOURCES, "torch_binding.cpp")]:
        objects.append(f"{BUILD}/{source.stem}.o")
        text.append(f"build {objects[-1]}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {source}")
    text.append(f"build {library}: link {' '.join(objects + extra)} | {BUILD}/exports.map")
    ninja_file = f"{folder}/build.ninja"
    write_if_changed(ROOT / ninja_file, "\n".join(text) + "\n")
    print(
        f"flash_cute: CUDA {cuda.version[0]}.{cuda.version[1]} ({cuda.root}), CUTLASS ({cutlass}), torch ({torch}), {compiler};"
        f" head dims {' '.join(map(str, head_dims))}; {' '.join(arch_names)}",
        flush=True,
    )
    return ninja_file, library


def escaped(command: str) -> str:
    """`command` as a value in build.ninja, but for the references $in and $out."""
    return re.sub(r"\$(?!in|out)", "$$$$", command)


def build_library(manylinux: bool = False) -> Path:
    """Brings the library up to date and returns where it is in the build folder."""
    ninja = find_program("ninja")
    require(ninja, "ninja", "ninja")
    assert ninja
    ninja_file, library = write_ninja(manylinux)
    count = jobs(len(os.sched_getaffinity(0)), available_gigabytes(), os.environ.get("MAX_JOBS"))
    environment = {"NINJA_STATUS": "[%f/%t] %e s ", **os.environ}
    print(f"flash_cute: {ninja} with {count} job{'s' if count > 1 else ''}", flush=True)
    if subprocess.call([ninja, "-f", ninja_file, "-j", str(count)], cwd=ROOT, env=environment) != 0:
        raise BuildError("the build failed; the messages above say where")
    return ROOT / library


def install_in_place() -> None:
    built, library = build_library(), ROOT / LIBRARY
    if not library.exists() or library.read_bytes() != built.read_bytes():
        # Replaced, not overwritten: a process may have the old one mapped.
        copy = library.with_suffix(".new")
        shutil.copyfile(built, copy)
        os.replace(copy, library)


if __name__ == "__main__":
    if sys.argv[1:] == ["--needs"]:
        print(*missing_packages())
    else:
        install_in_place()
