"""The arguments of a call in a form that ranks can compare: a hash of the tensors, a text of the rest."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from numbers import Number
from typing import Any

import torch

_BY_VALUE = (Number, str, bytes, Enum, torch.dtype)


def arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments under their index, the others under their name."""
    return {str(index): value for index, value in enumerate(args)} | dict(kwargs)


def tensors_among(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors among arguments, and in lists and mappings among them (masks by kind of layer)."""
    return {name: value for name, value in _leaves(given.items()) if isinstance(value, torch.Tensor)}


def text_of(given: Mapping[str, Any]) -> str:
    """'logits_to_keep=1, use_cache=True': arguments that are no tensors, by name; those that are None are left out.

    Numbers, strings, enums, dtypes, and lists and mappings of them are told by value. Of anything else (a cache, a
    function, a device, which differs between ranks) only the kind is told.
    """
    told = {
        name: repr(value) if isinstance(value, _BY_VALUE) else f"a {type(value).__name__}"
        for name, value in _leaves(given.items())
        if value is not None and not isinstance(value, torch.Tensor)
    }
    return ", ".join(f"{name}={value}" for name, value in sorted(told.items()))


def hash_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """The first digits of a hash of tensors' names, dtypes, shapes and bytes; waits for the device."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {list(values.shape)} ".encode())
        digest.update(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def hash_of(texts: Iterable[str]) -> str:
    """The first digits of a hash of texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _leaves(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in items:
        if isinstance(value, Mapping):
            yield from _leaves((f"{name}.{key}", inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            yield from _leaves((f"{name}.{index}", inner) for index, inner in enumerate(value))
        else:
            yield name, value
