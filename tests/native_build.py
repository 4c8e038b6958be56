"""Builds parts of `cuda_ext` straight with a C++ compiler, with other flags or other headers than the package's own."""

import functools
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "cuda_ext"
# What cuda_ext/cpu/CMakeLists.txt gives the kernels; the first is part of the contract (WIRE.md).
HONEST = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
SANITIZED = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


@functools.cache
def compiler() -> str:
    """Path of a C++ compiler; skips the test where there is none."""
    found = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("there is no C++ compiler (c++, g++ or clang++; CXX names another)")
    return found


@functools.cache
def why_not(*flags: str) -> str | None:
    """Why a program built with these flags does not run here, or None."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        command = [compiler(), *flags, "-x", "c++", "-", "-o", program]
        built = subprocess.run(command, input="int main() {}", capture_output=True, text=True, check=False)
        if built.returncode:
            return f"the compiler refuses {' '.join(flags)}: {built.stderr.strip().splitlines()[-1]}"
        ran = subprocess.run([program], capture_output=True, check=False)
        return None if ran.returncode == 0 else f"a program built with {' '.join(flags)} does not run here"


def require_flags(*flags: str) -> None:
    """Skips the test where a program built with these flags does not run."""
    reason = why_not(*flags)
    if reason is not None:
        pytest.skip(reason)


def build(folder: Path, output: str, jobs: dict[Path, tuple[str, ...]], *flags: str, tree: Path = SOURCES) -> Path:
    """Compiles each source with its own flags and those of all, two at a time, and links them to `folder/output`."""

    def compile_one(numbered: tuple[int, tuple[Path, tuple[str, ...]]]) -> Path:
        index, (source, own) = numbered
        target = folder / f"{index}_{source.stem}.o"
        _run([*command, *own, "-c", str(source.resolve()), "-o", str(target)])
        return target

    command = [compiler(), "-std=c++17", *flags, f"-I{tree}", f"-I{tree / 'include'}"]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, enumerate(jobs.items())))
    _run([compiler(), *flags, *map(str, objects), "-pthread", "-o", str(folder / output)])
    return folder / output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-2000:]}"
