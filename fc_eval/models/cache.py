"""Writing into the cache folder: one process at a time, and what a disk refuses is one sentence."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fc_eval.errors import FcEvalError, is_disk_error, os_reason


@contextmanager
def disk_errors(place: Path | str, variable: str) -> Iterator[None]:
    """Turns what the system says of a file or disk into one sentence with the path and the reason.

    Args:
        place: where the block writes, for errors that name no path.
        variable: the environment variable that moves `place`.

    Raises:
        FcEvalError: a full or read-only disk, a file where a folder is expected, ...; other errors pass.
    """
    try:
        yield
    except Exception as error:  # libraries in Rust raise types of their own for what the system says
        said = None if isinstance(error, FcEvalError) else _os_error(error)
        if said is None or not is_disk_error(said):
            raise
        remedy = "free some, or " if said.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise FcEvalError(
            f"{place} cannot be used: {os_reason(said, place)}: {remedy}set {variable} to a folder elsewhere"
        ) from None


def _os_error(error: Exception) -> OSError | None:
    """The system's error in an exception; safetensors and tokenizers hand it on as text, '... (os error 28)'."""
    if isinstance(error, OSError):
        return error
    code = re.search(r"os error (\d+)", str(error))
    return OSError(int(code.group(1)), os.strerror(int(code.group(1)))) if code else None


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Holds the lock of a file or folder in the cache, so that one process at a time makes it; creates its parent.

    Raises:
        FcEvalError: the disk is full or the folder cannot be written, here or inside the block.
    """
    with disk_errors(target.parent, "FC_EVAL_CACHE"):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        try:
            lock.acquire(timeout=1)
        except Timeout:
            print(f"waiting for another process that makes {target}", flush=True)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
