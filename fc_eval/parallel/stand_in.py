"""Something else computes in the place of one module's own forward, for a while and without a trace afterwards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fc_eval.weights.linear
from fc_eval.errors import FcEvalError
from fc_eval.weights.linear import W8A8Linear, activation_dtype


class StandIn:
    """Stands in for the forward of one module, from `install` to `remove`; it never outlives that.

    Afterwards a reference that someone has kept computes the module's own forward, and a copy or a pickle of the module
    made meanwhile holds its own forward from the start. A subclass is called as the forward is, and asks `active`.

    Attributes:
        module: the module; weights are read at each call (they may be offloaded in between).
        name: its full name.
        active: whether it stands in for the forward now.
        own: the module's own forward.

    Raises:
        FcEvalError: the module communicates already.
    """

    active: bool

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        # accelerate's hook brings an offloaded weight in and then calls `_old_forward`.
        self._attribute = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
        found = getattr(module, self._attribute)
        if isinstance(found, StandIn) and found.active:
            raise FcEvalError(
                f"{name} communicates already, in this model or another that shares it: leave the other `with` block "
                "first"
            )
        self.own: Callable[..., Any] = found
        self._was_set = self._attribute in vars(module)
        self.active = False

    def install(self) -> None:
        """Puts this in the place of the layer's forward."""
        setattr(self.module, self._attribute, self)
        self.active = True

    def remove(self) -> None:
        """Puts back what was there; what others have put in its place meanwhile stays."""
        self.active = False
        # accelerate moves a forward from one to the other when it hooks a layer or lets go of it.
        if vars(self.module).get("_old_forward") is self:
            setattr(self.module, "_old_forward", self.own)  # noqa: B010 - not an attribute that nn.Linear declares
        if vars(self.module).get("forward") is self:
            if self._was_set:
                setattr(self.module, "forward", self.own)  # noqa: B010 - mypy knows it as a method
            else:
                delattr(self.module, "forward")

    def __reduce__(self) -> tuple[Callable[..., object], tuple[nn.Module, str]]:
        # A copied or unpickled module is still empty here, so this is its class's forward, bound to it.
        return getattr, (self.module, "forward")


class LinearStandIn(StandIn):
    """Stands in for the forward of one `nn.Linear`.

    Attributes:
        module: the layer.

    Raises:
        FcEvalError: the layer communicates already, or something else stands in for its forward.
    """

    module: nn.Linear

    def __init__(self, module: nn.Linear, name: str) -> None:
        super().__init__(module, name)
        _check_own(module, self.own, name)
        self.own: Callable[..., torch.Tensor]

    def check_call(self, input: torch.Tensor) -> None:
        """Makes sure that a call can be computed slice by slice, as ranks would.

        Raises:
            FcEvalError: gradients are wanted, the dtypes differ, or the weight is not in memory.
        """
        weight, dtype = self.module.weight, activation_dtype(self.module)
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            raise FcEvalError(
                f"{self.name} was called with gradients enabled: the emulated all-reduce is for evaluation only; "
                "run the model under torch.no_grad()"
            )
        if weight.is_meta:
            raise FcEvalError(f"the weight of {self.name} is not in memory (meta device): load it with its weights")
        if input.dtype != dtype or torch.is_autocast_enabled(input.device.type):
            raise FcEvalError(
                f"{self.name} got {input.dtype} for its {dtype} weight, or runs under autocast: "
                "load the whole model in one dtype, and evaluate without autocast"
            )


def _check_own(module: nn.Linear, found: Any, name: str) -> None:
    """Makes sure that what is replaced is the layer's own forward: anything else would be passed over in silence."""
    function = getattr(found, "__func__", None)
    # A function of the class's own file, since someone may have patched the class as well.
    files = {nn.Linear: vars(nn.modules.linear), W8A8Linear: vars(fc_eval.weights.linear)}
    patched = function is not type(module).forward or function.__globals__ is not files.get(type(module))
    if patched or found.__self__ is not module:
        what = getattr(found, "__qualname__", type(found).__qualname__)
        raise FcEvalError(
            f"the forward of {name} was replaced by {what!r}, which the emulated split would pass over: "
            "give the layer its own forward back, or put a forward hook around it"
        )
