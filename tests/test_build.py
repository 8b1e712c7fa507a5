"""The build's own logic, and what it made: nothing here compiles a kernel or needs a GPU."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import sass
import test_machine_code
import torch

import build_library
import flash_cute
from build_library import ROOT, BuildError, Cuda, chosen
from flash_cute.ops import LIBRARY, build_info

NARROWED = bool({"FLASH_CUTE_HEAD_DIMS", "FLASH_CUTE_DTYPES", "FLASH_CUTE_ARCHS"} & set(os.environ))
CCACHE = build_library.find_program("ccache")
IS_BUILT_HERE = LIBRARY.parent.parent == ROOT


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_DIMS", "DTYPES", "ARCHS", "PYPI_CUDA", "MANYLINUX"):
        monkeypatch.delenv(f"FLASH_CUTE_{name}", raising=False)
    for name in ("CUDA_HOME", "CXX", "MAX_JOBS", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)


def fake_nvcc(folder: Path, release: str, body: str = "") -> Path:
    """A toolkit whose nvcc tells its version and, without `body`, chips."""
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f"#!/bin/sh\n{body}\necho 'release {release}, V{release}.1'\necho sm_80 sm_90\n"
    )
    nvcc.chmod(0o755)
    return folder


# -- choosing ------------------------------------------------------------------------------------


def test_whole_library_is_tested() -> None:
    """What `make run` builds is narrower, and must not pass for the whole."""
    if IS_BUILT_HERE and not NARROWED:
        assert not build_info()["left_out"], "this library is narrowed: `make build` completes it"


def test_chosen_items(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("FLASH_CUTE_HEAD_DIMS", ["32", "64"]) == ["32", "64"]
    monkeypatch.setenv("FLASH_CUTE_HEAD_DIMS", "128, 64")
    assert chosen("FLASH_CUTE_HEAD_DIMS", ["32", "64", "128"]) == ["64", "128"]
    for wrong in ("65", "64,", "64 128", "all"):
        monkeypatch.setenv("FLASH_CUTE_HEAD_DIMS", wrong)
        with pytest.raises(BuildError, match=r"FLASH_CUTE_HEAD_DIMS.*choose among 64, 128"):
            chosen("FLASH_CUTE_HEAD_DIMS", ["64", "128"])


@pytest.mark.parametrize(
    ("capability", "in_place", "asked", "expected"),
    [
        (None, None, None, ("64", "bf16", "80")),
        ((8, 6), None, None, ("64", "bf16", "80")),
        ((9, 0), None, None, ("64", "bf16", "90,90a")),
        # The toolkit below does not know it: the PTX serves it.
        ((12, 1), None, None, ("64", "bf16", "80")),
        ((9, 0), ([64], ["sm_80", "compute_80"]), None, ("64", "bf16", "90,90a")),
        ((9, 0), ([32, 64], ["sm_80", "sm_90", "sm_90a"]), None, ("32,64", "bf16", "80,90,90a")),
        (None, ([32], ["sm_80"]), None, ("64", "bf16", "80")),
        (None, None, "256", ("256", None, None)),
    ],
)
def test_make_run_builds_what_the_example_needs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int] | None,
    in_place: tuple[list[int], list[str]] | None,
    asked: str | None,
    expected: tuple[str, str | None, str | None],
) -> None:
    def load(library: Path) -> None:
        if not in_place:
            raise OSError

    info = {"head_dims": in_place[0], "archs": in_place[1]} if in_place else {}
    info |= {"large_head_dims": [], "dtypes": ["bf16"]}
    ops = SimpleNamespace(build_info=lambda: build_library.json.dumps(info))
    monkeypatch.setattr(torch, "ops", SimpleNamespace(load_library=load, flash_cute=ops))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path, "12.4")))
    monkeypatch.setenv("FLASH_CUTE_HEAD_DIMS", asked or "")
    monkeypatch.setenv("FLASH_CUTE_DTYPES", "")
    monkeypatch.setenv("FLASH_CUTE_ARCHS", "")
    build_library.narrow_to_example()
    got = tuple(os.environ[f"FLASH_CUTE_{name}"] for name in ("HEAD_DIMS", "DTYPES", "ARCHS"))
    assert got == tuple(item or "" for item in expected)


@pytest.mark.parametrize("dtypes", [("bf16",), build_library.variants.ALL_DTYPES])
def test_kernels_are_compiled_together(tmp_path: Path, dtypes: tuple[str, ...]) -> None:
    """Each file of kernels in one unit, whose flags are its own; no unit includes itself."""
    variants = build_library.variants
    files = variants.generate(tmp_path / "variants", dtypes=dtypes, sm90=True)
    code = ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_120", "compute_80"]
    compiled = []
    for unit in variants.combine(files, tmp_path / "units"):
        names = re.findall(r'^#include "(\w+\.cu)"$', unit.read_text(), re.MULTILINE)
        compiled += [tmp_path / "variants" / name for name in names or [unit.name]]
        flags = {variants.nvcc_flags(file, code) for file in compiled[-max(1, len(names)) :]}
        assert flags == {variants.nvcc_flags(unit, code)} and unit.name not in names
    assert sorted(compiled) == sorted(files)


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_library, "GIGABYTES_PER_JOB", 1e-9)
    assert build_library.jobs() == str(len(os.sched_getaffinity(0)))
    monkeypatch.setattr(build_library, "GIGABYTES_PER_JOB", 1e9)
    assert build_library.jobs() == "1"
    monkeypatch.setenv("MAX_JOBS", "7")
    assert build_library.jobs() == "7"


# -- finding -------------------------------------------------------------------------------------


def test_toolkit_behind_a_wrapper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = fake_nvcc(tmp_path / "real", "12.6", f"echo '#$ TOP={tmp_path}/real/bin/..'")
    wrapper = fake_nvcc(tmp_path / "wrapper", "0", f'exec {real}/bin/nvcc "$@"')
    monkeypatch.setenv("PATH", str(wrapper / "bin"), prepend=os.pathsep)
    assert build_library.find_cuda() == Cuda(real.resolve(), "12.6")
    assert Cuda(real, "12.6").archs() == ["80", "90", "90a"]
    with pytest.raises(BuildError, match=r"has no none\.h; .*FLASH_CUTE_PYPI_CUDA=1"):
        Cuda(real, "12.6").folder_of("none.h")


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    """What a person sees who builds with a toolkit that is too old."""
    environment = {**os.environ, "CUDA_HOME": str(fake_nvcc(tmp_path, "11.8"))}
    command = [sys.executable, str(ROOT / "csrc/build_library.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "11.8" in done.stderr and "set CUDA_HOME" in done.stderr
    assert done.stderr.startswith("flash_cute: ") and done.stderr.count("\n") == 1, done.stderr


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="CUDA_HOME"):
        build_library.find_cuda()
    monkeypatch.setenv("CXX", f"{sys.executable} -O")
    with pytest.raises(BuildError, match="CXX"):
        build_library.find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no g\+\+; install it"):
        build_library.find_compiler()


def test_missing_packages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's hook asks for what is not there; a build that runs without it says what to install."""
    for name in ("cuda", "torch", "cutlass", "program"):
        monkeypatch.setattr(build_library, f"find_{name}", lambda *_: None)
    missing = build_library.missing_packages()
    for package in ("ninja", "torch==2.", "nvidia-cutlass==", "nvidia-cuda-nvcc==13."):
        assert any(name.startswith(package) for name in missing)
    with pytest.raises(BuildError, match="pip install ninja torch"):
        build_library.write_ninja()


