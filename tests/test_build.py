"""The build's own logic, and what it made: nothing here compiles a kernel or needs a GPU."""

from __future__ import annotations

import email
import fcntl
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

import build_library
import flash_cute
import object_cache
import toolchain
from build_library import ROOT, chosen_archs, chosen_items, jobs, variants
from flash_cute.ops import LIBRARY
from toolchain import BuildError, Cuda, find_compiler, find_cuda

# What would change how a build goes; the last one how Python starts it.
VARIABLES = (
    *("FLASH_CUTE_HEAD_DIMS", "FLASH_CUTE_ARCHS", "FLASH_CUTE_PYPI_CUDA", "FLASH_CUTE_MANYLINUX"),
    *("CUDA_HOME", "CXX", "PYTHONSAFEPATH"),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def fake_nvcc(folder: Path, release: str, body: str = "") -> Path:
    """A toolkit whose nvcc only tells its version."""
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f"#!/bin/sh\n{body}\necho 'Cuda compilation tools, release {release}, V{release}.1'\n"
    )
    nvcc.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("cores", "gigabytes", "asked", "expected"),
    [
        (2, 24.0, None, 2),
        (64, 24.0, None, 4),
        (8, 3.0, None, 1),
        (8, 0.0, None, 1),
        (2, 3.0, "7", 7),
        (2, 24.0, "", 2),
    ],
)
def test_jobs(cores: int, gigabytes: float, asked: str | None, expected: int) -> None:
    assert jobs(cores, gigabytes, asked) == expected


@pytest.mark.parametrize("asked", ["0", "many", "-1"])
def test_jobs_refuses(asked: str) -> None:
    with pytest.raises(BuildError, match="MAX_JOBS"):
        jobs(2, 24.0, asked)


def test_available_memory_is_known() -> None:
    assert build_library.available_gigabytes() > 0


def test_head_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_items("FLASH_CUTE_HEAD_DIMS", (32, 64, 128)) == [32, 64, 128]
    monkeypatch.setenv("FLASH_CUTE_HEAD_DIMS", "128, 64")
    assert chosen_items("FLASH_CUTE_HEAD_DIMS", (32, 64, 128)) == [64, 128]


@pytest.mark.parametrize("text", ["65", "64,", "64 128", "all"])
def test_head_dims_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FLASH_CUTE_HEAD_DIMS", text)
    with pytest.raises(BuildError, match=r"FLASH_CUTE_HEAD_DIMS.*choose among 32, 64, 128"):
        chosen_items("FLASH_CUTE_HEAD_DIMS", (32, 64, 128))


def test_archs_follow_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Cuda(Path("/cuda"), (12, 4)), Cuda(Path("/cuda"), (13, 0))
    assert chosen_archs(new) == ["80", "90", "90a", "100", "120"]
    assert chosen_archs(old) == ["80", "90", "90a"]
    monkeypatch.setenv("FLASH_CUTE_ARCHS", "90a, 90")
    assert chosen_archs(old) == ["90", "90a"]
    monkeypatch.setenv("FLASH_CUTE_ARCHS", "90,100")
    with pytest.raises(BuildError, match=r"12\.8"):
        chosen_archs(old)
    monkeypatch.setenv("FLASH_CUTE_ARCHS", "75")
    with pytest.raises(BuildError, match="choose among"):
        chosen_archs(new)


@pytest.mark.parametrize("sm90", [False, True])
def test_variants(tmp_path: Path, sm90: bool) -> None:
    """Each kernel is in one file, which nvcc translates for the chips that run it."""
    sources = variants.generate(tmp_path, [96, 64], sm90=sm90)
    kernels = [
        line for file in sources for line in file.read_text().splitlines() if "template" in line
    ]
    assert len(set(kernels)) == len(kernels) == (20 if sm90 else 8)
    built = (tmp_path / "generated/variants.inc").read_text()
    assert "kBuiltHeadDims = {64, 96}" in built
    assert f"kSm90IsBuilt = {str(sm90).lower()}" in built
    for file in sources:
        flags = shlex.split(variants.nvcc_flags(file, ["sm_90", "compute_80"]))
        if file.name.startswith("fwd_sm90_"):
            assert flags[0] == "-gencode=arch=compute_90a,code=sm_90a"
            assert any("EXTENDED_MMA" in flag for flag in flags) == (
                "hdim96" in file.name and "full" in file.name
            )
        else:
            assert flags[0] == "-gencode=arch=compute_80,code=[sm_90,compute_80]"


