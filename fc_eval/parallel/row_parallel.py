"""One row-parallel layer on one device: W partial sums, the all-reduce, and the bias once.

Rank r of W holds columns [r * K/W, (r + 1) * K/W) of a row-parallel weight [H, K] and the same slice of its input
[T, K]; its partial sum [T, H] is rounded to the model's dtype, as a real rank's is before it is sent. The checkpoint's
weights are sliced as views and never written.

T tokens (all leading dimensions of the input), K input features, H output features, W ranks, S = K / W.
"""

from collections.abc import Callable

import torch
from torch import nn

from fc_eval.codec.eager import eager
from fc_eval.parallel.site import Site
from fc_eval.parallel.stand_in import LinearStandIn
from fc_eval.weights.int8 import Rows, product
from fc_eval.weights.linear import W8A8Linear


def partial_sums(
    x_TK: torch.Tensor, weight: torch.Tensor | Rows, world_size: int, contiguous: bool = False
) -> torch.Tensor:
    """The partial sums [W, T, H] of all ranks, each a matrix product of one slice, in the dtype of the input.

    Args:
        x_TK: the whole input.
        weight: the whole weight [H, K], in the dtype of the input or in INT8. In INT8 each rank quantizes its slice of
            the input by itself, with the scale of that slice.
        world_size: W, which divides K.
        contiguous: each slice and each product in memory of its own, as in a real rank; a matrix product may depend on
            how its operands lie.
    """
    width = x_TK.shape[1] // world_size
    weight_HK = weight.codes if isinstance(weight, Rows) else weight
    partials_WTH = x_TK.new_empty((world_size, x_TK.shape[0], weight_HK.shape[0]))
    for rank in range(world_size):
        columns = slice(rank * width, (rank + 1) * width)
        x_TS, weight_HS = x_TK[:, columns], weight_HK[:, columns]
        if isinstance(weight, Rows):
            partials_WTH[rank] = product(x_TS, Rows(weight_HS, weight.scale))
        # What nn.Linear computes without its bias.
        elif contiguous:  # clones, because a slice of a single row counts as contiguous where it lies
            x, w = (values.clone(memory_format=torch.contiguous_format) for values in (x_TS, weight_HS))
            partials_WTH[rank] = torch.mm(x, w.t())
        else:  # written in place, which spares a copy of every partial
            torch.mm(x_TS, weight_HS.t(), out=partials_WTH[rank])
    return partials_WTH


class RowParallelForward(LinearStandIn):
    """Stands in for the forward of one row-parallel `nn.Linear`.

    Attributes:
        site: what is known of it.
        world_size: how many slices there are: W, or 1 for the part of one rank alone.
        reduce: the all-reduce of this site, [W, T, H] to [T, H].
        contiguous: as in `partial_sums`.

    Raises:
        FcEvalError: the layer communicates already, or something else stands in for its forward.
    """

    def __init__(
        self,
        module: nn.Linear,
        site: Site,
        world_size: int,
        reduce: Callable[[Site, torch.Tensor], torch.Tensor],
        contiguous: bool = False,
    ) -> None:
        super().__init__(module, site.name)
        self.site, self.world_size, self.reduce, self.contiguous = site, world_size, reduce, contiguous

    @eager
    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # named as in nn.Linear.forward
        """[..., K] to [..., H], the same bits in a compiled model.

        Raises:
            FcEvalError: gradients are wanted, the dtypes differ, or the weight is not in memory.
        """
        if not self.active:
            return self.own(input)
        self.check_call(input)
        with torch.no_grad():
            x_TK = input.reshape(-1, self.site.in_features)
            weight = self.module.rows if isinstance(self.module, W8A8Linear) else self.module.weight
            partials_WTH = partial_sums(x_TK, weight, self.world_size, self.contiguous)
            y_TH = self.reduce(self.site, partials_WTH)
            if self.module.bias is not None:
                y_TH = y_TH + self.module.bias
        return y_TH.view(*input.shape[:-1], self.site.out_features)