# -- building ------------------------------------------------------------------------------------


def test_one_build_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_library, "ROOT", tmp_path)

    def second() -> None:
        with build_library.one_build():
            assert first == ["done"]

    first: list[str] = []
    with ThreadPoolExecutor() as pool:
        with build_library.one_build():
            done = pool.submit(second)
            with pytest.raises(TimeoutError):
                done.result(0.1)
            first.append("done")
        done.result()


@pytest.mark.skipif(not CCACHE, reason="there is no ccache")
@pytest.mark.parametrize("compiler", ["g++", "nvcc"])
def test_a_second_clone_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str
) -> None:
    cuda = build_library.find_cuda()
    if compiler == "nvcc" and not cuda:
        pytest.skip("there is no nvcc")
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "cache"))

    def misses_after_building(clone: str, header: str) -> int:
        monkeypatch.setattr(build_library, "ROOT", tmp_path / clone)
        command = ["g++", "-g1", "-Isources", "-x", "c++"]
        if cuda and compiler == "nvcc":
            command = [f"{build_library.link('cuda', cuda.root)}/bin/nvcc", "-Isources"]
            command += ["-gencode=arch=compute_80,code=[sm_80,compute_80]"]
            command += ["-gencode=arch=compute_90,code=sm_90"]
        build_library.write("sources/a.h", header)
        build_library.write("sources/a.cu", '#include "a.h"\n')
        rule = build_library.compile_rule("compile", command)
        file = build_library.write("a.ninja", f"{rule}build a.o: compile sources/a.cu\n")
        assert build_library.ninja(file).returncode == 0
        stats = subprocess.run([str(CCACHE), "--print-stats"], capture_output=True, text=True)
        counts = dict(line.split("\t") for line in stats.stdout.splitlines())
        return int(counts["cache_miss"])

    assert misses_after_building("first", "int a();") == 1
    assert misses_after_building("second", "int a();") == 1
    assert misses_after_building("second", "int b();") == 2


