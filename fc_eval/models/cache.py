"""Writing into the cache folder: one process at a time, and a full disk is one sentence."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fc_eval.errors import FcEvalError


@contextmanager
def disk_errors(place: str, variable: str) -> Iterator[None]:
    """Turns a full or read-only disk into one sentence, which names the environment variable that moves `place`.

    Raises:
        FcEvalError: ENOSPC, EDQUOT, EACCES, EPERM or EROFS in the block; other errors pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FcEvalError(f"no space left in {place}: free some, or set {variable} to a folder elsewhere") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise FcEvalError(f"{place} cannot be written: set {variable} to a folder that can") from None
        raise


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Holds the lock of a file or folder in the cache, so that one process at a time makes it; creates its parent.

    Raises:
        FcEvalError: the disk is full or the folder cannot be written, here or inside the block.
    """
    with disk_errors(str(target.parent), "FC_EVAL_CACHE"):
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
