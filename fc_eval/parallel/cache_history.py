"""What a key/value cache came from, in a form that ranks can compare although each holds the keys of its own heads.

The history is a text on the layer that tells the cache's length, so it goes where the keys go: into copies, pickles,
and other caches made of the same layers. The methods of a cache that edit it in place enter it. Keys and values that
are written by hand (`layer.keys = ...`), and edits of other layers alone, do not.
"""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

from fc_eval.parallel.arguments import arguments, hash_of, hash_of_tensors, tensors_among, text_of

# Methods of a layer of a transformers cache that change what it holds.
_EDITS = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "reset")
_HISTORY = "fc_eval_history"


def caches_among(values: Iterable[Any]) -> list[Any]:
    """The key/value caches among arguments or results, whose names differ between versions."""
    return [value for value in values if hasattr(value, "get_seq_length")]


def history_of(cache: Any) -> str | None:
    """The history of a cache; '' while it is empty, None where it holds something and nobody knows from where."""
    return getattr(_teller(cache), _HISTORY, None) if int(cache.get_seq_length()) else ""


def set_history(cache: Any, history: str) -> None:
    """Notes what a cache came from, after a forward pass has written to it; from now on its edits are noted."""
    layer = _teller(cache)
    if layer is not None:
        if not hasattr(layer, _HISTORY):
            kind: Any = type(layer)
            layer.__class__ = _noting(kind)
        setattr(layer, _HISTORY, history)


def _teller(cache: Any) -> Any:
    """The layer whose length is the cache's: the first one that has a length, None before there are any."""
    return next((layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "get_seq_length")), None)


@functools.cache
def _noting(kind: Any) -> Any:
    """A kind of layer that notes its edits. A class and not attributes of one layer, which would refer back to it and
    keep its keys in memory until Python looks for cycles."""
    members: dict[str, Any] = {name: _noted(getattr(kind, name)) for name in _EDITS if hasattr(kind, name)}

    def update(layer: Any, *args: Any, **kwargs: Any) -> Any:
        # Written to: by a forward pass, which sets the history when it has come to its end, or by someone else.
        setattr(layer, _HISTORY, None)
        return kind.update(layer, *args, **kwargs)

    def reduced(layer: Any) -> Any:
        return _blank, (kind,), vars(layer)

    # `_layer_type` would enter the class into transformers' own table of kinds.
    members |= {"update": update, "__reduce__": reduced, "_layer_type": None, "__module__": kind.__module__}
    return types.new_class(kind.__name__, (kind,), {}, lambda namespace: namespace.update(members))


def _noted(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def edit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        history = getattr(layer, _HISTORY)
        setattr(layer, _HISTORY, None)  # what an edit that fails leaves behind is not known
        result = own(layer, *args, **kwargs)
        if history is not None:
            given = arguments(args, kwargs)
            told = (own.__name__, text_of(given), hash_of_tensors(tensors_among(given)))
            setattr(layer, _HISTORY, hash_of([history, *told]))
        return result

    return edit


def _blank(kind: Any) -> Any:
    noting = _noting(kind)
    return noting.__new__(noting)
