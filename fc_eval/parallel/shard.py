"""A whole model becomes the part of one rank, in place: contiguous copies of its slices replace the whole weights.

Rank r of W keeps rows [r * N/W, (r + 1) * N/W) of a column-parallel weight [N, K] with the same part of the bias, and
columns [r * K/W, (r + 1) * K/W) of a row-parallel weight [H, K] with the whole bias, which is added after the sum.
Scales of INT8 weights are one for each output feature: they go with the rows, and stay where columns are split.
"""

import torch
from torch import nn

from fc_eval.errors import FcEvalError
from fc_eval.parallel.split import Split
from fc_eval.weights.linear import SCALE


def shard_(model: nn.Module, split: Split, rank: int) -> None:
    """Keeps what rank r holds, and lets go of the rest; neither the model nor a model inside it can be saved then."""
    for name in split.columns:
        module = _linear(model, name)
        rows = part(module.out_features, rank, split.world_size)
        module.weight = _copy(module.weight[rows])
        if module.bias is not None:
            module.bias = _copy(module.bias[rows])
        if hasattr(module, SCALE):
            setattr(module, SCALE, getattr(module, SCALE)[rows].clone())
        module.out_features = rows.stop - rows.start
    for site in split.sites:
        module = _linear(model, site.name)
        columns = part(site.in_features, rank, split.world_size)
        module.weight = _copy(module.weight[:, columns])
        module.in_features = columns.stop - columns.start
        if site.name in split.whole_inputs:
            module.register_forward_pre_hook(_SplitInput(columns))
    for inner in model.modules():  # the decoder is a transformers model of its own
        if hasattr(inner, "save_pretrained"):
            setattr(inner, "save_pretrained", _refuse_to_save)  # noqa: B010 - mypy takes it for a parameter


def part(size: int, rank: int, world_size: int) -> slice:
    """The share of rank r of `size` features, which W divides."""
    width = size // world_size
    return slice(rank * width, (rank + 1) * width)


class _SplitInput:
    """Pre-forward hook of a row-parallel layer whose input is whole on each rank."""

    def __init__(self, columns: slice) -> None:
        self.columns = columns

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (whole,) = args
        # In memory of its own, as the emulator's slices: a product may depend on how its operands lie.
        return (whole[..., self.columns].clone(memory_format=torch.contiguous_format),)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)  # find_split has made sure
    return module


def _copy(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def _refuse_to_save(*args: object, **kwargs: object) -> None:
    raise FcEvalError(
        "this model is one rank's part of a model, and its weights are slices: save_pretrained would write a "
        "checkpoint that cannot be loaded; copy the folder or file that it was loaded from"
    )
