"""The one exception that a user's mistake raises, and the wording helper that every room shares."""

import difflib
import types
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints


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


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def check_scalars(where: str, settings: Any) -> None:
    """Checks each field of a dataclass that is annotated with plain types only against what it holds.

    Raises:
        FcEvalError: a value of another type, such as text where a whole number is expected.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        hint = hints[field.name]
        allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if not all(kind in _WORDS for kind in allowed):
            continue
        value = getattr(settings, field.name)
        accepted = (*allowed, int) if float in allowed else allowed
        if type(value) not in accepted:
            expected = " or ".join(_WORDS[kind] for kind in allowed)
            name = f"{where}.{field.name}" if where else field.name
            raise FcEvalError(f"{name}={value!r} is not possible: expected {expected}")
