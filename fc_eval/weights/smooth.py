"""SmoothQuant: outliers of activations move into the weights, by factors that cancel (arXiv 2211.10438, section 4).

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)          (its equation 4)
    (X / s) (s W) = X W                                  (its equation 3)

j is an input channel, X the output of a norm over the calibration text, W all weights that take it. 1 / s goes into the
norm, which multiplies by a gain of each channel anyway, s into the columns of the weights. Only norms are folded into,
as in the `smooth.py` of its repository: the inputs of o_proj and down_proj stay as they are. A migration strength
alpha of 1 moves all of the outliers into the weights, one of 0 the other way round.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from fc_eval.weights.folds import Fold

# No factor and no weight's maximum is taken to be smaller, as in SmoothQuant's repository.
FLOOR = 1e-5


@contextmanager
def recording(decoder: nn.Module, folds: Sequence[Fold]) -> Iterator[dict[str, torch.Tensor]]:
    """The largest magnitude of each channel that the norms give inside the block, fp32 [K] by name, on their device."""
    largest: dict[str, torch.Tensor] = {}

    def record(name: str, output: torch.Tensor) -> None:
        found_K = output.detach().abs().flatten(0, -2).amax(0).float()
        largest[name] = torch.maximum(largest[name], found_K) if name in largest else found_K

    hooks = [
        decoder.get_submodule(fold.norm).register_forward_hook(
            lambda module, args, output, name=fold.norm: record(name, output)
        )
        for fold in folds
    ]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def factors(activations_K: torch.Tensor, weights_K: torch.Tensor, alpha: float) -> torch.Tensor:
    """s in fp64 [K] from the largest magnitudes of each channel; 1 for a channel that is 0 on either side.

    Computed on the CPU, whatever the model runs on, so that a model is smoothed in one way.
    """
    x_K, w_K = activations_K.double().cpu(), weights_K.double().cpu()
    s_K = (x_K**alpha / w_K.clamp(min=FLOOR) ** (1 - alpha)).clamp(min=FLOOR)
    return torch.where((x_K > 0) & (w_K > 0), s_K, 1.0)


def smooth_(decoder: nn.Module, folds: Sequence[Fold], activations: Mapping[str, torch.Tensor], alpha: float) -> None:
    """Smooths a decoder in place.

    Args:
        decoder: in bf16, fp16 or fp32.
        folds: of `find_folds`.
        activations: of `recording`, by the norms' names.
        alpha: migration strength, 0 to 1.
    """
    for fold in folds:
        layers = [decoder.get_submodule(name) for name in fold.linears]
        weights_K = torch.stack([layer.weight.abs().amax(0).float() for layer in layers]).amax(0)  # type: ignore[operator]
        s_K = factors(activations[fold.norm], weights_K, alpha)
        undo_K = _divide_gain_(decoder.get_submodule(fold.norm), s_K, fold.offset)
        for layer in layers:
            weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
            weight.copy_(weight.float() * undo_K.to(weight.device, torch.float32))


def _divide_gain_(norm: nn.Module, s_K: torch.Tensor, offset: float) -> torch.Tensor:
    """Divides what a norm multiplies by, and its bias; returns fp64 [K], by how much its gain really fell.

    The weight is rounded to its dtype, so the gain falls by a little more or less than s: the weights get what it
    really fell by, and nothing is lost but their own rounding. A gain that is 0, or would become 0, stays as it is.
    """
    weight: torch.Tensor = norm.weight.data  # type: ignore[assignment]
    before_K = weight.double().cpu() + offset
    stored_K = (before_K / s_K - offset).to(weight.dtype)
    after_K = stored_K.double() + offset
    kept_K = (before_K == 0) | (after_K == 0) | ~torch.isfinite(after_K)
    stored_K = torch.where(kept_K, weight.cpu(), stored_K)
    fell_K = torch.where(kept_K, 1.0, before_K / torch.where(after_K == 0, 1.0, after_K))
    weight.copy_(stored_K)
    bias: torch.Tensor | None = getattr(norm, "bias", None)
    if bias is not None:
        bias.data.copy_(bias.data.double().cpu() / fell_K)
    return fell_K
