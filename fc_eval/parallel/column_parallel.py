"""One column-parallel layer on one device, computed rank by rank: the numbers that real ranks get.

Rank r of W holds rows [r * N/W, (r + 1) * N/W) of a column-parallel weight [N, K], and computes those features of the
output from the whole input. A matrix product may round otherwise when its shape changes, so the product with the whole
weight is not always the same bits.
"""

import torch
from torch import nn
from torch.nn import functional

from fc_eval.codec.eager import eager
from fc_eval.parallel.stand_in import LinearStandIn


class ColumnParallelForward(LinearStandIn):
    """Stands in for the forward of one column-parallel `nn.Linear`; `world_size` is W, which divides its output."""

    def __init__(self, module: nn.Linear, name: str, world_size: int) -> None:
        super().__init__(module, name)
        self.world_size = world_size

    @eager
    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # named as in nn.Linear.forward
        """[..., K] to [..., N].

        Raises:
            FcEvalError: gradients are wanted, the dtypes differ, or the weight is not in memory.
        """
        if not self.active:
            return self.own(input)
        self.check_call(input)
        # Copies, as a rank holds them: products of single tokens in fp32 depend on where in memory a weight begins.
        weights = [weight.clone() for weight in self.module.weight.chunk(self.world_size)]
        biases = [None] * self.world_size if self.module.bias is None else self.module.bias.chunk(self.world_size)
        parts = [functional.linear(input, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return torch.cat(parts, dim=-1)
