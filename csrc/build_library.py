"""Builds flash_cute/_flash_cute.so: finds compilers and headers, writes build.ninja, runs ninja.

    python csrc/build_library.py                  build the library in place
    python csrc/build_library.py --for-example    the same, narrowed to what `make run` needs,
                                                  with its arguments behind
    python csrc/build_library.py --missing        print the PyPI packages that a build here lacks

setup.py calls `build_library` and `missing_packages`. CONTRIBUTING.md lists the variables.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES, BUILD = "csrc/cute_fa2", "build/library"
LIBRARY = ROOT / "flash_cute/_flash_cute.so"
MANYLINUX = bool(os.environ.get("FLASH_CUTE_MANYLINUX"))
ARCHS = ("80", "90", "90a", "100", "120")  # 90a has the SM90 kernels, the others those of SM80
GIGABYTES_PER_JOB = 6.5  # a heavy CuTe file takes up to 5.8

TORCH_PACKAGE, CUTLASS_PACKAGE = "torch==2.13.0", "nvidia-cutlass==4.2.0.0"
CUDA_PACKAGES = [f"nvidia-{name}==13.0.88" for name in ("cuda-nvcc", "cuda-crt", "nvvm")]
CUDA_PACKAGES += ["nvidia-cuda-cccl==13.0.85", "nvidia-cuda-runtime==13.0.*"]

# nvcc's own variables. The build moves them into the commands, where ninja and ccache see them.
NVCC_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

sys.path.append(str(ROOT / SOURCES))

import variants  # noqa: E402


class BuildError(SystemExit):
    """Ends the build with one sentence and no traceback."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"flash_cute: {sentence}")


def output_of(*command: str) -> str:
    """What a command prints, errors included, whatever its exit status."""
    return subprocess.getoutput(shlex.join(command))


def find_package(file: str) -> Path | None:
    """A file of a package, of this environment or of the one that pip's build isolation hides."""
    folders = [*sys.path, *site.getsitepackages()]
    folders += [site.getusersitepackages()] if sys.prefix == sys.base_prefix else []
    paths = (Path(folder, file) for folder in folders if folder)
    return next((path for path in paths if path.exists()), None)


def find_program(name: str) -> str | None:
    """A program beside this Python, whose environment need not be activated, or on the PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def find_torch() -> Path | None:
    """The folder of a torch, by a header that is there from 2.10 on."""
    header = find_package("torch/include/torch/csrc/stable/c/shim.h")
    return header and header.parents[5]


def find_cutlass() -> Path | None:
    """CUTLASS's headers: the submodule's if it is checked out, else the PyPI package's."""
    submodule = ROOT / "third_party/cutlass/include"
    return submodule if submodule.is_dir() else find_package("cutlass_library/source/include")


class Cuda(NamedTuple):
    """A CUDA toolkit."""

    root: Path
    version: str

    def folder_of(self, file: str) -> Path:
        """The folder of a header or library, which distributions put outside of the toolkit."""
        for parent in (self.root, *self.root.glob("targets/*"), Path("/usr")):
            for name in ("include", "lib64", "lib", f"lib/{platform.machine()}-linux-gnu"):
                if (parent / name / file).is_file():
                    return parent / name
        raise BuildError(f"{self.root} has no {file}; install it, or set FLASH_CUTE_PYPI_CUDA=1")

    def archs(self) -> list[str]:
        """The chips that it compiles for: before CUDA 12.8 not sm_100 and sm_120."""
        known = output_of(f"{self.root}/bin/nvcc", "--list-gpu-code").split()
        return [arch for arch in ARCHS if f"sm_{arch.rstrip('a')}" in known]


