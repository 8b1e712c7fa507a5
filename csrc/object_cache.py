"""Runs one compile command for ninja, unless an object from the same inputs is in the cache.

    python csrc/object_cache.py OUTPUT DEPFILE IDENTITY COMMAND...

ccache would do this for the C++ files, but how well it does it for nvcc depends on its version and
on the flags, and most machines have none; this serves both compilers, everywhere. As in ccache's
direct mode, a manifest for each command lists what the compiler read, with the contents' digests,
and the object that came of it. Paths are relative to the checkout (torch, CUTLASS and the CUDA
toolkit are reached through links in the build folder), so every clone on the machine has the same
keys. Files with absolute paths are the compilers' own headers: IDENTITY, made from the compilers'
versions, stands for them.

FLASH_CUTE_CACHE names the folder (default ~/.cache/flash_cute); an empty value turns the cache off.

A kernel that ptxas made slow is an error here: ptxas tells it as mere information, which no option
of its own turns into one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Of wgmma that wait for each other, and of a setmaxnreg that is ignored (C7508 and those after).
SLOW = "Potential Performance Loss"

MAX_FILES = 1000
MAX_MANIFEST_ENTRIES = 16


def cache_folder() -> Path | None:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_cute"
    folder = os.environ.get("FLASH_CUTE_CACHE", str(default))
    return Path(folder) if folder else None


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: str) -> str:
    """The digest of what stands at `path`; of nothing where there is no such file."""
    try:
        return digest(Path(path).read_bytes())
    except OSError:
        return ""


def read_depfile(depfile: Path) -> list[str]:
    """The files that the compiler read, by a make rule of its own writing."""
    rule = depfile.read_text().replace("\\\n", " ")
    files = re.split(r"(?<!\\)\s+", rule.split(": ", 1)[1].strip())
    return sorted({os.path.normpath(file.replace("\\ ", " ")) for file in files})


def lookup(folder: Path, manifest: Path) -> tuple[Path, list[str]] | None:
    """An object in the cache whose inputs are what the files contain now, and those inputs."""
    try:
        entries = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return None
    now: dict[str, str] = {}
    for entry in entries:
        inputs: dict[str, str] = entry["inputs"]
        for file in inputs:
            if file not in now:
                now[file] = file_digest(file)
        cached = folder / entry["object"]
        if all(now[file] == contents for file, contents in inputs.items()) and cached.is_file():
            return cached, sorted(inputs)
    return None


def write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(name, path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone at changing the cache. Readers need no lock: files are replaced in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:  # given up when the file is closed
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def store(folder: Path, manifest: Path, output: Path, depfile: Path, started: float) -> None:
    files = [file for file in read_depfile(depfile) if not os.path.isabs(file)]
    if any(os.stat(file).st_mtime >= started for file in files):
        return  # edited while the compiler ran: which contents it saw is unknown
    data = output.read_bytes()
    name = digest(data) + ".o"
    with locked(folder):
        write_whole(folder / name, data)
        try:
            entries = json.loads(manifest.read_text())[: MAX_MANIFEST_ENTRIES - 1]
        except (OSError, ValueError):
            entries = []
        entry = {"object": name, "inputs": {file: file_digest(file) for file in files}}
        write_whole(manifest, json.dumps([entry, *entries]).encode())
        by_last_use = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for old in by_last_use[:-MAX_FILES]:
            old.unlink(missing_ok=True)


def compile_object(command: list[str], output: Path) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    sys.stderr.write(done.stderr)
    if done.returncode or SLOW not in done.stderr:
        return done.returncode
    output.unlink(missing_ok=True)
    print(
        "flash_cute: the kernel would be right but slow, for the reason above; build with CUDA "
        "13.0 (FLASH_CUTE_PYPI_CUDA=1), or leave 90a out of FLASH_CUTE_ARCHS",
        file=sys.stderr,
    )
    return 1


def main(output: Path, depfile: Path, identity: str, command: list[str]) -> int:
    folder = cache_folder()
    if folder is None:
        return compile_object(command, output)
    manifest = folder / (digest("\0".join([identity, *command]).encode()) + ".json")
    found = lookup(folder, manifest)
    if found is not None:
        cached, inputs = found
        try:
            shutil.copyfile(cached, output)
            os.utime(cached)
            os.utime(manifest)
        except OSError:
            pass  # deleted meanwhile, or the cache is someone else's: compile
        else:
            names = " ".join(file.replace(" ", "\\ ") for file in inputs)
            depfile.write_text(f"{output}: {names}")
            return 0
    started = time.time()
    status = compile_object(command, output)
    if status == 0:
        try:
            store(folder, manifest, output, depfile, started)
        except OSError as error:
            print(f"flash_cute: not kept in the object cache: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