def test_toolkit_behind_a_wrapper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = fake_nvcc(tmp_path / "real", "12.6", f"echo '#$ TOP={tmp_path}/real/bin/..'")
    wrapper = fake_nvcc(tmp_path / "wrapper", "0", f'exec {real}/bin/nvcc "$@"')
    monkeypatch.setenv("PATH", str(wrapper / "bin"), prepend=os.pathsep)
    assert find_cuda() == Cuda(real.resolve(), (12, 6))


def test_old_toolkit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path, "12.3")))
    with pytest.raises(BuildError, match=r"12\.3.*12\.4.*set CUDA_HOME"):
        find_cuda()


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    """What a person sees who builds with a toolkit that is too old."""
    environment = {**os.environ, "CUDA_HOME": str(fake_nvcc(tmp_path, "11.8"))}
    command = [sys.executable, str(ROOT / "csrc/build_library.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("flash_cute: ") and done.stderr.count("\n") == 1, done.stderr


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="CUDA_HOME"):
        find_cuda()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX"):
        find_compiler()
    monkeypatch.setenv("CXX", f"{sys.executable} -O")
    with pytest.raises(BuildError, match="without arguments"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="install g"):
        find_compiler()


def test_toolkit_without_development_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cuda/include", "system"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("cuda/include/a.h", "system/b.h", "system/b.a"):
        (tmp_path / name).touch()
    compiler = tmp_path / "g++"  # knows one library, like the real one by its whole path
    compiler.write_text(
        f'#!/bin/sh\nname=${{1#*=}}\necho "$name" | sed "s,^b.a,{tmp_path}/system/&,"'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CPATH", str(tmp_path / "system"))
    cuda = Cuda(tmp_path / "cuda", (12, 4))
    assert build_library.toolkit_folder(cuda, "a.h", str(compiler)) == "include"
    assert build_library.toolkit_folder(cuda, "b.h", str(compiler)) is None
    assert build_library.toolkit_folder(cuda, "b.a", str(compiler)) is None
    for file in ("flash_cute_has_no_such.h", "libflash_cute_has_no_such.a"):
        with pytest.raises(BuildError, match=f"no {file}; install .* FLASH_CUTE_PYPI_CUDA=1"):
            build_library.toolkit_folder(cuda, file, str(compiler))


@pytest.mark.parametrize(
    ("finder", "package"),
    [
        ("find_torch", toolchain.TORCH_PACKAGE),
        ("find_cutlass", toolchain.CUTLASS_PACKAGE),
        ("find_cuda", toolchain.CUDA_PACKAGES[0]),
    ],
)
def test_missing_packages_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, finder: str, package: str
) -> None:
    """pip's hook asks for what is not there; a build that runs without it says what to install."""
    for module in (toolchain, build_library):
        monkeypatch.setattr(module, "find_torch", lambda: Path("/torch"))
        monkeypatch.setattr(module, "find_cutlass", lambda: Path("/cutlass"))
        monkeypatch.setattr(module, "find_cuda", lambda: Cuda(Path("/cuda"), (13, 0)))
        monkeypatch.setattr(module, "find_program", lambda name: name)
    assert toolchain.missing_packages() == []
    for module in (toolchain, build_library):
        monkeypatch.setattr(module, finder, lambda: None)
    assert package in toolchain.missing_packages()
    with pytest.raises(BuildError, match="pip install"):
        build_library.write_ninja()


def test_one_build_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second waits, and says so, before it writes anything."""
    monkeypatch.setattr(build_library, "BUILD", str(tmp_path))
    says, first_is_done = Event(), Event()
    monkeypatch.setattr(build_library, "print", lambda *text, **_: says.set(), raising=False)

    def second() -> None:
        with build_library.one_build():
            assert first_is_done.is_set()

    with ThreadPoolExecutor() as pool:
        with build_library.one_build():
            done = pool.submit(second)
            while not says.wait(0.01) and not done.done():
                pass
            first_is_done.set()
        done.result()
        assert says.is_set()


def test_a_build_is_alone_until_the_library_is_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = []

    def is_alone(step: str) -> None:
        with (tmp_path / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        steps.append(step)

    def write_ninja() -> tuple[str, str]:
        is_alone("write_ninja")
        (tmp_path / "built.so").write_text("library")
        return "build.ninja", str(tmp_path / "built.so")

    def replace(new: Path, target: Path) -> None:
        is_alone("replace")
        new.rename(target)

    monkeypatch.setattr(build_library, "BUILD", str(tmp_path))
    monkeypatch.setattr(build_library, "find_tools", lambda: None)
    monkeypatch.setattr(build_library, "write_ninja", write_ninja)
    monkeypatch.setattr(build_library, "build", lambda ninja_file: is_alone("build"))
    monkeypatch.setattr(build_library.os, "replace", replace)
    build_library.build_library(tmp_path / "library.so")
    assert steps == ["write_ninja", "build", "replace"]
    assert (tmp_path / "library.so").read_text() == "library"


def test_torch_is_found_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, version in (("old", "2.9.1"), ("new", "2.10.0+cu130")):
        (tmp_path / name / "torch").mkdir(parents=True)
        (tmp_path / name / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    monkeypatch.setattr(toolchain, "site_folders", lambda: [tmp_path / "old", tmp_path / "new"])
    assert toolchain.find_torch() == tmp_path / "new/torch"


COMPILER = """\
import sys
source, output = sys.argv[1:]
headers = [line.split()[1] for line in open(source) if line.startswith("include ")]
text = "".join(open(file).read() for file in [source, *headers])
open(output, "w").write(text)
open(output + ".d", "w").write(f"{output}: {source} " + " \\\\\\n ".join(headers))
open("runs", "a").write("x")
"""


def test_object_cache(tmp_path: Path) -> None:
    """Compiles again what changed, and nothing else, in this clone or in another."""
    environment = {**os.environ, "FLASH_CUTE_CACHE": str(tmp_path / "cache")}

    def clone(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file, text in {"c.py": COMPILER, "a.cu": "include a.h\n", "a.h": "1"}.items():
            (folder / file).write_text(text)
            os.utime(folder / file, (1, 1))  # from before the compiler starts
        return folder

    def runs_after_compiling(folder: Path, identity: str = "nvcc 13.0") -> int:
        (folder / "a.o").unlink(missing_ok=True)
        command = [sys.executable, str(ROOT / "csrc/object_cache.py"), "a.o", "a.o.d", identity]
        command += [sys.executable, "c.py", "a.cu", "a.o"]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        assert (folder / "a.o").read_text() == "include a.h\n" + (folder / "a.h").read_text()
        assert "a.h" in (folder / "a.o.d").read_text()
        return len((folder / "runs").read_text()) if (folder / "runs").exists() else 0

    first = clone("first")
    assert [runs_after_compiling(first), runs_after_compiling(first)] == [1, 1]
    (first / "a.h").write_text("2")
    os.utime(first / "a.h", (1, 1))  # the contents count, not the time
    assert [runs_after_compiling(first), runs_after_compiling(first)] == [2, 2]
    second = clone("second")
    assert runs_after_compiling(second) == 0
    assert runs_after_compiling(second, "nvcc 13.1") == 1
    environment["FLASH_CUTE_CACHE"] = ""
    assert [runs_after_compiling(second), runs_after_compiling(second)] == [2, 3]


@pytest.mark.parametrize("cache", ["cache", ""])
def test_a_kernel_that_ptxas_made_slow_is_an_error(tmp_path: Path, cache: str) -> None:
    told = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to non wgmma instructions defining accumulator registers\n"
    )
    (tmp_path / "a.cu").touch()
    (tmp_path / "c.py").write_text(f"{COMPILER}\nsys.stderr.write({told!r})\n")
    environment = {**os.environ, "FLASH_CUTE_CACHE": cache and str(tmp_path / cache)}
    command = [sys.executable, str(ROOT / "csrc/object_cache.py"), "a.o", "a.o.d", "nvcc 13.0"]
    command += [sys.executable, "c.py", "a.cu", "a.o"]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and not (tmp_path / "a.o").exists()
        assert done.stderr.startswith(told) and "leave 90a out" in done.stderr


def test_object_cache_keeps_what_overlapping_builds_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def slow_digest(file: str) -> str:
        time.sleep(0.02)  # between reading the manifest and writing it
        return file

    monkeypatch.setattr(object_cache, "file_digest", slow_digest)
    monkeypatch.chdir(tmp_path)
    Path("a.h").touch()
    Path("a.d").write_text("a.o: a.h")
    cache, manifest = tmp_path / "cache", tmp_path / "cache/a.json"

    def keep(name: str) -> None:
        Path(name).write_text(name)
        object_cache.store(cache, manifest, Path(name), Path("a.d"), time.time() + 60)

    with ThreadPoolExecutor() as pool:
        list(pool.map(keep, ["1.o", "2.o", "3.o", "4.o"]))
    assert len({entry["object"] for entry in json.loads(manifest.read_text())}) == 4


def test_library_needs_no_python_and_no_cuda_library() -> None:
    elffile = pytest.importorskip("elftools.elf.elffile")
    with LIBRARY.open("rb") as file:
        elf = elffile.ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
        symbols = [
            (symbol.name, symbol.entry.st_shndx == "SHN_UNDEF", symbol.entry.st_info.bind)
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        ]
    assert not [name for name in needed if name.startswith(("libcu", "libnv", "libpython"))]
    assert "libtorch.so" in needed and "libc10_cuda.so" not in needed
    undefined = {name: bind for name, is_undefined, bind in symbols if is_undefined}
    assert len(undefined) > 10
    assert not [name for name in undefined if name.startswith(("Py", "_Py", "cuda", "cu"))]
    # What a CPU-only torch does not have may stay unresolved.
    assert undefined["aoti_torch_get_current_cuda_stream"] == "STB_WEAK"
    exported = [name for name, is_undefined, bind in symbols if name and not is_undefined]
    assert not exported


def run_hook(call: str, **variables: str) -> str:
    """Calls a hook of the build backend in a process of its own, as pip does."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "csrc"), **variables}
    command = [sys.executable, "-c", f"import setup, build_library\n{call}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sdist(tmp_path: Path) -> None:
    run_hook(f"setup.build_sdist({str(tmp_path)!r})")
    (sdist,) = tmp_path.iterdir()
    assert sdist.name == f"flash_cute-{flash_cute.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert sources <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "third_party/NOTICES.txt"} <= names
    assert not [name for name in names if name.endswith(".so") or "third_party/cutlass" in name]


def test_wheel(tmp_path: Path) -> None:
    """Links the objects of the last build as `make wheel` does."""
    if LIBRARY.parent.parent != ROOT:
        pytest.skip("the library was not built in this checkout")
    if not toolchain.find_package("ziglang"):
        pytest.skip("ziglang is not installed")
    info = flash_cute.ops.build_info()
    variables = {
        "FLASH_CUTE_MANYLINUX": "1",
        "FLASH_CUTE_HEAD_DIMS": ",".join(map(str, info["head_dims"])),
        "FLASH_CUTE_ARCHS": ",".join(arch[3:] for arch in info["archs"] if arch.startswith("sm_")),
    }
    plan = run_hook(
        "import subprocess\n"
        "with build_library.one_build():\n"
        "    path, _ = build_library.write_ninja()\n"
        "    subprocess.run([build_library.find_program('ninja'), '-n', '-f', path], check=True)",
        **variables,
    )
    if "compiling" in plan:
        pytest.skip("the sources have changed since the library was built")
    run_hook(f"setup.build_wheel({str(tmp_path)!r})", **variables)

    (wheel,) = tmp_path.iterdir()
    version, machine = flash_cute.__version__, os.uname().machine
    assert wheel.name == f"flash_cute-{version}-py3-none-manylinux_2_28_{machine}.whl"
    assert wheel.stat().st_size < 100e6
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info_folder = f"flash_cute-{version}.dist-info"
        notices = archive.read(f"{info_folder}/licenses/third_party/NOTICES.txt").decode()
        metadata = email.message_from_bytes(archive.read(f"{info_folder}/METADATA"))
        library = archive.extract("flash_cute/_flash_cute.so", tmp_path / "unpacked")
    assert {name.split("/")[0] for name in names} == {"flash_cute", info_folder}
    assert "flash_cute/py.typed" in names and f"{info_folder}/licenses/LICENSE" in names
    assert "CUTLASS" in notices and "Redistributions in binary form" in notices
    required = [str(item) for item in metadata.get_all("Requires-Dist")]
    assert [item for item in required if "extra ==" not in item] == ["torch>=2.10"]

    # It loads here as well, and an error comes out of it as an exception.
    call = f"""\
import torch
torch.ops.load_library({library!r})
try:
    torch.ops.flash_cute.tiles_for(-1)
except RuntimeError as error:
    print("smem_limit" in str(error))
print(torch.ops.flash_cute.build_info())
"""
    loaded = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "True\n" + torch.ops.flash_cute.build_info()

    pytest.importorskip("auditwheel")
    scripts = str(Path(sys.executable).parent)
    command = [sys.executable, "-m", "auditwheel", "repair", str(wheel)]
    command += ["--plat", f"manylinux_2_28_{machine}", "--wheel-dir", str(tmp_path / "audited")]
    command += ["--exclude", "libtorch*", "--exclude", "libc10*"]
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