def find_cuda() -> Cuda | None:
    """The toolkit that CUDA_HOME names, of the nvcc on the PATH, of the system, or from PyPI."""
    home, headers = os.environ.get("CUDA_HOME"), find_package("nvidia/cu13/include/cccl")
    places = [home and f"{home}/bin/nvcc", shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    if os.environ.get("FLASH_CUTE_PYPI_CUDA"):
        places = []
    elif home and not Path(home, "bin/nvcc").is_file():
        raise BuildError(f"CUDA_HOME is {home!r}, which has no bin/nvcc; correct it or unset it")
    places += [f"{headers.parent.parent}/bin/nvcc"] if headers else []
    nvcc = next((place for place in places if place and Path(place).is_file()), None)
    if nvcc is None:
        return None
    version = "".join(re.findall(r"release ([\d.]+)", output_of(nvcc, "--version"))) or "0"
    if [int(number) for number in version.split(".")] < [12, 4]:
        need = "12.4 or newer is needed; set CUDA_HOME, or FLASH_CUTE_PYPI_CUDA=1 for PyPI's"
        raise BuildError(f"{nvcc} is of CUDA {version}, and {need}")
    # nvcc may be a wrapper script that stands elsewhere; it says itself where its toolkit is.
    top = re.search(r"#\$ TOP=(.*)", output_of(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull))
    return Cuda(Path(top[1].strip() if top else f"{nvcc}/../..").resolve(), version)


def find_compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if compiler := next(filter(shutil.which, names), None):
        return compiler
    raise BuildError(f"there is no {names[0]}; install it, or name a C++ compiler in CXX")


def missing_packages() -> list[str]:
    """The PyPI packages that a build in this environment still needs."""
    wanted = [
        (find_program("ninja"), ["ninja"]),
        (find_torch(), [TORCH_PACKAGE]),
        (find_cutlass(), [CUTLASS_PACKAGE]),
        (find_cuda(), CUDA_PACKAGES),
        (not MANYLINUX or find_package("ziglang"), ["ziglang"]),
    ]
    return [package for found, packages in wanted if not found for package in packages]


def jobs() -> str:
    """How many compilers run side by side: as many as there are cores and memory for."""
    free = re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    group = Path("/sys/fs/cgroup/memory.max")  # "max" is no limit
    limit = re.findall(r"\d+", group.read_text()) if group.is_file() else []
    gigabytes = min([int(kib) / 1e6 for kib in free] + [int(size) / 1e9 for size in limit])
    count = min(len(os.sched_getaffinity(0)), int(gigabytes / GIGABYTES_PER_JOB))
    return os.environ.get("MAX_JOBS") or str(max(1, count))


def chosen(variable: str, allowed: Sequence[str]) -> list[str]:
    """Those of `allowed` that the environment variable lists; all by default."""
    text = os.environ.get(variable) or ",".join(allowed)
    items = {item.strip() for item in text.split(",")}
    if not items <= set(allowed):
        choices = ", ".join(allowed)
        raise BuildError(f"{variable} is {text!r}; choose among {choices}, separated by commas")
    return [item for item in allowed if item in items]


def narrow_to_example() -> None:
    """Narrows the build to head dim 64 in the example's dtype on the GPU that is here, or to what a
    library holds that is in place and serves that. The environment comes first."""
    cuda = find_cuda()
    if not cuda or os.environ.get("FLASH_CUTE_HEAD_DIMS") or os.environ.get("FLASH_CUTE_ARCHS"):
        return
    import torch

    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 8
    archs = [arch for arch in cuda.archs() if int(arch.rstrip("a")) // 10 == major] or ["80"]
    head_dims, dtypes = [64], ["fp16" if any(arg.endswith("fp16") for arg in sys.argv) else "bf16"]
    with suppress(OSError, AttributeError, KeyError):  # there is none, or it is of another version
        torch.ops.load_library(LIBRARY)
        info = json.loads(torch.ops.flash_cute.build_info())
        held = [arch for arch in ARCHS if f"sm_{arch}" in info["archs"]]
        if 64 in info["head_dims"] and {*dtypes} <= {*info["dtypes"]} and {*archs} <= {*held}:
            head_dims, archs = [*info["head_dims"], *info["large_head_dims"]], held
            dtypes = info["dtypes"]
    os.environ["FLASH_CUTE_HEAD_DIMS"] = ",".join(map(str, head_dims))
    os.environ["FLASH_CUTE_DTYPES"] = os.environ.get("FLASH_CUTE_DTYPES") or ",".join(dtypes)
    os.environ["FLASH_CUTE_ARCHS"] = ",".join(archs)


def write(path: str, text: str) -> str:
    variants.write_if_changed(ROOT / path, text)
    return path


def link(name: str, target: str | Path, folder: str = BUILD) -> str:
    """A link in the build folder, so that commands are the same in every checkout and environment,
    and ccache serves them all."""
    path = ROOT / folder / "links" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return str(path.relative_to(ROOT))


def compile_rule(name: str, command: Sequence[str], folder: str = BUILD) -> str:
    """A rule of build.ninja that compiles $in with $flags, by ccache where there is one."""
    ccache = find_program("ccache")
    command = [link("ccache", ccache, folder), *command] if ccache else command
    return (
        f"rule {name}\n  command = {shlex.join(command)} $flags -MD -MF $out.d -c $in -o $out\n"
        "  description = compiling $in\n  deps = gcc\n  depfile = $out.d\n"
    )


def manylinux_linker(compiler: str) -> tuple[list[str], list[str]]:
    """A linker for systems as old as glibc 2.28, and what it links beside our objects."""
    # libstdc++ goes in. libgcc_s does not: past a static unwinder no exception leaves the library.
    # glibc has __libc_single_threaded, which libstdc++ reads, from 2.32 on; 0 is its safe value.
    text = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'
    names = ("libstdc++.a", "libgcc_s.so.1")
    paths = [output_of(compiler, f"-print-file-name={name}").strip() for name in names]
    if not all(map(os.path.isabs, paths)):
        raise BuildError(f"{compiler} has no {' and '.join(names)}; set CXX to g++ for the wheel")
    target = f"{platform.machine()}-linux-gnu.2.28"
    linker = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-Wl,-s"]
    return linker, [write(f"{BUILD}/single_threaded.c", text), *paths]


def write_ninja() -> tuple[str, str]:
    """Writes the build file; returns its path and the library's, both relative to the checkout."""
    if missing := missing_packages():
        raise BuildError(f"run this first: {sys.executable} -m pip install {' '.join(missing)}")
    torch, cutlass, cuda, compiler = find_torch(), find_cutlass(), find_cuda(), find_compiler()
    all_dims, all_archs = [str(dim) for dim in variants.ALL_HEAD_DIMS], cuda.archs()
    dims, archs = chosen("FLASH_CUTE_HEAD_DIMS", all_dims), chosen("FLASH_CUTE_ARCHS", all_archs)
    dtypes = chosen("FLASH_CUTE_DTYPES", variants.ALL_DTYPES)
    code = [*(f"sm_{arch}" for arch in archs), "compute_80"]
    left_out = [f"head dim {dim}" for dim in all_dims if dim not in dims]
    left_out += [dtype for dtype in variants.ALL_DTYPES if dtype not in dtypes]
    left_out += [f"sm_{arch}" for arch in all_archs if arch not in archs]
    found = f"CUDA {cuda.version} in {cuda.root}, CUTLASS in {cutlass}, torch in {torch}"
    what = f"head dims {', '.join(dims)}; {' '.join(dtypes)}; {' '.join(code)}"
    what += f"; {jobs()} jobs of {compiler}"
    print(f"flash_cute: {found}; {what}", flush=True)
    if left_out:
        print(f"flash_cute: left out: {', '.join(left_out)} (`make build` has all)", flush=True)

    flags = ["-std=c++20", "-O3", "-DNDEBUG", f"-I{SOURCES}", f"-I{BUILD}/variants"]
    cxx = [compiler, *flags, "-fPIC", "-fvisibility=hidden", "-DUSE_CUDA"]
    cxx += ["-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{link('torch', torch)}/include"]
    cxx += [f"-I{link('cuda_include', cuda.folder_of('cuda_runtime.h'))}"]
    cxx += [f'-DFLASH_CUTE_ARCHS="{" ".join(code)}"']
    cxx += [f'-DFLASH_CUTE_LEFT_OUT="{", ".join(left_out)}"']
    # The version is in the link's name: with another toolkit everything is compiled again.
    nvcc = [f"{link(f'cuda-{cuda.version}', cuda.root)}/bin/nvcc", *flags, f"-ccbin={compiler}"]
    nvcc += ["-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr"]
    nvcc += [f"-I{link('cutlass', cutlass)}"]
    # A wheel is a third smaller, a library has a quarter of its size. Drivers for CUDA 13 read it.
    nvcc += ["--compress-mode=size"] if int(cuda.version.split(".")[0]) >= 13 else []
    nvcc += [word for name in NVCC_FLAGS for word in shlex.split(os.environ.get(name, ""))]

    linker, inputs = manylinux_linker(compiler) if MANYLINUX else ([compiler], [])
    # torch finds the ops through their registration: nothing has to be exported.
    exports = write(f"{BUILD}/exports.map", "{ local: *; };\n")
    # CUDA's symbols are found through libtorch as a whole; a CPU build of torch has none to name.
    libraries = [*inputs, f"-Wl,--version-script={exports}", f"-L{link('torch', torch)}/lib"]
    libraries += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu", "-lc10"]
    libraries += [f"-L{link('cuda_lib', cuda.folder_of('libcudart_static.a'))}"]
    libraries += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]

    text = f"builddir = {BUILD}\n" + compile_rule("cxx", cxx) + compile_rule("nvcc", nvcc)
    text += f"rule link\n  command = {shlex.join(linker)} -shared -o $out $in "
    text += f"{shlex.join(libraries)}\n  description = linking $out\n"
    sm90, folder, head_dims = "90a" in archs, ROOT / BUILD / "variants", [int(dim) for dim in dims]
    generated = variants.generate(folder, head_dims, dtypes, sm90=sm90)
    sources = variants.combine(generated, ROOT / BUILD / "units")
    sources += sorted((ROOT / SOURCES).rglob("*.cu")) + sorted((ROOT / SOURCES).rglob("*.cpp"))
    objects = []
    for source in sources:
        objects.append(f"{BUILD}/objects/{source.relative_to(ROOT)}.o")
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        text += f"build {objects[-1]}: {rule} {source.relative_to(ROOT)}\n"
        text += f"  flags = {variants.nvcc_flags(source, code)}\n" if rule == "nvcc" else ""
    library = f"{BUILD}/{'manylinux/' if MANYLINUX else ''}_flash_cute.so"
    text += f"build {library}: link {' '.join(objects)} | {exports}\n"
    return write(f"{library}.ninja", text), library


def ninja(file: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Brings up to date what a build file describes; the options are those of subprocess.run."""
    environment = {"NINJA_STATUS": "[%f/%t] %e s ", **os.environ}
    environment |= {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    # In depend mode nothing is preprocessed: the compilers say what they read.
    environment |= {"CCACHE_DEPEND": "1", "CCACHE_COMPILERCHECK": "content"}
    environment |= dict.fromkeys(NVCC_FLAGS, "")
    command = [find_program("ninja") or "ninja", "-f", file, "-j", jobs()]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, check=False, **options)


@contextmanager
def one_build(folder: str = BUILD) -> Iterator[None]:
    """Alone in the build folder, after another build if one is under way there."""
    with (ROOT / write(f"{folder}/lock", "")).open() as lock:  # given up when the file is closed
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_library(target: Path) -> None:
    """Brings `target`, a copy of the library, up to date."""
    with one_build():
        file, library = write_ninja()
        if ninja(file).returncode:
            raise BuildError("the build failed; the messages above say why")
        # Replaced, not overwritten: a process may have the old one loaded.
        os.replace(shutil.copyfile(ROOT / library, target.with_suffix(".new")), target)


if __name__ == "__main__":
    if "--for-example" in sys.argv:
        narrow_to_example()
    print(*missing_packages()) if "--missing" in sys.argv else build_library(LIBRARY)
