"""The one exception that a user's mistake raises, and the wording helper that every room shares."""

import difflib
from collections.abc import Iterable


class FcEvalError(ValueError):
    """A mistake that the user can mend: what is wrong, what was expected, what to do, in one sentence.

    The command line prints it as a single line and exits with status 2; every other exception is a defect.
    """


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> FcEvalError:
    """Builds the error for a name that is in no table: the nearest names first, then all of them when few."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        expected = f"did you mean {' or '.join(repr(n) for n in near)}?"
    else:
        expected = f"expected one of {', '.join(names)}" if names else "none are known"
    return FcEvalError(f"unknown {kind} {name!r}: {expected}" + (f" ({hint})" if hint else ""))
