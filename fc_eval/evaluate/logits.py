"""Logits of a batch of windows, a part of the positions at a time where all of them would be too many.

B windows, T positions, V vocabulary. A window of 32k tokens has 3 to 8 GB of logits; its hidden states have 1 %
of that. So the decoder runs once over the whole window, and the head, whatever it does to logits, once per part.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.spec import WindowSpec

# Up to this many logits are made at once: 512 MB in bf16, one window of 2048 tokens with LLaMA-3's vocabulary.
WHOLE_LOGITS = 2**28


def input_device(model: nn.Module) -> torch.device:
    """Where the token ids go: the embedding's device, or the CPU where offloading keeps the weights elsewhere."""
    device: torch.device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def text_config(model: Any) -> Any:
    """The configuration of the text decoder, which a model of several kinds of input keeps inside its own."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_context(model: Any, spec: WindowSpec) -> None:
    """Makes sure that a window is not longer than what the model has positions for.

    Raises:
        FcEvalError: it is.
    """
    longest = getattr(text_config(model), "max_position_embeddings", None)
    if longest is not None and spec.window_tokens > longest:
        raise FcEvalError(
            f"window_tokens={spec.window_tokens} of evaluation {spec.name!r} is longer than this model's context: "
            f"set it to at most {longest}"
        )


def targets(ids_BT: torch.Tensor, part: slice, logits_BTV: torch.Tensor) -> torch.Tensor:
    """The tokens that the logits of some positions predict, where the logits are; the last position predicts none."""
    return ids_BT[:, part.start + 1 : part.stop + 1].to(logits_BTV.device)


def logits_parts(model: Any, ids_BT: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Runs the model's decoder at once; its head when a part is asked for. No key/value cache.

    Args:
        model: a causal language model of transformers.
        ids_BT: token ids [B, T] on the model's input device.

    Returns:
        Consecutive positions [start, stop) and their logits [B, stop - start, V] in the model's dtype.
    """
    tokens = ids_BT.shape[1]
    rows = max(1, WHOLE_LOGITS // (len(ids_BT) * getattr(text_config(model), "vocab_size", 1)))
    if tokens <= rows or not _has_parts(model):
        return iter([(slice(0, tokens), model(input_ids=ids_BT, use_cache=False).logits)])
    known = _Known(model.base_model(input_ids=ids_BT, use_cache=False))
    return _heads(model, known, ids_BT, rows)


class _Known(nn.Module):
    """Stands in for a decoder whose output is known already."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def _has_parts(model: Any) -> bool:
    """Whether the model can be asked for the logits of some positions, with its decoder apart from its head."""
    return (
        "logits_to_keep" in inspect.signature(model.forward).parameters
        and getattr(model, "base_model", model) is not model
    )


def _heads(model: Any, known: _Known, ids_BT: torch.Tensor, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
    prefix, decoder, tokens = model.base_model_prefix, model.base_model, ids_BT.shape[1]
    # The last position predicts nothing, and no part consists of it alone.
    for start in range(0, tokens - 1, rows):
        part = slice(start, min(start + rows, tokens))
        setattr(model, prefix, known)
        try:
            positions = torch.arange(part.start, part.stop, device=ids_BT.device)
            logits_BnV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=positions).logits
        finally:
            setattr(model, prefix, decoder)
        yield part, logits_BnV


def without_logits(model: Any, ids_BT: torch.Tensor) -> None:
    """Runs the model for what happens inside it; of its logits as few are made as it lets one ask for."""
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids=ids_BT, use_cache=False, **few)
