"""`key=value` words of a bench command to a frozen dataclass: the same spelling as `fc-eval run`, without Hydra."""

import types
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fc_eval.errors import FcEvalError, unknown

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", str: "text", Path: "a path"}


def read_options(kind: type[T], words: Sequence[str]) -> T:
    """Builds the dataclass `kind` from words such as `device=cuda` and `formats=int4,int8` (brackets are optional).

    Fields are text, numbers, paths, or tuples of them; a field that may be None is None where it is not given.

    Raises:
        FcEvalError: a word without `=`, an unknown or repeated key, or a value of another type.
    """
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise FcEvalError(f"{word!r} is not an option: expected KEY=VALUE, such as {fields(kind)[0].name}=...")  # type: ignore[arg-type]
        if key not in hints:
            raise unknown("option", key, hints)
        if key in given:
            raise FcEvalError(f"option {key!r} is given twice: keep one of the two")
        given[key] = _value(key, text, hints[key])
    return kind(**given)


def describe_options(kind: type[Any]) -> str:
    """One line `key=default` for every option, for a help text."""
    lines = []
    for field in fields(kind):
        default = "" if field.default in (MISSING, None) else field.default
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        lines.append(f"  {field.name}={text}".ljust(44) + field.metadata.get("help", ""))
    return "\n".join(line.rstrip() for line in lines)


def _value(key: str, text: str, hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return tuple(_value(key, part.strip(), item) for part in text.strip("[]").split(",") if part.strip())
    try:
        return hint(text)
    except ValueError:
        raise FcEvalError(f"{key}={text!r} is not possible: expected {_WORDS[hint]}") from None