def test_ptxas_flags_are_in_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ninja and ccache see that they change."""
    if build_library.missing_packages():
        pytest.skip("no build is possible here")
    monkeypatch.setattr(build_library, "BUILD", "build/test_library")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    file, _ = build_library.write_ninja()
    assert (ROOT / file).read_text().count(" -lineinfo ") == 1


# -- what was built ------------------------------------------------------------------------------


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
    # So may C++, which no stable ABI has.
    of_aten = {name: bind for name, bind in undefined.items() if "2at" in name}
    assert len(of_aten) == 2 and {*of_aten.values()} == {"STB_WEAK"}
    assert not [name for name, is_undefined, _ in symbols if name and not is_undefined]


#: Four wgmmas, each added to those before. What is planted stands behind each.
WGMMA = """\
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out, .param .u64 operand) .maxntid 128, 1, 1 {{
  .reg .f32 d<4>; .reg .b64 a, o; .reg .pred p;
  ld.param.u64 o, [out]; ld.param.u64 a, [operand];
  mov.f32 d0, 0f00000000; mov.f32 d1, d0; mov.f32 d2, d0; mov.f32 d3, d0; setp.eq.b32 p, 0, 0;
  wgmma.fence.sync.aligned;
  {wgmmas}
  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
  st.global.f32 [o], d0; st.global.f32 [o+4], d1; st.global.f32 [o+8], d2; st.global.f32 [o+12], d3;
}}
"""
ONE_WGMMA = """\
  add.s64 a, a, 2;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {d0, d1, d2, d3}, a, a, p, 1, 1, 0, 0;
"""


@pytest.mark.parametrize("planted", ["", "add.f32 d0, d0, d0;\n"])
def test_serialized_wgmma_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str
) -> None:
    """ptxas and the build only tell of it. The test that reads the library's machine code fails,
    whether or not a kernel was compiled just now."""
    cuda = build_library.find_cuda()
    if not cuda:
        pytest.skip("there is no ptxas")
    (tmp_path / "a.ptx").write_text(WGMMA.format(wgmmas=4 * (ONE_WGMMA + planted)))
    command = [f"{cuda.root}/bin/ptxas", "-arch=sm_90a", "a.ptx", "-o", "a.cubin"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    assert ("Potential Performance Loss" in told) == bool(planted), told
    ((name, text),) = sass.functions(tmp_path / "a.cubin")
    kernel = sass.Kernel(name, "sm90", {}, False, False, text)
    with pytest.raises(AssertionError) if planted else nullcontext():
        test_machine_code.test_wgmma_is_not_serialized([kernel])


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
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "third_party/NOTICES.txt"} <= names
    assert not [name for name in names if name.endswith(".so") or "third_party/cutlass" in name]


def test_wheel(tmp_path: Path) -> None:
    """Links the objects of the last build as `make wheel` does."""
    if not IS_BUILT_HERE or not build_library.find_package("ziglang"):
        pytest.skip("needs a library that was built in this checkout, and ziglang")
    info = build_info()
    variables = {
        "FLASH_CUTE_MANYLINUX": "1",
        "FLASH_CUTE_HEAD_DIMS": ",".join(map(str, [*info["head_dims"], *info["large_head_dims"]])),
        "FLASH_CUTE_DTYPES": ",".join(info["dtypes"]),
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
    assert "flash_cute/hub/fa2/build/torch-cuda/metadata.json" in names
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
    print("smem_per_cta" in str(error))
print(torch.ops.flash_cute.build_info())
"""
    command = [sys.executable, "-c", call]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "True\n" + torch.ops.flash_cute.build_info()

    pytest.importorskip("auditwheel")
    command = [sys.executable, "-m", "auditwheel", "repair", str(wheel)]
    command += ["--plat", f"manylinux_2_28_{machine}", "--wheel-dir", str(tmp_path / "audited")]
    command += ["--exclude", "libtorch*", "--exclude", "libc10*"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
