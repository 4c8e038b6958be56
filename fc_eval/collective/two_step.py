"""Two-step all-reduce (two-shot elsewhere; Flash Communication, arXiv 2412.04964, algorithm 1).

    every rank --encode, all-to-all--> owner of a block: decode, sum, round --encode, all-gather--> every rank: decode

Groups lie in one row, so rows can be reduced in any portions with the same result.
"""

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.collective.comm import Comm
from fc_eval.collective.ordered_sum import sum_decoded


def two_step(partials_WTH: torch.Tensor, comm: Comm, codec: Codec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Partial sums [W, T, H] to values [T, H] in their dtype, and the non-finite groups of both stages, int64 []."""
    assert comm.reduce is not None
    assert comm.gather is not None
    reduced = sum_decoded(partials_WTH, comm.reduce, codec)
    dtype = partials_WTH.dtype
    gathered = codec.round_trip(reduced.values.to(dtype), comm.gather)
    return round_to_dtype(gathered.values, dtype), [reduced.nonfinite_groups, gathered.nonfinite_groups]
