"""Single files of a run folder: written so that they are complete or not there, read with suspicion.

Every stored file is read through `read`, so whatever makes one unreadable becomes one sentence that names it.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fc_eval.errors import FcEvalError, os_error

AGAIN = "run it again, which computes anew what does not read"

T = TypeVar("T")


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file that is either complete or not there, whatever happens in between.

    Raises:
        FcEvalError: the system refuses, such as a full disk; the path and the reason are named.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise os_error(error, path) from None


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically, in a stable form; NaN and Inf are refused because JSON has none."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def read(path: Path, kind: str, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of a file's bytes.

    Args:
        path: the file.
        kind: what it should be, in words.
        parse: any exception that it raises means that the file is damaged.

    Raises:
        FcEvalError: the file is missing, cannot be read, is cut off or of another kind.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FcEvalError(f"there is no {path}: {AGAIN}") from None
    except OSError as error:
        raise os_error(error, path) from None
    try:
        return parse(data)
    except FcEvalError:
        raise
    except Exception as error:  # every parser has its own ways to stumble over damaged bytes, down to MemoryError
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise FcEvalError(f"{path} is not complete {kind} ({reason}): {AGAIN}") from None


def _mapping(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise FcEvalError(f"{path} {what}, expected a mapping: {AGAIN}")
    return {str(key): inner for key, inner in value.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping; raises as `read`."""
    return _mapping(path, read(path, "JSON", json.loads))


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; raises as `read`."""
    return _mapping(path, read(path, "YAML", yaml.safe_load))
