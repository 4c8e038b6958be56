"""What lies between column- and row-parallel layers, computed rank by rank on one device: attention and activation.

A rank has W times fewer heads and features, and what one of them comes out as may depend on the others in the same
tensor. Elementwise kernels compute the last few values of a tensor by scalar instructions, whose exp and tanh round
otherwise than the vector ones; products of each head take another way when there is one head, or when their memory
begins elsewhere. So each rank's heads and features are computed apart, in memory of their own and laid out as the rank
has them. Operations that are rounded exactly (sums and products of two values) need no care.

B sequences, T tokens, S keys, A heads, D values of a head, I features, W ranks.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from fc_eval.codec.eager import eager
from fc_eval.errors import FcEvalError
from fc_eval.parallel.split import Split
from fc_eval.parallel.stand_in import StandIn

# The attention function under which transformers finds `_attend`.
NAME = "fc_eval_rank_by_rank"
# What a model's code may call between two layers without a module: gates, most of all.
GATES = frozenset(
    {
        *(torch.sigmoid, torch.Tensor.sigmoid, torch.tanh, torch.Tensor.tanh, torch.exp, torch.Tensor.exp),
        *(functional.silu, functional.gelu, functional.softplus, functional.mish, functional.elu),
    }
)


def between_columns_and_rows(model: nn.Module, split: Split) -> list[StandIn]:
    """What stands in for the attention and the activations that have column-parallel layers in front of them.

    Raises:
        FcEvalError: an attention module has a way of its own to its attention function.
    """
    found: dict[nn.Module, StandIn] = {}
    names = {module: name for name, module in model.named_modules()}
    for around in dict.fromkeys(name.rpartition(".")[0] for name in split.columns):
        module, size = model.get_submodule(around), split.world_size
        beside = [part for part in module.children() if isinstance(part, nn.Linear)]
        widths = frozenset(part.out_features for part in beside if names[part] in split.columns)
        arriving = frozenset(site.in_features for site in split.sites if site.name.rpartition(".")[0] == around)
        kind = AttentionByRank if getattr(module, "head_dim", None) else GatesByRank
        found[module] = kind(module, around, size, arriving)
        for name, child in module.named_children():
            if child not in found and _is_activation(child):  # one may be used in several places
                found[child] = ActivationByRank(child, f"{around}.{name}", size, widths)
    return list(found.values())


def _is_activation(module: nn.Module) -> bool:
    """Whether a module has nothing but its code."""
    return not [*module.children(), *module.parameters(), *module.buffers()]


class ActivationByRank(StandIn):
    """Stands in for the forward of an activation; `widths` are the I that column-parallel layers beside it make."""

    def __init__(self, module: nn.Module, name: str, world_size: int, widths: frozenset[int]) -> None:
        super().__init__(module, name)
        self.world_size, self.widths = world_size, widths

    @eager
    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., I] to [..., I]; a tensor of any other width as the module does it."""
        if not self.active or input.shape[-1] not in self.widths:
            whole: torch.Tensor = self.own(input, *args, **kwargs)
            return whole
        parts = (part.contiguous() for part in input.chunk(self.world_size, dim=-1))
        return torch.cat([self.own(part, *args, **kwargs) for part in parts], dim=-1)


class GatesByRank(StandIn):
    """Stands in for the forward of a module around column- and row-parallel layers: its own code, `GATES` by rank.

    Attributes:
        widths: the I that arrive at the row-parallel layers.
    """

    def __init__(self, module: nn.Module, name: str, world_size: int, widths: frozenset[int]) -> None:
        super().__init__(module, name)
        self.world_size, self.widths = world_size, widths

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        if not self.active:
            return self.own(*args, **kwargs)
        with _Gates(self.world_size, self.widths):
            return self.own(*args, **kwargs)


