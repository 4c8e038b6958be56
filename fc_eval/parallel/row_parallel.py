"""One row-parallel layer on one device: W partial sums, the all-reduce, and the bias once.

Rank r of W holds columns [r * K/W, (r + 1) * K/W) of a row-parallel weight [H, K] and the same slice of its input
[T, K]; its partial sum [T, H] is rounded to the model's dtype, as a real rank's is before it is sent. The checkpoint's
weights are sliced as views and never written.

T tokens (all leading dimensions of the input), K input features, H output features, W ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fc_eval.codec.eager import eager
from fc_eval.errors import FcEvalError
from fc_eval.parallel.site import Site


def partial_sums(x_TK: torch.Tensor, weight_HK: torch.Tensor, world_size: int) -> torch.Tensor:
    """The partial sums of all ranks, each a matrix product of one slice.

    Args:
        x_TK: input [T, K] in bf16, fp16 or fp32; T may be 0.
        weight_HK: weight [H, K] in the same dtype, on the same device.
        world_size: W, a divisor of K.

    Returns:
        [W, T, H] in the same dtype: rank r's partial sum, rounded as a real rank's, at index r.
    """
    width = x_TK.shape[1] // world_size
    partials_WTH = x_TK.new_empty((world_size, x_TK.shape[0], weight_HK.shape[0]))
    for rank in range(world_size):
        columns = slice(rank * width, (rank + 1) * width)
        # What nn.Linear computes without its bias; written in place, which spares a copy of every partial.
        torch.mm(x_TK[:, columns], weight_HK[:, columns].t(), out=partials_WTH[rank])
    return partials_WTH


class RowParallelForward:
    """Stands in for the forward of one `nn.Linear`, from `install` to `remove`; it never outlives that.

    Afterwards a reference that someone has kept computes the layer's own forward, and a copy or a pickle of the layer
    made meanwhile holds its own forward from the start.

    Attributes:
        module: the layer, whose weight and bias are read at each call (they may be offloaded in between).
        site: what is known of it.
        world_size: W.
        reduce: the all-reduce of this site, [W, T, H] to [T, H].

    Raises:
        FcEvalError: the layer communicates already, or something else stands in for its forward.
    """

    def __init__(
        self, module: nn.Linear, site: Site, world_size: int, reduce: Callable[[Site, torch.Tensor], torch.Tensor]
    ) -> None:
        self.module, self.site, self.world_size, self.reduce = module, site, world_size, reduce
        # accelerate's hook brings an offloaded weight in and then calls `_old_forward`.
        self._attribute = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
        self._own = _own_forward(module, getattr(module, self._attribute), site.name)
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
            setattr(self.module, "_old_forward", self._own)  # noqa: B010 - not an attribute that nn.Linear declares
        if vars(self.module).get("forward") is self:
            if self._was_set:
                setattr(self.module, "forward", self._own)  # noqa: B010 - mypy knows it as a method
            else:
                delattr(self.module, "forward")

    def __reduce__(self) -> tuple[Callable[..., object], tuple[nn.Module, str]]:
        # A copied or unpickled module is still empty here, so this is its class's forward, bound to it.
        return getattr, (self.module, "forward")

    @eager
    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # named as in nn.Linear.forward
        """[..., K] to [..., H], the same bits in a compiled model.

        Raises:
            FcEvalError: gradients are wanted, the dtypes differ, or the weight is not in memory.
        """
        if not self.active:
            return self._own(input)
        weight, bias = self.module.weight, self.module.bias
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            raise FcEvalError(
                f"{self.site.name} was called with gradients enabled: the emulated all-reduce is for evaluation only; "
                "run the model under torch.no_grad()"
            )
        if weight.is_meta:
            raise FcEvalError(
                f"the weight of {self.site.name} is not in memory (meta device): load it with its weights"
            )
        if input.dtype != weight.dtype or torch.is_autocast_enabled(input.device.type):
            raise FcEvalError(
                f"{self.site.name} got {input.dtype} for its {weight.dtype} weight, or runs under autocast: "
                "load the whole model in one dtype, and evaluate without autocast"
            )
        with torch.no_grad():
            partials_WTH = partial_sums(input.reshape(-1, self.site.in_features), weight, self.world_size)
            y_TH = self.reduce(self.site, partials_WTH)
            if bias is not None:
                y_TH = y_TH + bias
        return y_TH.view(*input.shape[:-1], self.site.out_features)


def _own_forward(module: nn.Linear, found: Any, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is to be replaced, if that is nn.Linear's own forward: anything else would be passed over in silence."""
    if isinstance(found, RowParallelForward) and found.active:
        raise FcEvalError(
            f"{name} communicates already, in this model or another that shares it: leave the other `with` block first"
        )
    function = getattr(found, "__func__", None)
    # A function of torch's own file, since someone may have patched the class as well.
    patched = function is not nn.Linear.forward or function.__globals__ is not vars(nn.modules.linear)
    if patched or found.__self__ is not module:
        what = getattr(found, "__qualname__", type(found).__qualname__)
        raise FcEvalError(
            f"the forward of {name} was replaced by {what!r}, which the emulated split would pass over: "
            "give the layer its own forward back, or put a forward hook around it"
        )
    own: Callable[[torch.Tensor], torch.Tensor] = found
    return own
