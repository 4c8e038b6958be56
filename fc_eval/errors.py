"""The one exception that a user's mistake raises, and the wording helpers that every room shares."""

import difflib
import errno
from collections.abc import Iterable


class FcEvalError(ValueError):
    """A mistake that the user can mend: what is wrong, what was expected, what to do, in one sentence.

    The command line prints it as a single line and exits with status 2; every other exception is a defect.
    """


class LostProcessError(RuntimeError):
    """Another process of this run has ended or does not answer; its own words say why."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EROFS: "choose a place that can be written",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of this path is a file: check the path",
    errno.EISDIR: "it is a folder where a file is expected: check the path",
    errno.EEXIST: "something of another kind is there: check the path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "check its symbolic links",
    errno.EIO: "check the disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def is_disk_error(error: BaseException) -> bool:
    """Whether an exception is the system's word on a file or disk, rather than on a network or a process."""
    return isinstance(error, OSError) and error.errno in _ADVICE


def os_reason(error: OSError, place: object = None) -> str:
    """'/a/b: No space left on device (ENOSPC)': the path, what the system says of it, and the system's code for that.

    Args:
        error: what the system raised; the path it names comes first.
        place: the path where the error names none.
    """
    path = next((p for p in (error.filename2, error.filename, place) if p is not None), None)
    code = f" ({errno.errorcode[error.errno]})" if error.errno and error.errno in errno.errorcode else ""
    return f"{f'{path}: ' if path is not None else ''}{error.strerror or error or type(error).__name__}{code}"


def os_error(error: OSError, place: object = None, what_to_do: str = "") -> FcEvalError:
    """What the system says of a file as one sentence: the real path, the reason, and what to do."""
    advice = what_to_do or _ADVICE.get(error.errno or 0, "check the path")
    return FcEvalError(f"{os_reason(error, place)}: {advice}")


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> FcEvalError:
    """Builds the error for a name that is in no table: the nearest names first, then all of them when few."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        expected = f"did you mean {' or '.join(repr(n) for n in near)}?"
    else:
        expected = f"expected one of {', '.join(names)}" if names else "none are known"
    return FcEvalError(f"unknown {kind} {name!r}: {expected}" + (f" ({hint})" if hint else ""))
