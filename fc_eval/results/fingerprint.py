"""What makes two runs the same run: configuration, contents of model and data files, versions of what computes."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fc_eval.wire.format import WIRE_VERSION

# Packages whose version can change a number.
PACKAGES = ("fc-eval", "torch", "transformers", "tokenizers", "accelerate", "lm_eval", "datasets", "gguf", "numpy")


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed versions by name, 'missing' where a package is not there. Imports none of them."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def cache_dir() -> Path:
    """Where downloads and digests are kept: `FC_EVAL_CACHE`, or `~/.cache/fc_eval`."""
    return Path(os.environ.get("FC_EVAL_CACHE") or Path.home() / ".cache" / "fc_eval")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, remembered by path, size and modification time so that a checkpoint is read once."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()
    remembered = cache_dir() / "digests" / key
    if remembered.exists():
        return remembered.read_text().strip()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        temporary = remembered.with_suffix(f".{os.getpid()}")
        temporary.write_text(digest)
        os.replace(temporary, remembered)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return digest


def files_digest(files: Iterable[Path]) -> list[str]:
    """Digest of each file in the order given: contents count, names and places do not."""
    return [file_sha256(path) for path in files]


def fingerprint(config: Mapping[str, Any], files: Mapping[str, list[str]]) -> str:
    """SHA-256 over the configuration, the digests of model and data files, and the versions of what computes."""
    content = {
        "config": config,
        "files": dict(files),
        "versions": package_versions() | {"python": platform.python_version(), "wire": WIRE_VERSION},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