class _Gates(TorchFunctionMode):
    """Computes `GATES` of tensors [..., I] or [B, T, A, D], where A * D is I, for each rank's features apart.

    Attributes:
        paused: whether it leaves everything as it is, as inside an attention function that goes by rank already.
    """

    def __init__(self, world_size: int, widths: frozenset[int]) -> None:
        super().__init__()
        self._world_size, self._widths = world_size, widths
        self.paused = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in GATES or self.paused or not args:
            return func(*args, **kwargs)
        cut = 2 if args[0].dim() == 4 else args[0].dim() - 1
        if math.prod(args[0].shape[cut:]) not in self._widths:
            return func(*args, **kwargs)
        parts = (part.contiguous() for part in args[0].chunk(self._world_size, dim=cut))
        return torch.cat([func(part, *args[1:], **kwargs) for part in parts], dim=cut)


class AttentionByRank(GatesByRank):
    """The same for an attention module, whose attention function goes by rank too.

    Raises:
        FcEvalError: the module does not look its attention function up where transformers' models do.
    """

    def __init__(self, module: nn.Module, name: str, world_size: int, widths: frozenset[int]) -> None:
        super().__init__(module, name, world_size, widths)
        # Where the module's code looks its attention function up; 'eager' is the modeling file's own.
        scope = inspect.unwrap(type(module).forward).__globals__
        if "ALL_ATTENTION_FUNCTIONS" not in scope or "eager_attention_forward" not in scope:
            raise FcEvalError(
                f"{name} ({type(module).__name__}) does not use transformers' attention interface, so its heads "
                "cannot be computed rank by rank: use plan=row_only"
            )
        self._functions, self._default = scope["ALL_ATTENTION_FUNCTIONS"], scope["eager_attention_forward"]

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        if not self.active:
            return self.own(*args, **kwargs)
        config: Any = self.module.config
        attend = self._functions.get_interface(config._attn_implementation, self._default)
        gates = _Gates(self.world_size, self.widths)
        by_rank = _ByRank(config, attend, self.world_size, gates)
        setattr(self.module, "config", by_rank)  # noqa: B010 - mypy expects a module
        try:
            with gates:
                return self.own(*args, **kwargs)
        finally:
            setattr(self.module, "config", config)  # noqa: B010


class _ByRank:
    """A configuration that names another attention function, and says what that one stands for."""

    _attn_implementation = NAME

    def __init__(self, own: Any, attend: Callable[..., Any], world_size: int, gates: _Gates) -> None:
        self.own, self.attend, self.world_size, self.gates = own, attend, world_size, gates

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function of a module whose configuration is `_ByRank`: output [B, T, A, D], weights [B, A, T, S].

    Query [B, A, T, D], key and value [B, A', S, D] and what else is given by head are cut; the rest all ranks see.
    """
    by_rank: Any = module.config
    size = by_rank.world_size
    setattr(module, "config", by_rank.own)  # noqa: B010 - the functions themselves read it
    by_rank.gates.paused = True
    try:
        parts = [
            by_rank.attend(
                module,
                *(_heads_of(value, rank, size) for value in args),
                **{name: _heads_of(value, rank, size) for name, value in kwargs.items()},
            )
            for rank in range(size)
        ]
    finally:  # a module may attend more than once
        by_rank.gates.paused = False
        setattr(module, "config", by_rank)  # noqa: B010
    outputs, weights = zip(*parts, strict=True)
    return torch.cat(outputs, dim=2), None if weights[0] is None else torch.cat(weights, dim=1)


def _heads_of(value: Any, rank: int, world_size: int) -> Any:
    """One rank's heads in memory of their own, with the strides that a rank's have; what all heads share as it is."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.shape[1] == 1:
        return value
    width = value.shape[1] // world_size
    part = value.narrow(1, rank * width, width)
    strides = [stride // world_size if stride > value.stride(1) else stride for stride in value.stride()]
    return part.new_empty_strided(part.shape, strides).copy_(part)


AttentionInterface.register(NAME, _attend)
