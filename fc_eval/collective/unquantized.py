"""All-reduce without quantization: the fp32-ordered baseline, and the framework's own as it adds at W = 2."""

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.canonical import canonical_nan_, round_to_dtype
from fc_eval.collective.comm import Comm


def fp32_ordered(partials_WTH: torch.Tensor, comm: Comm, codec: Codec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Partial sums [W, T, H] to values [T, H] in their dtype: the baseline of every difference; no stage quantizes.

    +0, then every partial sum in fp32 in rank order, rounded once.
    """
    total = partials_WTH[0].float() + 0.0
    for partial in partials_WTH[1:]:
        total.add_(partial)
    return round_to_dtype(total, partials_WTH.dtype), []


def plain(partials_WTH: torch.Tensor, comm: Comm, codec: Codec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Partial sums [W, T, H] to values [T, H] in their dtype, each addition rounded, in rank order from rank 0.

    `torch.distributed.all_reduce` adds in an order of its own; equality with it is claimed at W = 2 only.
    """
    total = partials_WTH[0].clone()
    for partial in partials_WTH[1:]:
        total.add_(partial)
    return canonical_nan_(total), []
