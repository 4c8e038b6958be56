"""From plain mappings, as YAML gives them, to frozen dataclasses: whatever does not fit is one sentence.

Shared by every room that reads settings, as `fc_eval.errors` is.
"""

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fc_eval.errors import FcEvalError, unknown

T = TypeVar("T")

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
            raise FcEvalError(f"{_dotted(where, field.name)}={value!r} is not possible: expected {expected}")


def checked_mapping(where: str, value: Any, known: Iterable[str], required: Iterable[str] = ()) -> dict[str, Any]:
    """A copy of a mapping that holds known keys only, and all of the required ones.

    Args:
        where: how the command line names it, such as 'model.tiny'; '' for the whole configuration.
        value: what was given.
        known: keys that it may have.
        required: keys that it must have.

    Raises:
        FcEvalError: no mapping, an unknown key (with the nearest names), or a key that is missing.
    """
    known = list(known)
    if not isinstance(value, Mapping):
        raise FcEvalError(f"{where}={value!r} is not possible: expected a mapping with {', '.join(known)}")
    for key in value:
        if key not in known:
            raise unknown(f"key in {where}:" if where else "key", str(key), known)
    for key in required:
        if key not in value:
            raise FcEvalError(f"{_dotted(where, key)} is missing and has no default: give it a value")
    return {str(key): kept for key, kept in value.items()}


def build(where: str, kind: type[T], value: Any) -> T:
    """A dataclass from a mapping with its fields as keys; those with a default may be missing.

    Raises:
        FcEvalError: as `checked_mapping` and `check_scalars`, or what the dataclass itself refuses.
    """
    known = fields(kind)  # type: ignore[arg-type]
    required = [field.name for field in known if field.default is MISSING and field.default_factory is MISSING]
    built = kind(**checked_mapping(where, value, [field.name for field in known], required))
    check_scalars(where, built)
    return built


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
