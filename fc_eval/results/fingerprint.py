"""What makes two runs the same run: configuration, contents of model and data files, versions of what computes."""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fc_eval
from fc_eval.errors import FcEvalError, os_error
from fc_eval.results.files import write_atomic
from fc_eval.wire.format import WIRE_VERSION

# Time stamps of file systems are this coarse at worst (FAT, some network file systems).
SETTLED_S = 2.0
# A file below this size is hashed each time: that takes a fraction of a second, and nothing has to be trusted.
REMEMBERED_BYTES = 64 * 2**20
# What a line on the text that smoothing looks at begins with, among those on the contents of a model.
CALIBRATION = "calibration "
# Packages whose version can change a number.
PACKAGES = ("fc-eval", "torch", "transformers", "tokenizers", "accelerate", "lm_eval", "datasets", "gguf", "numpy")


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed versions by name, 'missing' where a package is not there. Imports none of them."""
    # Reading them takes 5 ms, and each run of a sweep is planned twice. A version is part of a folder's name, so
    # whatever installs another one changes the time of the folder above, as Python's own cache of these names assumes.
    return dict(_versions(tuple(packages), tuple((place, _changed(place)) for place in sys.path)))


def _changed(place: str) -> int | None:
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:  # not every entry is there
        return None


@lru_cache(maxsize=8)
def _versions(packages: tuple[str, ...], places: tuple[tuple[str, int | None], ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = fc_eval.__version__ if name == "fc-eval" else version(name)  # also where it is not installed
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def cache_dir() -> Path:
    """Where downloads and digests are kept: `FC_EVAL_CACHE`, or `~/.cache/fc_eval`."""
    return Path(os.environ.get("FC_EVAL_CACHE") or Path.home() / ".cache" / "fc_eval")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file; of one from `REMEMBERED_BYTES` on it is remembered, so that not every run reads a checkpoint.

    What is remembered is trusted while the file has the same place, inode, size, modification and change time. A write
    sets the change time to the system's clock, and no program can set it to another; so this trusts the clock not to
    be turned back, and the disk not to be written past the file system. It also trusts that no process still writes
    to the file through a memory map: the system sets the time at the first write to a page of such a map, so later
    ones until the page is stored go unseen, and a digest made between them stays wrong. A file that changed within the
    last `SETTLED_S` is not remembered, because a later write may get the same time stamps. An entry that does not
    prove itself is made again.

    Raises:
        FcEvalError: the file cannot be read, or is being written while it is read.
    """
    try:
        before, remembers = _state(path), path.stat().st_size >= REMEMBERED_BYTES
        entry = cache_dir() / "digests" / hashlib.sha256(before.encode()).hexdigest()
        remembered = _recall(entry, before) if remembers else None
        if remembered is not None:
            return remembered
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _state(path) != before:
            raise FcEvalError(f"{path} was written while it was read: wait until it is complete")
        settled = time.time() - path.stat().st_ctime > SETTLED_S
    except OSError as error:
        raise os_error(error, path) from None
    if remembers and settled:
        with suppress(FcEvalError):  # a cache that cannot be written only costs time
            write_atomic(entry, _entry(before, digest))
    return digest


def _state(path: Path) -> str:
    """What is trusted to change with the contents of a file."""
    stat = path.stat()
    times = f"{stat.st_mtime_ns}|{stat.st_ctime_ns}"
    return f"{path.resolve()}|{stat.st_dev}|{stat.st_ino}|{stat.st_size}|{times}"


def _entry(state: str, digest: str) -> bytes:
    """A digest, and the proof that it is whole and belongs to this state of this file."""
    return f"{digest} {hashlib.sha256(f'{state}|{digest}'.encode()).hexdigest()}\n".encode()


def _recall(entry: Path, state: str) -> str | None:
    try:
        found = entry.read_bytes()
    except OSError:
        return None
    digest = found[:64].decode(errors="replace")
    return digest if found == _entry(state, digest) else None


def files_digest(files: Iterable[Path]) -> list[str]:
    """Digest of each file in the order given: contents count, names and places do not."""
    return [file_sha256(path) for path in files]


def fingerprint(config: Mapping[str, Any], contents: Mapping[str, Any]) -> str:
    """SHA-256 over the configuration, what model and data consist of, and the versions of what computes."""
    content = {
        "config": config,
        "contents": dict(contents),
        "versions": package_versions() | {"python": platform.python_version(), "wire": WIRE_VERSION},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
