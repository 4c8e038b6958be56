"""Where a model can be smoothed: norms whose output goes into linear layers, found by what they do, not by name.

A forward pass shows it: the tensor that a norm returns is the very tensor that its linear layers get. What a norm
multiplies by is found by trying: its weight (RMSNorm, LayerNorm), or 1 + weight (Gemma).
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fc_eval.errors import FcEvalError
from fc_eval.weights.linear import linears

OFFSETS = (0.0, 1.0)


@dataclass(frozen=True)
class Fold:
    """One norm and the linear layers that take its output, by their names in the decoder.

    Attributes:
        norm: a norm with a weight [K], maybe a bias [K].
        linears: all linear layers with that input, each [N, K].
        offset: what the norm adds to its weight before it multiplies: 0, or 1 (Gemma).
    """

    norm: str
    linears: tuple[str, ...]
    offset: float


def find_folds(decoder: nn.Module, run: Callable[[], Any]) -> tuple[Fold, ...]:
    """The norms of a decoder that smoothing can be folded into, in the order of its modules.

    Args:
        decoder: whose linear layers are to be smoothed.
        run: one forward pass of the decoder.

    Raises:
        FcEvalError: no norm feeds a linear layer, as where norms follow the layers.
    """
    outputs: dict[str, torch.Tensor] = {}  # kept, so that no other tensor gets the same identity
    inputs: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for name, module in decoder.named_modules():
            if _could_be_norm(module):
                stack.callback(module.register_forward_hook(_keep_output(outputs, name)).remove)
        for name, module in linears(decoder):
            stack.callback(module.register_forward_pre_hook(_keep_input(inputs, name), with_kwargs=True).remove)
        run()
    folds = []
    for norm, given in outputs.items():
        fed = tuple(name for name, _ in linears(decoder) if inputs.get(name) is given)
        if fed:
            folds.append(Fold(norm, fed, _offset(norm, decoder.get_submodule(norm))))
    if not folds:
        raise FcEvalError(
            f"{type(decoder).__name__} has no place to fold smoothing into: no norm's output goes into a linear "
            "layer; use model.smoothing=null, which quantizes without smoothing"
        )
    return tuple(folds)


def _could_be_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())


def _keep_output(outputs: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = output

    return hook


def _keep_input(inputs: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[name] = args[0] if args else kwargs["input"]

    return hook


def _offset(name: str, norm: nn.Module) -> float:
    """What a norm adds to its weight before it multiplies: where twice the sum gives twice the output."""
    twin = copy.deepcopy(norm).float().cpu()
    values = torch.randn(2, twin.weight.numel(), generator=torch.Generator().manual_seed(0))  # type: ignore[operator]

    def given(weight: float) -> torch.Tensor:
        for key, parameter in twin.named_parameters():
            parameter.data.fill_(weight if key == "weight" else 0.0)
        # The class's own forward: accelerate puts one into the instance that belongs to the original.
        output: torch.Tensor = type(twin).forward(twin, values)
        return output

    for offset in OFFSETS:
        if torch.equal(given(2 - offset), 2 * given(1 - offset)):  # a power of two: no rounding
            return offset
    raise FcEvalError(
        f"{name} ({type(norm).__name__}) multiplies neither by its weight nor by 1 + weight, so smoothing cannot be "
        "folded into it; use model.smoothing=null, which quantizes without smoothing"
    )
